"""Gradients that travel together: which ones, and the flat buffer that carries them."""

from __future__ import annotations

import gc
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dualdist.backends.base import Backend, Buffer, Settling, Work
from dualdist.compression import Cast, Compressor
from dualdist.errors import CollectiveError, UsageError
from dualdist.holders import is_kept, referred_to, uses
from dualdist.reductions import allreduce_, divide, divide_, sparse_sum
from dualdist.streams import Streams

# Note [sparse gradients]: that a gradient is sparse is known only when it is there, and never to a rank whose loss does
# not touch the parameter. So the ranks tell each other by flags in the bucket, and what any of them has sparse is
# reduced apart, in parameter order, after the buckets: as a dense one where another rank has it dense (of tied weights
# a loss may touch one use only). From then on its place in the bucket is empty.

# Note [gradients in the bucket]: the parameters' gradients become views of the row in which what has been reduced lies;
# a copy is made only where a program keeps the tensor that autograd made. A row in which somebody still looks at
# gradients (a parameter that was not set to None, or a program that has kept one) is not written to again: another
# takes its place until then. Of rows in memory that ranks share there are few, and one must be free when the next
# round begins: where none would be, what has been reduced is copied to a row of this rank's own. A program may move a
# gradient to other memory (`param.grad.data = x`), or all that lies beside it too (share_memory_()): then the row is no
# row any more, and another is made in its place.

GradientOp = Literal["mean", "sum", "adasum"]

# A small first bucket starts the first transfer early; the size of the others is DDP's. Gradients that would not fill
# two first ones travel together: another transfer costs more than it hides.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
# Smaller gradients are gathered together, when the bucket leaves: a call for each would take longer than its copy.
LARGE_BYTES = 32 << 10


@dataclass(frozen=True)
class Recipe:
    """What happens to gradients on their way; the same on every rank.

    `predivide` divides before the sum and multiplies after it, where a sum could overflow. With `dense`, sparse
    gradients travel as dense ones.
    """

    op: GradientOp = "mean"
    compressor: Compressor | None = None
    predivide: float = 1.0
    dense: bool = False
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES

    @property
    def words(self) -> str:
        """For the comparison between ranks."""
        wire = self.compressor and (
            self.compressor.dtype if isinstance(self.compressor, Cast) else _name_of(self.compressor)
        )
        sizes = f"{self.first_bucket_bytes}, {self.bucket_bytes}"
        return f"op={self.op} compression={wire} predivide={self.predivide} sparse_as_dense={self.dense} bytes={sizes}"


def bucket_bytes(name: str, mebibytes: float) -> int:
    """The size of a bucket, as a caller gives it."""
    if not 0 < mebibytes < float("inf"):
        raise UsageError(f"{name}={mebibytes}: expected a size in MiB, above 0")
    return max(1, int(mebibytes * 2**20))


def wire_dtype(dtype: torch.dtype, recipe: Recipe) -> torch.dtype | None:
    """In which dtype gradients travel; None where a compressor of the user's own decides."""
    if recipe.compressor is None:
        return dtype
    if isinstance(recipe.compressor, Cast):
        return recipe.compressor.dtype if dtype.is_floating_point else dtype
    return None


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """The strides that autograd gives the parameter's gradient: its own, or without gaps where those have some."""
    return torch.empty_like(param, device="meta").stride()


def _name_of(compressor: Compressor) -> str:
    kind = compressor if isinstance(compressor, type) else type(compressor)
    return kind.__name__


def plan_buckets(
    params: Sequence[torch.Tensor], order: Sequence[int], recipe: Recipe, groups: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Which of the numbered parameters travel together, given the order in which autograd finishes them.

    A bucket holds one device and one dtype, and is closed by the parameter that fills it. Of the given groups, each
    travels in buckets of its own, one for each device and dtype.
    """
    limits = recipe.first_bucket_bytes, recipe.bucket_bytes
    if not groups:
        return _split(params, order, limits)
    fresh, grouped = set(order), {number for group in groups for number in group}
    buckets = _split(params, [number for number in order if number not in grouped], limits)
    for group in groups:
        buckets += _split(params, sorted(fresh.intersection(group), reverse=True), None)
    return sorted(buckets, key=max, reverse=True)


def _split(
    params: Sequence[torch.Tensor], order: Sequence[int], limits: tuple[int, int] | None
) -> list[tuple[int, ...]]:
    buckets: list[tuple[int, ...]] = []
    open_members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    open_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    if limits is not None and sum(params[number].nbytes for number in order) < 2 * limits[0]:
        limits = None
    for number in order:
        kind = (params[number].device, params[number].dtype)
        open_members.setdefault(kind, []).append(number)
        open_bytes[kind] = open_bytes.get(kind, 0) + params[number].nbytes
        if limits is not None and open_bytes[kind] >= limits[bool(buckets)]:
            buckets.append(tuple(open_members.pop(kind)))
            del open_bytes[kind]
    return buckets + [tuple(members) for members in open_members.values()]


@dataclass(frozen=True)
class BucketPlan:
    """Which gradients travel together, the same on every rank; the members `apart` travel by themselves."""

    name: str
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    place: int  # of the buffer, as the line has reserved it
    apart: frozenset[int] = frozenset()

    @property
    def counts(self) -> list[int]:
        """How many elements of each member travel in the bucket."""
        return [0 if number in self.apart else shape.numel() for number, shape in enumerate(self.shapes)]

    @property
    def length(self) -> int:
        """Elements of the whole buffer: behind the gradients two flags for each member, and one for the bucket."""
        return sum(self.counts) + 2 * len(self.shapes) + 1


# Makes the row of that number.
Make = Callable[[int], "Flat | None"]


class Flat:
    """A row of elements, and in it a view of each gradient and the tail of flags."""

    def __init__(self, values: torch.Tensor, plan: BucketPlan, number: int, buffer: Buffer | None = None) -> None:
        counts = plan.counts
        alone = uses(values) - 1
        self.number = number  # among the rows of its bucket
        self.values = values
        self.buffer = buffer  # whose values these are
        self.gradients, self.tail = values[: sum(counts)], values[sum(counts) :]
        pieces = self.gradients.split(counts)
        self.views = {
            number: piece.as_strided(plan.shapes[number], plan.strides[number], piece.storage_offset())
            for number, piece in enumerate(pieces)
            if number not in plan.apart
        }
        del pieces  # which would count as kept
        self.all_views = list(self.views.values())
        self._references = referred_to(self.all_views)
        self._address, self._addresses = values.data_ptr(), list(map(torch.Tensor.data_ptr, self.all_views))
        # Counted, not measured: what others drop meanwhile must not matter.
        self._uses = len((values, self.gradients, self.tail)) + len(self.views)
        # The rows in this memory: buckets that take each other's place may lie there at the same time.
        self._rows: weakref.WeakSet[Flat] = weakref.WeakSet() if buffer is None else buffer.rows
        self._uses_without_rows = alone if buffer is None else buffer.uses_without_rows
        self._rows.add(self)

    def is_kept(self) -> bool:
        """Whether anybody else looks at these elements: parameters' gradients, and what a program has kept of them."""
        rows = list(self._rows)  # none of which is collected while they are counted
        ours = self._uses_without_rows + sum(row._uses for row in rows)
        return uses(self.values) > ours or any(row._is_referred_to() for row in rows)

    def has_moved(self) -> bool:
        """Whether a program has moved something that lay here to other memory: Note [gradients in the bucket]."""
        addresses = list(map(torch.Tensor.data_ptr, self.all_views))
        return self.values.data_ptr() != self._address or addresses != self._addresses

    def _is_referred_to(self) -> bool:
        return any(map(operator.gt, referred_to(self.all_views), self._references))


class Rows:
    """Rows of one bucket that take turns, made where they are needed: `make(number)`, None where there is no other."""

    def __init__(self) -> None:
        self._rows: list[Flat] = []  # the last is the one that was used last; of more than two the others are forgotten

    def free(self, make: Make) -> Flat:
        """A row to write to, in which nobody looks."""
        row = self._find(self._rows) or self._new(make)
        if row is None:
            gc.collect()  # what looks at them may be garbage already
            row = self._find(self._rows)
        if row is None:
            raise CollectiveError("the program looks at gradients in all the memory that ranks share for them")
        others = [other for other in self._rows if other is not row]
        self._rows = [*others[-1:], row]
        return row

    def has_another(self, make: Make) -> bool:
        """Whether one would be free if somebody looked at the one that was used last."""
        last = self._rows[-1]
        has_one = self._find(self._rows[:-1]) is not None or self._new(make) is not None
        self._rows.sort(key=lambda row: row is last)
        return has_one

    def clear(self) -> None:
        self._rows.clear()

    def _find(self, rows: Sequence[Flat]) -> Flat | None:
        for row in rows[::-1]:
            if not row.is_kept():
                if not row.has_moved():
                    return row
                self._rows.remove(row)
        return None

    def _new(self, make: Make) -> Flat | None:
        while (row := make(self._lowest_number())) is not None:
            self._rows = [*self._rows, row][-2:]
            if not row.is_kept():  # else an earlier bucket's gradients lie there
                return row
        return None

    def _lowest_number(self) -> int:
        """Of a row that is not there."""
        taken = {row.number for row in self._rows}
        return next(number for number in itertools.count() if number not in taken)


class Bucket:
    """Gathers gradients in a flat buffer, with what the ranks tell each other behind them, and has it reduced.

    Those are two flags for each member, "I had a dense gradient" and "I had a sparse one", and one for the bucket: "I
    take part".
    """

    def __init__(self, plan: BucketPlan, recipe: Recipe, line: Backend) -> None:
        self.plan = plan
        self.recipe = recipe
        self.waiting_for = len(plan.shapes)
        self.streams = Streams(plan.device) if plan.device.type == "cuda" else None
        self._line = line
        self._wire_dtype = wire_dtype(plan.dtype, recipe)
        self._cast: Buffer | None = None  # what travels, where that is a smaller dtype
        self._rows, self._own_rows = Rows(), Rows()
        self._sent: Flat | None = None  # where gradients are gathered
        self._reduced: Flat | None = None  # where they lie afterwards, and become the parameters'
        self._packed: dict[int, tuple[torch.Tensor, int]] = {}  # the gradients as they were taken in
        self._is_begun = False
        self._work: Work | None = None
        self._result: torch.Tensor | None = None
        self._contexts: list[Any] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []  # a compressor may choose one for each gradient
        self.large = {
            number
            for number, shape in enumerate(plan.shapes)
            if shape.numel() * plan.dtype.itemsize >= LARGE_BYTES and plan.device.type == "cpu"
        }
        self._all_dense = torch.tensor([1.0] * len(plan.shapes) + [0.0] * len(plan.shapes) + [1.0], device="cpu")

    def _begin(self) -> Flat:
        """The row to gather this round's gradients in: Note [gradients in the bucket]."""
        if self._sent is None or not self._is_begun:
            self._sent = self._rows.free(self._new_row)
        self._is_begun = True
        return self._sent

    def _new_row(self, number: int) -> Flat | None:
        if self._wire_dtype == self.plan.dtype and self.plan.dtype in self._line.reducible:
            buffer = self._new_buffer(self.plan.dtype, number)
            return None if buffer is None else Flat(buffer.values, self.plan, number, buffer)
        return self._own_row(number)

    def _new_buffer(self, dtype: torch.dtype, number: int) -> Buffer | None:
        return self._line.buffer(self.plan.place, number, self.plan.length, dtype, self.plan.device)

    def _own_row(self, number: int) -> Flat:
        return Flat(torch.empty(self.plan.length, dtype=self.plan.dtype, device=self.plan.device), self.plan, number)

    def begin_anew(self) -> None:
        """What was taken in and not launched is forgotten: memory that ranks share may be another's meanwhile."""
        self._packed.clear()
        self._is_begun = False
        if self.streams is not None:
            self.streams.forget()

    def pack(self, number: int, grad: torch.Tensor | None) -> None:
        """Take in a gradient as soon as it is finished, while it is in the processor's cache; of the large ones."""
        if grad is None or grad.is_sparse:
            return
        view = self._begin().views.get(number)
        if view is not None:
            view.copy_(grad.detach())
            self._packed[number] = grad, grad._version

    @torch.no_grad()
    def launch(self, grads: Sequence[torch.Tensor | None], *, takes_part: bool = True) -> None:
        """Gather what is not there yet and send it off; a rank that has joined sends zeros, and does not take part."""
        flat = self._begin()
        dense = [grad for grad in grads if not (grad is None or grad.is_sparse)]
        if self.streams is not None:
            self.streams.join(dense)
        if len(dense) == len(flat.all_views) == len(grads) and not self._packed:
            torch._foreach_copy_(flat.all_views, dense)
        else:
            self._gather(flat, grads)
        if self.recipe.predivide != 1.0:
            flat.gradients.div_(self.recipe.predivide)
        flat.tail.copy_(self._flags(grads, takes_part))
        self.begin_anew()
        self._send(flat)

    def _gather(self, flat: Flat, grads: Sequence[torch.Tensor | None]) -> None:
        """What is not there yet; zeros where there is nothing."""
        packed, views, late = self._packed, [], []
        for number, view in flat.views.items():
            grad = grads[number]
            if grad is None or (grad.is_sparse and not self.recipe.dense):
                view.zero_()
                continue
            taken = packed.get(number)
            # A program's own hook may have changed it since it was taken in.
            if taken is None or taken[0] is not grad or taken[1] != grad._version:
                views.append(view)
                late.append(grad.to_dense() if grad.is_sparse else grad)
        if late:
            torch._foreach_copy_(views, late)

    def _send(self, flat: Flat) -> None:
        name = self.plan.name
        if flat.buffer is not None:
            self._work = flat.buffer.allreduce("sum", name, Settling(flat.gradients.numel(), self._settle))
        elif self._wire_dtype in (None, self.plan.dtype) or self._wire_dtype not in self._line.reducible:
            self._work = allreduce_(self._line, self._compressed(flat), "sum", name)
        else:
            self._cast = self._cast or self._new_buffer(self._wire_dtype, 0)
            assert self._cast is not None, "number 0 is always there"
            self._cast.values.copy_(flat.values)
            self._work = self._cast.allreduce("sum", name, Settling(0, self._settle))

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """What was sent has been reduced."""
        if self._work is not None:
            self._result = self._work.wait()
            self._work = None

    def drop(self) -> None:
        """This rank will not use the bucket again."""
        self._line.drop(self.plan.place)
        self._sent = self._reduced = self._cast = self._result = None
        self._rows.clear()
        self._own_rows.clear()

    def ranks_taking_part(self) -> int:
        """How many ranks have not joined, after wait()."""
        assert self._result is not None, "asked after wait()"
        last = self._result.view(-1)[-1]
        return round(float(last.real if last.is_complex() else last))

    @torch.no_grad()
    def put_back(self, params: Sequence[torch.Tensor]) -> list[tuple[int, bool]]:
        """Give the parameters what was reduced, after unpack(); one that no rank used keeps None.

        Returns the members that are to be reduced apart, and whether as dense ones.
        """
        reduced = self._done_flat()
        is_used_by_me = all(param.grad is not None and not param.grad.is_sparse for param in params)
        # Reading the flags makes the program wait for a GPU: not where this rank has all gradients, dense as usual.
        told = None if is_used_by_me and not self.plan.apart and reduced.values.is_cuda else self.told()
        targets, sources = [], []
        for number, view in reduced.views.items():
            dense, sparse = (True, False) if told is None else told[number]
            param = params[number]
            if sparse and not dense and self.recipe.dense:
                param.grad = view.to_sparse(_sparse_dim(param.grad))
            elif dense and (not sparse or self.recipe.dense):
                grad = param.grad
                if grad is view:
                    continue
                if grad is None or grad.is_sparse or not is_kept(grad):
                    param.grad = view
                else:
                    targets.append(grad)
                    sources.append(view)
            grad = None  # which would count as kept
        if targets:
            torch._foreach_copy_(targets, sources)
        return [] if told is None else self.to_reduce_apart(told)

    def told(self) -> list[tuple[bool, bool]]:
        """For each member, whether any rank had a dense gradient and whether any had a sparse one, after unpack()."""
        flags = (self._done_flat().tail[:-1].abs() > 0).tolist()
        return list(zip(flags[: len(flags) // 2], flags[len(flags) // 2 :], strict=True))

    def to_reduce_apart(self, told: Sequence[tuple[bool, bool]]) -> list[tuple[int, bool]]:
        """The members that do not travel in the bucket now, and whether as dense ones: Note [sparse gradients]."""
        return [
            (number, dense)
            for number, (dense, sparse) in enumerate(told)
            if (sparse and not self.recipe.dense) or (dense and number in self.plan.apart)
        ]

    @torch.no_grad()
    def reduce_apart(self, number: int, grad: torch.Tensor | None, *, as_dense: bool) -> torch.Tensor:
        """The reduction of a member that travels by itself, None counting as zero."""
        line, plan, op = self._line, self.plan, self.recipe.op
        name, shape = f"{plan.name}.{number}", plan.shapes[number]
        if not as_dense:
            if grad is None:
                rows = torch.empty(1, 0, dtype=torch.int64, device=plan.device)
                values = torch.empty(0, *shape[1:], dtype=plan.dtype, device=plan.device)
                grad = torch.sparse_coo_tensor(rows, values, shape, check_invariants=False)
            return sparse_sum(line, grad.detach(), op, name)
        total = torch.zeros(shape, dtype=plan.dtype, device=plan.device)
        if grad is not None:
            total.copy_(grad.to_dense() if grad.is_sparse else grad)
        allreduce_(line, total, "sum", name).wait()
        return divide_(total, line.size) if op == "mean" else total

    def _flags(self, grads: Sequence[torch.Tensor | None], takes_part: bool) -> torch.Tensor:
        dense = [not (grad is None or grad.is_sparse) for grad in grads]
        if takes_part and all(dense):
            return self._all_dense
        sparse = [grad is not None and grad.is_sparse for grad in grads]
        return torch.tensor([*dense, *sparse, takes_part], dtype=torch.float32, device="cpu")

    def _compressed(self, flat: Flat) -> torch.Tensor:
        """What goes over the wire: the row itself, or smaller tensors."""
        compressor = self.recipe.compressor
        if compressor is None or isinstance(compressor, Cast):
            return flat.values if compressor is None else compressor.compress(flat.values)[0]
        pairs = [compressor.compress(view) for view in flat.views.values()]
        sent = [tensor for tensor, _ in pairs]
        self._contexts = [ctx for _, ctx in pairs]
        self._shapes, self._dtypes = [tensor.shape for tensor in sent], [tensor.dtype for tensor in sent]
        if len({dtype.is_floating_point or dtype.is_complex for dtype in self._dtypes}) > 1:
            raise UsageError(
                f"{_name_of(compressor)} made integers of some gradients and not of others: {set(self._dtypes)}; "
                "let it make one kind of all"
            )
        return torch.cat([*(tensor.reshape(-1) for tensor in sent), flat.tail.to(sent[0].dtype if sent else None)])

    @torch.no_grad()
    def unpack(self) -> None:
        """The reduced gradients, divided where they shall be a mean, lie in their places, after wait()."""
        sent, result = self._sent, self._result
        assert sent is not None, "unpacked after launch()"
        assert result is not None, "unpacked after wait()"
        is_settled = result is sent.values and sent.buffer is not None and sent.buffer.settles
        flat = self._reduced = self._row_for(result, sent, not is_settled or self._rows.has_another(self._new_row))
        is_elsewhere = result.data_ptr() != flat.values.data_ptr()
        if self.recipe.compressor is not None and not isinstance(self.recipe.compressor, Cast):
            self._decompress_each(flat, result, self.recipe.compressor)
            self._multiply(flat.gradients)
        elif is_elsewhere and result.dtype == flat.values.dtype and self.recipe.op == "mean" and not is_settled:
            count = flat.gradients.numel()
            divide(result[:count], self._line.size, flat.gradients)  # in one pass
            flat.tail.copy_(result[count:])
            self._multiply(flat.gradients)
        else:
            if is_elsewhere:
                flat.values.copy_(result)
            if not is_settled:
                self._settle(flat.gradients)

    def _settle(self, sums: torch.Tensor) -> None:
        """Sums over the ranks become, in place, what the recipe makes of them."""
        if self.recipe.op == "mean":
            divide_(sums, self._line.size)
        self._multiply(sums)

    def _multiply(self, sums: torch.Tensor) -> None:
        if self.recipe.predivide != 1.0:
            sums.mul_(self.recipe.predivide)

    def _row_for(self, result: torch.Tensor, sent: Flat, may_stay: bool) -> Flat:
        """Where the result shall lie: where it was sent from, but for what cannot stay in memory that ranks share."""
        if sent.buffer is None or (result.data_ptr() == sent.values.data_ptr() and may_stay):
            return sent
        return self._own_rows.free(self._own_row)

    def _done_flat(self) -> Flat:
        assert self._reduced is not None, "asked after unpack()"
        return self._reduced

    def _decompress_each(self, flat: Flat, result: torch.Tensor, compressor: Compressor) -> None:
        sums, tail = result.tensor_split([result.numel() - flat.tail.numel()])
        flat.tail.copy_(tail)
        is_mean, can_divide = self.recipe.op == "mean", sums.is_floating_point() or sums.is_complex()
        if is_mean and can_divide:
            divide_(sums, self._line.size)
        pieces = sums.split([shape.numel() for shape in self._shapes])
        sent = zip(pieces, self._shapes, self._dtypes, self._contexts, strict=True)
        for view, (piece, shape, dtype, ctx) in zip(flat.views.values(), sent, strict=True):
            view.copy_(compressor.decompress(piece.view(shape).to(dtype), ctx))
        if is_mean and not can_divide:
            divide_(flat.gradients, self._line.size)


def _sparse_dim(grad: torch.Tensor | None) -> int:
    """How many dimensions of a sparse gradient are indices: an embedding's is 1, the row."""
    return grad.sparse_dim() if grad is not None and grad.is_sparse else 1
