"""Bucket: gradients that are packed into one buffer, reduced by one allreduce, and assigned to the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dualdist.backends.base import Backend, Buffer, Epilogue, Work
from dualdist.collectives.reductions import INTEGERS, allreduce_, divide, divide_, empty_sparse, sparse_sum
from dualdist.ddp.bucket_plan import BUCKET_FLAGS, CONTRIBUTES, BucketPlan, ReducerConfig, wire_dtype
from dualdist.ddp.compression import CastCompression, GradientCompressor, compressor_name
from dualdist.ddp.flat_buffer import BufferPool, FlatBuffer, ProducerStreams, is_referenced_elsewhere
from dualdist.ddp.step_checks import nonfinite_kinds
from dualdist.errors import UsageError

# Note [sparse gradients]: a gradient is known to be sparse only once it exists, and never on a rank whose loss does not
# use the parameter. So ranks set flags in the bucket, and a member that is sparse on any rank is reduced separately, in
# parameter order, after the buckets: as a dense one if it is dense on another rank (of tied weights a loss may use one
# only). From then on it takes no space in the bucket.
#
# On a GPU the host does not wait for flags in every round. All ranks read them until each member has been dense, which
# all see in the same round; from then on a rank that has a sparse gradient sends it as a dense one, without a flag.

# Devices that run asynchronously to the host: reading their memory waits for them.
ASYNC_DEVICES = frozenset(("cuda",))
# Larger gradients are packed as they become ready, while in cache; for smaller ones one call each would cost more.
LARGE_BYTES = 32 << 10


class Bucket:
    """Pack gradients and flags into a flat buffer, reduce it, and assign the result.

    The flags are two for each member, "has a dense gradient" and "has a sparse gradient", and one of BUCKET_FLAGS. They
    are summed in the gradients' dtype, in which a sum of many ones may not be exact: a flag is 0 or not.
    """

    def __init__(self, plan: BucketPlan, config: ReducerConfig, channel: Backend, dense: set[int]) -> None:
        self.plan = plan
        self.config = config
        self.num_pending = len(plan.shapes)
        self.streams = ProducerStreams(plan.device) if plan.device.type == "cuda" else None
        self.reads_flags_late = plan.device.type in ASYNC_DEVICES
        self.large_members = {
            number
            for number, shape in enumerate(plan.shapes)
            if shape.numel() * plan.dtype.itemsize >= LARGE_BYTES and plan.device.type == "cpu"
        }
        self._dense = dense  # members that all ranks know to have been dense
        self._channel = channel
        self._wire_dtype = wire_dtype(plan.dtype, config)
        self._cast: Buffer | None = None  # sent instead of the gradients' buffer, in a smaller dtype
        self._pool, self._private_pool = BufferPool(), BufferPool()
        self._sent: FlatBuffer | None = None  # gradients are packed here
        self._reduced: FlatBuffer | None = None  # the parameters' gradients become views of this
        self._packed: dict[int, tuple[torch.Tensor, int]] = {}  # gradients packed early, with their versions
        self._is_filling = False
        self._work: Work | None = None
        self._all_started: Work | None = None
        self._result: torch.Tensor | None = None
        self._contexts: list[Any] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []  # a compressor may choose one for each gradient
        members = [1.0] * len(plan.shapes) + [0.0] * len(plan.shapes)
        self._all_dense_flags = torch.tensor([*members, *_one_hot(CONTRIBUTES)], device="cpu")

    def _begin(self) -> FlatBuffer:
        """Return the buffer to pack this round's gradients into: Note [gradients in the bucket]."""
        if self._sent is None or not self._is_filling:
            self._sent = self._pool.acquire(self._create_buffer)
        self._is_filling = True
        return self._sent

    def _create_buffer(self, number: int) -> FlatBuffer | None:
        if self._wire_dtype == self.plan.dtype and self.plan.dtype in self._channel.supported_reduce_dtypes:
            buffer = self._channel_buffer(self.plan.dtype, number)
            return None if buffer is None else FlatBuffer(buffer.values, self.plan, number, buffer)
        return self._create_private_buffer(number)

    def _channel_buffer(self, dtype: torch.dtype, number: int) -> Buffer | None:
        return self._channel.buffer(self.plan.region, number, self.plan.length, dtype, self.plan.device)

    def _create_private_buffer(self, number: int) -> FlatBuffer:
        values = torch.empty(self.plan.length, dtype=self.plan.dtype, device=self.plan.device)
        return FlatBuffer(values, self.plan, number)

    def reset(self) -> None:
        """Forget what was packed and not launched; the shared memory may be used by another bucket meanwhile."""
        self._packed.clear()
        self._is_filling = False
        if self.streams is not None:
            self.streams.clear()

    def pack(self, number: int, grad: torch.Tensor | None) -> None:
        """Pack a large gradient as soon as it is ready, while it is in cache."""
        if grad is None or grad.is_sparse:
            return
        view = self._begin().views.get(number)
        if view is not None:
            view.copy_(grad.detach())
            self._packed[number] = grad, grad._version

    @torch.no_grad()
    def launch(self, grads: Sequence[torch.Tensor | None], flag: int = CONTRIBUTES) -> None:
        """Pack the remaining gradients and start the allreduce, with this flag for the bucket."""
        flat = self._begin()
        dense = [grad for grad in grads if not (grad is None or grad.is_sparse)]
        if self.streams is not None:
            self.streams.join(dense)
        if len(dense) == len(flat.all_views) == len(grads) and not self._packed:
            torch._foreach_copy_(flat.all_views, dense)
        else:
            self._pack_remaining(flat, grads)
        if self.config.gradient_predivide_factor != 1.0:
            flat.gradients.div_(self.config.gradient_predivide_factor)
        flat.tail.copy_(self._flags(grads, flag))
        self.reset()
        self._start_allreduce(flat)

    def _pack_remaining(self, flat: FlatBuffer, grads: Sequence[torch.Tensor | None]) -> None:
        """Pack what is not packed yet; zeros for missing gradients."""
        views, sources = [], []
        sends_sparse_as_dense = self.config.sparse_as_dense or self._all_stay_dense()
        for number, view in flat.views.items():
            grad = grads[number]
            if grad is None or (grad.is_sparse and not sends_sparse_as_dense):
                view.zero_()
                continue
            packed = self._packed.get(number)
            # A program's own hook may have modified or replaced it since.
            if packed is None or packed[0] is not grad or packed[1] != grad._version:
                views.append(view)
                sources.append(grad.to_dense() if grad.is_sparse else grad)
        if sources:
            torch._foreach_copy_(views, sources)

    def _start_allreduce(self, flat: FlatBuffer) -> None:
        name = self.plan.name
        supported = self._channel.supported_reduce_dtypes
        if flat.buffer is not None:
            self._work = flat.buffer.allreduce("sum", name, Epilogue(flat.gradients.numel(), self._finalize))
        elif self._wire_dtype in (None, self.plan.dtype) or self._wire_dtype not in supported:
            if not self._channel.done_means_all_started:  # a joined rank polls for it
                started = torch.zeros(1, dtype=torch.uint8, device="cpu")
                self._all_started = self._channel.allreduce_(started, "max", f"{name}.begun")
            self._work = allreduce_(self._channel, self._compress(flat), "sum", name)
        else:
            self._cast = self._cast or self._channel_buffer(self._wire_dtype, 0)
            assert self._cast is not None, "buffer 0 always exists"
            self._cast.values.copy_(flat.values)
            self._work = self._cast.allreduce("sum", name, Epilogue(0, self._finalize))

    def done(self) -> bool:
        """Return True if wait() would return as soon as all ranks wait."""
        work = self._all_started or self._work
        return work is None or work.done()

    def wait(self) -> None:
        """Wait for the allreduce."""
        if self._all_started is not None:
            self._all_started.wait()
            self._all_started = None
        if self._work is not None:
            self._result = self._work.wait()
            self._work = None

    def release(self) -> None:
        """Release the bucket's memory; it is not used again."""
        self._channel.release(self.plan.region)
        self._sent = self._reduced = self._cast = self._result = None
        self._pool.clear()
        self._private_pool.clear()

    def any_rank_set(self, flag: int) -> bool:
        """Return True if any rank launched the bucket with this flag; after wait()."""
        assert self._result is not None, "call wait() first"
        return bool(self._result.view(-1)[flag].item() != 0)

    @torch.no_grad()
    def assign_grads(self, params: Sequence[torch.Tensor]) -> list[tuple[int, bool]]:
        """Assign the reduced values, after unpack(); a parameter that no rank used keeps None.

        Returns:
            The members to be reduced separately, each with whether as a dense gradient.
        """
        reduced = self._unpacked()
        all_dense_here = all(param.grad is not None and not param.grad.is_sparse for param in params)
        needs_no_flags = self._all_stay_dense() or (self.reads_flags_late and self.config.sparse_as_dense)
        flags = None if all_dense_here and needs_no_flags else self.read_flags()
        targets, sources = [], []
        for number, view in reduced.views.items():
            dense, sparse = (True, False) if flags is None else flags[number]
            param = params[number]
            if sparse and not dense and self.config.sparse_as_dense:
                param.grad = view.to_sparse(_sparse_dim(param.grad))
            elif dense and (not sparse or self.config.sparse_as_dense):
                grad = param.grad
                if grad is view:
                    continue
                if grad is None or grad.is_sparse or not is_referenced_elsewhere(grad):
                    param.grad = view
                else:
                    targets.append(grad)
                    sources.append(view)
            grad = None  # which would count as a reference
        if targets:
            torch._foreach_copy_(targets, sources)
        return [] if flags is None else self.members_to_unbucket(flags)

    def _all_stay_dense(self) -> bool:
        """Return True if no rank sends sparse gradients any more: Note [sparse gradients]."""
        all_known_dense = self.reads_flags_late and len(self._dense) == len(self.plan.shapes)
        return all_known_dense and not self.plan.unbucketed and not self.config.sparse_as_dense

    def reduced_values(self) -> torch.Tensor:
        """Return the reduced gradients in one tensor, after unpack()."""
        return self._unpacked().gradients

    def nonfinite_members(self) -> list[int]:
        """Return the members whose reduced gradient is not finite, after unpack()."""
        return [number for number, view in self._unpacked().views.items() if nonfinite_kinds(view)]

    def read_flags(self) -> list[tuple[bool, bool]]:
        """Return for each member whether any rank had a dense and a sparse gradient, after unpack()."""
        values = (self._unpacked().tail[: -len(BUCKET_FLAGS)] != 0).tolist()
        flags = list(zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True))
        self._dense.update(number for number, (dense, _) in enumerate(flags) if dense)
        return flags

    def members_to_unbucket(self, flags: Sequence[tuple[bool, bool]]) -> list[tuple[int, bool]]:
        """Return the members to be reduced separately, each with whether as a dense gradient."""
        return [
            (number, dense)
            for number, (dense, sparse) in enumerate(flags)
            if (sparse and not self.config.sparse_as_dense) or (dense and number in self.plan.unbucketed)
        ]

    @torch.no_grad()
    def reduce_unbucketed(self, number: int, grad: torch.Tensor | None, *, as_dense: bool) -> torch.Tensor:
        """Reduce one member separately; None counts as zero."""
        channel, plan, op = self._channel, self.plan, self.config.op
        name, shape = f"{plan.name}.{number}", plan.shapes[number]
        if not as_dense:
            if grad is None:
                grad = empty_sparse(shape, plan.dtype, plan.device)
            return sparse_sum(channel, grad.detach(), op, name)
        total = torch.zeros(shape, dtype=plan.dtype, device=plan.device)
        if grad is not None:
            total.copy_(grad.to_dense() if grad.is_sparse else grad)
        allreduce_(channel, total, "sum", name).wait()
        return divide_(total, channel.size) if op == "mean" else total

    def _flags(self, grads: Sequence[torch.Tensor | None], flag: int) -> torch.Tensor:
        stay_dense = self._all_stay_dense()
        dense = [not (grad is None or (grad.is_sparse and not stay_dense)) for grad in grads]
        if flag == CONTRIBUTES and all(dense):
            return self._all_dense_flags
        sparse = [grad is not None and grad.is_sparse and not stay_dense for grad in grads]
        return torch.tensor([*dense, *sparse, *_one_hot(flag)], dtype=torch.float32, device="cpu")

    def _compress(self, flat: FlatBuffer) -> torch.Tensor:
        """Return the tensor to send: the buffer itself, or the compressed gradients and the flags."""
        compressor = self.config.compressor
        if compressor is None or isinstance(compressor, CastCompression):
            return flat.values if compressor is None else compressor.compress(flat.values)[0]
        pairs = [compressor.compress(view) for view in flat.views.values()]
        sent = [tensor for tensor, _ in pairs]
        self._contexts = [ctx for _, ctx in pairs]
        self._shapes, self._dtypes = [tensor.shape for tensor in sent], [tensor.dtype for tensor in sent]
        if len({dtype.is_floating_point or dtype.is_complex for dtype in self._dtypes}) > 1:
            raise UsageError(
                f"{compressor_name(compressor)} returned integers for some gradients and not for others: "
                f"{set(self._dtypes)}; return one kind for all"
            )
        dtype = self._dtypes[0] if sent else flat.tail.dtype
        if dtype in INTEGERS and torch.iinfo(dtype).max < self._channel.size:
            dtype = torch.int32  # for all: sums of the flags of many ranks must not wrap to 0
        return torch.cat([*(tensor.reshape(-1) for tensor in sent), flat.tail.to(dtype)])

    @torch.no_grad()
    def unpack(self) -> None:
        """Finalize the reduced gradients in their buffer, after wait()."""
        sent, result = self._sent, self._result
        assert sent is not None, "call launch() first"
        assert result is not None, "call wait() first"
        is_final = result is sent.values and sent.buffer is not None and sent.buffer.applies_epilogue
        can_stay = not is_final or self._pool.has_spare(self._create_buffer)
        flat = self._reduced = self._result_buffer(result, sent, can_stay)
        is_elsewhere = result.data_ptr() != flat.values.data_ptr()
        if self.config.compressor is not None and not isinstance(self.config.compressor, CastCompression):
            self._decompress(flat, result, self.config.compressor)
            self._multiply(flat.gradients)
        elif is_elsewhere and result.dtype == flat.values.dtype and self.config.op == "mean" and not is_final:
            count = flat.gradients.numel()
            divide(result[:count], self._channel.size, flat.gradients)  # and copy, in one pass
            flat.tail.copy_(result[count:])
            self._multiply(flat.gradients)
        else:
            if is_elsewhere:
                flat.values.copy_(result)
            if not is_final:
                self._finalize(flat.gradients)

    def _finalize(self, sums: torch.Tensor) -> None:
        """Divide sums for a mean, and undo the predivision, in place."""
        if self.config.op == "mean":
            divide_(sums, self._channel.size)
        self._multiply(sums)

    def _multiply(self, sums: torch.Tensor) -> None:
        if self.config.gradient_predivide_factor != 1.0:
            sums.mul_(self.config.gradient_predivide_factor)

    def _result_buffer(self, result: torch.Tensor, sent: FlatBuffer, can_stay: bool) -> FlatBuffer:
        """Return the buffer for the result: the one sent, or a private one if it cannot stay in shared memory."""
        if sent.buffer is None or (result.data_ptr() == sent.values.data_ptr() and can_stay):
            return sent
        return self._private_pool.acquire(self._create_private_buffer)

    def _unpacked(self) -> FlatBuffer:
        assert self._reduced is not None, "call unpack() first"
        return self._reduced

    def _decompress(self, flat: FlatBuffer, result: torch.Tensor, compressor: GradientCompressor) -> None:
        sums, tail = result.tensor_split([result.numel() - flat.tail.numel()])
        flat.tail.copy_(tail)
        is_mean, can_divide = self.config.op == "mean", sums.is_floating_point() or sums.is_complex()
        if is_mean and can_divide:
            divide_(sums, self._channel.size)
        pieces = sums.split([shape.numel() for shape in self._shapes])
        sent = zip(pieces, self._shapes, self._dtypes, self._contexts, strict=True)
        for view, (piece, shape, dtype, ctx) in zip(flat.views.values(), sent, strict=True):
            view.copy_(compressor.decompress(piece.view(shape).to(dtype), ctx))
        if is_mean and not can_divide:
            divide_(flat.gradients, self._channel.size)


def _one_hot(flag: int) -> list[float]:
    return [float(other == flag) for other in BUCKET_FLAGS]


def _sparse_dim(grad: torch.Tensor | None) -> int:
    """Return the number of index dimensions of a sparse gradient: 1 for an embedding's, the row."""
    return grad.sparse_dim() if grad is not None and grad.is_sparse else 1
