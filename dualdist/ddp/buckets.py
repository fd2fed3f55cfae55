"""Gradients that travel together: gathered, sent off, and given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dualdist.backends.base import Backend, Buffer, Epilogue, Work
from dualdist.backends.buffers import is_kept
from dualdist.collectives.reductions import INTEGERS, allreduce_, divide, divide_, empty_sparse, sparse_sum
from dualdist.ddp.bucket_plan import BUCKET_FLAGS, TAKES_PART, BucketPlan, ReducerConfig, name_of, wire_dtype
from dualdist.ddp.compression import CastCompression, GradientCompressor
from dualdist.ddp.flat_buffer import BufferPool, FlatBuffer, ProducerStreams
from dualdist.ddp.nonfinite import nonfinite_kinds
from dualdist.errors import UsageError

# Note [sparse gradients]: that a gradient is sparse is known only when it is there, and never to a rank whose loss does
# not touch the parameter. So the ranks tell each other by flags in the bucket, and what any of them has sparse is
# reduced apart, in parameter order, after the buckets: as a dense one where another rank has it dense (of tied weights
# a loss may touch one use only). From then on its place in the bucket is empty.
#
# A GPU's program does not wait for flags in every round. All ranks read them until each member has been dense, which
# all learn in the same round; from then on a rank that has one sparse sends it as a dense one, and tells nobody.

# Devices that the program runs ahead of: to read what lies there makes it wait.
RUN_LATE = frozenset(("cuda",))
# Smaller gradients are gathered together, when the bucket leaves: a call for each would take longer than its copy.
LARGE_BYTES = 32 << 10


class Bucket:
    """Gathers gradients in a flat buffer, with what the ranks tell each other behind them, and has it reduced.

    Those are two flags for each member, "I had a dense gradient" and "I had a sparse one", and one of three for the
    bucket. They travel as the gradients do, in whose dtype a sum of many ones may be no count: a flag is 0 or not.
    """

    def __init__(self, plan: BucketPlan, config: ReducerConfig, line: Backend, dense: set[int]) -> None:
        self.plan = plan
        self.config = config
        self.waiting_for = len(plan.shapes)
        self.streams = ProducerStreams(plan.device) if plan.device.type == "cuda" else None
        self.reads_late = plan.device.type in RUN_LATE
        self._dense = dense  # the members that all ranks know to have been dense
        self._line = line
        self._wire_dtype = wire_dtype(plan.dtype, config)
        self._cast: Buffer | None = None  # what travels, where that is a smaller dtype
        self._rows, self._own_rows = BufferPool(), BufferPool()
        self._sent: FlatBuffer | None = None  # where gradients are gathered
        self._reduced: FlatBuffer | None = None  # where they lie afterwards, and become the parameters'
        self._packed: dict[int, tuple[torch.Tensor, int]] = {}  # the gradients as they were taken in
        self._is_begun = False
        self._work: Work | None = None
        self._begun: Work | None = None  # that all ranks have begun it
        self._result: torch.Tensor | None = None
        self._contexts: list[Any] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []  # a compressor may choose one for each gradient
        self.large = {
            number
            for number, shape in enumerate(plan.shapes)
            if shape.numel() * plan.dtype.itemsize >= LARGE_BYTES and plan.device.type == "cpu"
        }
        members = [1.0] * len(plan.shapes) + [0.0] * len(plan.shapes)
        self._all_dense = torch.tensor([*members, *_alone(TAKES_PART)], device="cpu")

    def _begin(self) -> FlatBuffer:
        """The row to gather this round's gradients in: Note [gradients in the bucket]."""
        if self._sent is None or not self._is_begun:
            self._sent = self._rows.free(self._new_row)
        self._is_begun = True
        return self._sent

    def _new_row(self, number: int) -> FlatBuffer | None:
        if self._wire_dtype == self.plan.dtype and self.plan.dtype in self._line.supported_reduce_dtypes:
            buffer = self._new_buffer(self.plan.dtype, number)
            return None if buffer is None else FlatBuffer(buffer.values, self.plan, number, buffer)
        return self._own_row(number)

    def _new_buffer(self, dtype: torch.dtype, number: int) -> Buffer | None:
        return self._line.buffer(self.plan.place, number, self.plan.length, dtype, self.plan.device)

    def _own_row(self, number: int) -> FlatBuffer:
        return FlatBuffer(
            torch.empty(self.plan.length, dtype=self.plan.dtype, device=self.plan.device), self.plan, number
        )

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
    def launch(self, grads: Sequence[torch.Tensor | None], flag: int = TAKES_PART) -> None:
        """Gather what is not there yet and send it off, with the flag for the bucket."""
        flat = self._begin()
        dense = [grad for grad in grads if not (grad is None or grad.is_sparse)]
        if self.streams is not None:
            self.streams.join(dense)
        if len(dense) == len(flat.all_views) == len(grads) and not self._packed:
            torch._foreach_copy_(flat.all_views, dense)
        else:
            self._gather(flat, grads)
        if self.config.gradient_predivide_factor != 1.0:
            flat.gradients.div_(self.config.gradient_predivide_factor)
        flat.tail.copy_(self._flags(grads, flag))
        self.begin_anew()
        self._send(flat)

    def _gather(self, flat: FlatBuffer, grads: Sequence[torch.Tensor | None]) -> None:
        """What is not there yet; zeros where there is nothing."""
        packed, views, late = self._packed, [], []
        may_be_dense = self.config.dense or self._all_stay_dense()
        for number, view in flat.views.items():
            grad = grads[number]
            if grad is None or (grad.is_sparse and not may_be_dense):
                view.zero_()
                continue
            taken = packed.get(number)
            # A program's own hook may have changed it since it was taken in.
            if taken is None or taken[0] is not grad or taken[1] != grad._version:
                views.append(view)
                late.append(grad.to_dense() if grad.is_sparse else grad)
        if late:
            torch._foreach_copy_(views, late)

    def _send(self, flat: FlatBuffer) -> None:
        name = self.plan.name
        if flat.buffer is not None:
            self._work = flat.buffer.allreduce("sum", name, Epilogue(flat.gradients.numel(), self._settle))
        elif self._wire_dtype in (None, self.plan.dtype) or self._wire_dtype not in self._line.supported_reduce_dtypes:
            if not self._line.done_means_all_started:  # who has joined looks for it
                begun = torch.zeros(1, dtype=torch.uint8, device="cpu")
                self._begun = self._line.allreduce_(begun, "max", f"{name}.begun")
            self._work = allreduce_(self._line, self._compressed(flat), "sum", name)
        else:
            self._cast = self._cast or self._new_buffer(self._wire_dtype, 0)
            assert self._cast is not None, "number 0 is always there"
            self._cast.values.copy_(flat.values)
            self._work = self._cast.allreduce("sum", name, Epilogue(0, self._settle))

    def done(self) -> bool:
        """Whether wait() would return as soon as all ranks wait."""
        work = self._begun or self._work
        return work is None or work.done()

    def wait(self) -> None:
        """What was sent has been reduced."""
        if self._begun is not None:
            self._begun.wait()
            self._begun = None
        if self._work is not None:
            self._result = self._work.wait()
            self._work = None

    def drop(self) -> None:
        """This rank will not use the bucket again."""
        self._line.drop(self.plan.place)
        self._sent = self._reduced = self._cast = self._result = None
        self._rows.clear()
        self._own_rows.clear()

    def any_rank_set(self, flag: int) -> bool:
        """Whether any rank said so of the bucket, after wait()."""
        assert self._result is not None, "asked after wait()"
        return bool(self._result.view(-1)[flag].item() != 0)

    @torch.no_grad()
    def put_back(self, params: Sequence[torch.Tensor]) -> list[tuple[int, bool]]:
        """Give the parameters what was reduced, after unpack(); one that no rank used keeps None.

        Returns the members that are to be reduced apart, and whether as dense ones.
        """
        reduced = self._done_flat()
        is_used_by_me = all(param.grad is not None and not param.grad.is_sparse for param in params)
        needs_none = self._all_stay_dense() or (self.reads_late and self.config.dense)
        told = None if is_used_by_me and needs_none else self.read_flags()
        targets, sources = [], []
        for number, view in reduced.views.items():
            dense, sparse = (True, False) if told is None else told[number]
            param = params[number]
            if sparse and not dense and self.config.dense:
                param.grad = view.to_sparse(_sparse_dim(param.grad))
            elif dense and (not sparse or self.config.dense):
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

    def _all_stay_dense(self) -> bool:
        """Whether no rank sends a sparse gradient any more: Note [sparse gradients]."""
        is_known = self.reads_late and len(self._dense) == len(self.plan.shapes)
        return is_known and not self.plan.apart and not self.config.dense

    def reduced_values(self) -> torch.Tensor:
        """All that has been reduced together, after unpack()."""
        return self._done_flat().gradients

    def nonfinite_members(self) -> list[int]:
        """The members whose reduction is not finite, after unpack()."""
        return [number for number, view in self._done_flat().views.items() if nonfinite_kinds(view)]

    def read_flags(self) -> list[tuple[bool, bool]]:
        """For each member, whether any rank had a dense gradient and whether any had a sparse one, after unpack()."""
        flags = (self._done_flat().tail[: -len(BUCKET_FLAGS)] != 0).tolist()
        told = list(zip(flags[: len(flags) // 2], flags[len(flags) // 2 :], strict=True))
        self._dense.update(number for number, (dense, _) in enumerate(told) if dense)
        return told

    def to_reduce_apart(self, told: Sequence[tuple[bool, bool]]) -> list[tuple[int, bool]]:
        """The members that do not travel in the bucket now, and whether as dense ones: Note [sparse gradients]."""
        return [
            (number, dense)
            for number, (dense, sparse) in enumerate(told)
            if (sparse and not self.config.dense) or (dense and number in self.plan.apart)
        ]

    @torch.no_grad()
    def reduce_apart(self, number: int, grad: torch.Tensor | None, *, as_dense: bool) -> torch.Tensor:
        """The reduction of a member that travels by itself, None counting as zero."""
        line, plan, op = self._line, self.plan, self.config.op
        name, shape = f"{plan.name}.{number}", plan.shapes[number]
        if not as_dense:
            if grad is None:
                grad = empty_sparse(shape, plan.dtype, plan.device)
            return sparse_sum(line, grad.detach(), op, name)
        total = torch.zeros(shape, dtype=plan.dtype, device=plan.device)
        if grad is not None:
            total.copy_(grad.to_dense() if grad.is_sparse else grad)
        allreduce_(line, total, "sum", name).wait()
        return divide_(total, line.size) if op == "mean" else total

    def _flags(self, grads: Sequence[torch.Tensor | None], flag: int) -> torch.Tensor:
        stay_dense = self._all_stay_dense()
        dense = [not (grad is None or (grad.is_sparse and not stay_dense)) for grad in grads]
        if flag == TAKES_PART and all(dense):
            return self._all_dense
        sparse = [grad is not None and grad.is_sparse and not stay_dense for grad in grads]
        return torch.tensor([*dense, *sparse, *_alone(flag)], dtype=torch.float32, device="cpu")

    def _compressed(self, flat: FlatBuffer) -> torch.Tensor:
        """What goes over the wire: the row itself, or smaller tensors."""
        compressor = self.config.compressor
        if compressor is None or isinstance(compressor, CastCompression):
            return flat.values if compressor is None else compressor.compress(flat.values)[0]
        pairs = [compressor.compress(view) for view in flat.views.values()]
        sent = [tensor for tensor, _ in pairs]
        self._contexts = [ctx for _, ctx in pairs]
        self._shapes, self._dtypes = [tensor.shape for tensor in sent], [tensor.dtype for tensor in sent]
        if len({dtype.is_floating_point or dtype.is_complex for dtype in self._dtypes}) > 1:
            raise UsageError(
                f"{name_of(compressor)} made integers of some gradients and not of others: {set(self._dtypes)}; "
                "let it make one kind of all"
            )
        dtype = self._dtypes[0] if sent else flat.tail.dtype
        if dtype in INTEGERS and torch.iinfo(dtype).max < self._line.size:
            dtype = torch.int32  # all of it: flags that many ranks add up must not come back to 0
        return torch.cat([*(tensor.reshape(-1) for tensor in sent), flat.tail.to(dtype)])

    @torch.no_grad()
    def unpack(self) -> None:
        """The reduced gradients, divided where they shall be a mean, lie in their places, after wait()."""
        sent, result = self._sent, self._result
        assert sent is not None, "unpacked after launch()"
        assert result is not None, "unpacked after wait()"
        is_settled = result is sent.values and sent.buffer is not None and sent.buffer.settles
        flat = self._reduced = self._row_for(result, sent, not is_settled or self._rows.has_another(self._new_row))
        is_elsewhere = result.data_ptr() != flat.values.data_ptr()
        if self.config.compressor is not None and not isinstance(self.config.compressor, CastCompression):
            self._decompress_each(flat, result, self.config.compressor)
            self._multiply(flat.gradients)
        elif is_elsewhere and result.dtype == flat.values.dtype and self.config.op == "mean" and not is_settled:
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
        """Sums over the ranks become, in place, what the config makes of them."""
        if self.config.op == "mean":
            divide_(sums, self._line.size)
        self._multiply(sums)

    def _multiply(self, sums: torch.Tensor) -> None:
        if self.config.gradient_predivide_factor != 1.0:
            sums.mul_(self.config.gradient_predivide_factor)

    def _row_for(self, result: torch.Tensor, sent: FlatBuffer, may_stay: bool) -> FlatBuffer:
        """Where the result shall lie: where it was sent from, but for what cannot stay in memory that ranks share."""
        if sent.buffer is None or (result.data_ptr() == sent.values.data_ptr() and may_stay):
            return sent
        return self._own_rows.free(self._own_row)

    def _done_flat(self) -> FlatBuffer:
        assert self._reduced is not None, "asked after unpack()"
        return self._reduced

    def _decompress_each(self, flat: FlatBuffer, result: torch.Tensor, compressor: GradientCompressor) -> None:
        sums, tail = result.tensor_split([result.numel() - flat.tail.numel()])
        flat.tail.copy_(tail)
        is_mean, can_divide = self.config.op == "mean", sums.is_floating_point() or sums.is_complex()
        if is_mean and can_divide:
            divide_(sums, self._line.size)
        pieces = sums.split([shape.numel() for shape in self._shapes])
        sent = zip(pieces, self._shapes, self._dtypes, self._contexts, strict=True)
        for view, (piece, shape, dtype, ctx) in zip(flat.views.values(), sent, strict=True):
            view.copy_(compressor.decompress(piece.view(shape).to(dtype), ctx))
        if is_mean and not can_divide:
            divide_(flat.gradients, self._line.size)


def _alone(flag: int) -> list[float]:
    """Of the bucket's flags this one."""
    return [float(other == flag) for other in BUCKET_FLAGS]


def _sparse_dim(grad: torch.Tensor | None) -> int:
    """How many dimensions of a sparse gradient are indices: an embedding's is 1, the row."""
    return grad.sparse_dim() if grad is not None and grad.is_sparse else 1
