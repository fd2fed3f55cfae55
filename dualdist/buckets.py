"""Gradients that travel together: which ones, and the flat buffer that carries them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dualdist.backends.base import Backend, Work
from dualdist.compression import Cast, Compressor
from dualdist.reductions import allreduce_, divide_, sparse_sum

# Note [sparse gradients]: that a gradient is sparse is known only when it is there, and never to a rank whose loss does
# not touch the parameter. So the ranks tell each other by flags in the bucket, and what any of them has sparse is
# reduced apart, in parameter order, after the buckets: as a dense one where another rank has it dense (of tied weights
# a loss may touch one use only). From then on its place in the bucket is empty.

GradientOp = Literal["mean", "sum", "adasum"]

# A small first bucket starts the first transfer early; the size of the others is DDP's.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


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

    @property
    def words(self) -> str:
        """For the comparison between ranks."""
        wire = self.compressor and (
            self.compressor.dtype if isinstance(self.compressor, Cast) else _name_of(self.compressor)
        )
        return f"op={self.op} compression={wire} predivide={self.predivide} sparse_as_dense={self.dense}"


def _name_of(compressor: Compressor) -> str:
    kind = compressor if isinstance(compressor, type) else type(compressor)
    return kind.__name__


def plan_buckets(
    params: Sequence[torch.Tensor], numbers: Sequence[int], groups: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Which of the numbered parameters travel together, last ones first: autograd finishes the last layers first.

    A bucket holds one device and one dtype, and is closed by the parameter that fills it. Of the given groups, each
    travels in buckets of its own, one for each device and dtype.
    """
    if not groups:
        return _split(params, numbers, FIRST_BUCKET_BYTES)
    fresh, grouped = set(numbers), {number for group in groups for number in group}
    buckets = _split(params, [number for number in numbers if number not in grouped], FIRST_BUCKET_BYTES)
    for group in groups:
        buckets += _split(params, sorted(fresh.intersection(group)), None)
    return sorted(buckets, key=max, reverse=True)


def _split(params: Sequence[torch.Tensor], numbers: Sequence[int], limit: int | None) -> list[tuple[int, ...]]:
    buckets: list[tuple[int, ...]] = []
    open_members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    open_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    for number in reversed(numbers):
        kind = (params[number].device, params[number].dtype)
        open_members.setdefault(kind, []).append(number)
        open_bytes[kind] = open_bytes.get(kind, 0) + params[number].nbytes
        if limit is not None and open_bytes[kind] >= limit:
            buckets.append(tuple(open_members.pop(kind)))
            del open_bytes[kind]
            limit = BUCKET_BYTES
    return buckets + [tuple(members) for members in open_members.values()]


@dataclass(frozen=True)
class BucketPlan:
    """Which gradients travel together, the same on every rank; the members `apart` travel by themselves."""

    name: str
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    apart: frozenset[int] = frozenset()


class Bucket:
    """A flat buffer with a place for each member's gradient, and behind them what the ranks tell each other.

    Those are two flags for each member, "I had a dense gradient" and "I had a sparse one", and one for the bucket: "I
    take part".
    """

    def __init__(self, plan: BucketPlan, recipe: Recipe) -> None:
        self.plan = plan
        self.recipe = recipe
        counts = [0 if number in plan.apart else shape.numel() for number, shape in enumerate(plan.shapes)]
        self.flat = torch.zeros(sum(counts) + 2 * len(counts) + 1, dtype=plan.dtype, device=plan.device)
        self._gradients, self._tail = self.flat[: sum(counts)], self.flat[sum(counts) :]
        pieces = self._gradients.split(counts)
        self._views = {
            number: piece.view(shape)
            for number, (piece, shape) in enumerate(zip(pieces, plan.shapes, strict=True))
            if number not in plan.apart
        }
        self.waiting_for = len(counts)
        self._work: Work | None = None
        self._wire = self.flat
        self._contexts: list[Any] = []
        self._shapes: list[torch.Size] = []

    @torch.no_grad()
    def launch(self, line: Backend, grads: Sequence[torch.Tensor | None], *, takes_part: bool = True) -> None:
        """Copy the gradients in and send them off; a rank that has joined sends none, and does not take part."""
        present = {
            number: grad.to_dense() if grad.is_sparse else grad
            for number, grad in enumerate(grads)
            if grad is not None and number in self._views and (self.recipe.dense or not grad.is_sparse)
        }
        if len(present) < len(self._views):
            self._gradients.zero_()
        if present:
            torch._foreach_copy_([self._views[number] for number in present], list(present.values()))
        if self.recipe.predivide != 1.0:
            self._gradients.div_(self.recipe.predivide)
        self._tail.copy_(self._flags(grads, takes_part))
        self._wire = self._compressed()
        self._work = allreduce_(line, self._wire, "sum", self.plan.name)

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """What was sent has been reduced, and lies in the buffer."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def ranks_taking_part(self) -> int:
        """How many ranks have not joined, after wait()."""
        return round(float(self._wire[-1].real if self._wire.is_complex() else self._wire[-1]))

    @torch.no_grad()
    def put_back(self, params: Sequence[torch.Tensor]) -> list[tuple[int, bool]]:
        """Give the parameters what was reduced, after unpack(); one that no rank used keeps None.

        Returns the members that are to be reduced apart, and whether as dense ones.
        """
        is_used_by_me = all(param.grad is not None and not param.grad.is_sparse for param in params)
        # Reading the flags makes the program wait for a GPU: not where this rank has all gradients, dense as usual.
        told = None if is_used_by_me and not self.plan.apart and self.flat.is_cuda else self.told()
        targets, sources = [], []
        for number, view in self._views.items():
            dense, sparse = (True, False) if told is None else told[number]
            param = params[number]
            if sparse and not dense and self.recipe.dense:
                param.grad = view.to_sparse(_sparse_dim(param.grad))
            elif dense and (not sparse or self.recipe.dense):
                if param.grad is None or param.grad.is_sparse:
                    param.grad = torch.empty_like(param)
                targets.append(param.grad)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
        return [] if told is None else self.to_reduce_apart(told)

    def told(self) -> list[tuple[bool, bool]]:
        """For each member, whether any rank had a dense gradient and whether any had a sparse one, after unpack()."""
        flags = (self._tail[:-1].abs() > 0).tolist()
        return list(zip(flags[: len(flags) // 2], flags[len(flags) // 2 :], strict=True))

    def to_reduce_apart(self, told: Sequence[tuple[bool, bool]]) -> list[tuple[int, bool]]:
        """The members that do not travel in the bucket now, and whether as dense ones: Note [sparse gradients]."""
        return [
            (number, dense)
            for number, (dense, sparse) in enumerate(told)
            if (sparse and not self.recipe.dense) or (dense and number in self.plan.apart)
        ]

    @torch.no_grad()
    def reduce_apart(self, line: Backend, number: int, grad: torch.Tensor | None, *, as_dense: bool) -> torch.Tensor:
        """The reduction of a member that travels by itself, None counting as zero."""
        name, shape, op = f"{self.plan.name}.{number}", self.plan.shapes[number], self.recipe.op
        if not as_dense:
            if grad is None:
                rows = torch.empty(1, 0, dtype=torch.int64, device=self.plan.device)
                grad = torch.sparse_coo_tensor(rows, self.flat.new_empty(0, *shape[1:]), shape, check_invariants=False)
            return sparse_sum(line, grad.detach(), op, name)
        total = self.flat.new_zeros(shape)
        if grad is not None:
            total.copy_(grad.to_dense() if grad.is_sparse else grad)
        allreduce_(line, total, "sum", name).wait()
        return divide_(total, line.size) if op == "mean" else total

    def _flags(self, grads: Sequence[torch.Tensor | None], takes_part: bool) -> torch.Tensor:
        dense = [grad is not None and not grad.is_sparse for grad in grads]
        sparse = [grad is not None and grad.is_sparse for grad in grads]
        return torch.tensor([*dense, *sparse, takes_part], dtype=torch.float32)

    def _compressed(self) -> torch.Tensor:
        """What goes over the wire: the buffer itself, or a smaller one."""
        compressor = self.recipe.compressor
        if compressor is None:
            return self.flat
        if isinstance(compressor, Cast):
            return compressor.compress(self.flat)[0]
        pairs = [compressor.compress(view) for view in self._views.values()]
        sent = [tensor for tensor, _ in pairs]
        self._contexts = [ctx for _, ctx in pairs]
        self._shapes = [tensor.shape for tensor in sent]
        return torch.cat([*(tensor.reshape(-1) for tensor in sent), self._tail.to(sent[0].dtype if sent else None)])

    @torch.no_grad()
    def unpack(self, size: int) -> None:
        """The reduced gradients, divided where they shall be a mean, lie in their places, after wait()."""
        if self.recipe.compressor is not None and not isinstance(self.recipe.compressor, Cast):
            self._decompress_each(size, self.recipe.compressor)
        else:
            if self._wire is not self.flat:
                self.flat.copy_(self._wire)
            if self.recipe.op == "mean":
                divide_(self._gradients, size)
        if self.recipe.predivide != 1.0:
            self._gradients.mul_(self.recipe.predivide)

    def _decompress_each(self, size: int, compressor: Compressor) -> None:
        sums, tail = self._wire.tensor_split([self._wire.numel() - self._tail.numel()])
        self._tail.copy_(tail)
        is_mean, can_divide = self.recipe.op == "mean", sums.is_floating_point() or sums.is_complex()
        if is_mean and can_divide:
            divide_(sums, size)
        pieces = sums.split([shape.numel() for shape in self._shapes])
        for view, piece, shape, ctx in zip(self._views.values(), pieces, self._shapes, self._contexts, strict=True):
            view.copy_(compressor.decompress(piece.view(shape), ctx))
        if is_mean and not can_divide:
            divide_(self._gradients, size)


def _sparse_dim(grad: torch.Tensor | None) -> int:
    """How many dimensions of a sparse gradient are indices: an embedding's is 1, the row."""
    return grad.sparse_dim() if grad is not None and grad.is_sparse else 1
