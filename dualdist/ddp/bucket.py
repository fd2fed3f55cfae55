"""Bucket: gradients in one flat tensor, which is reduced by one allreduce.

Note [gradients in the bucket]: after a reduction the gradients are views of the bucket, as with DDP's
gradient_as_bucket_view=True, until the next backward overwrites them. Where autograd accumulates into such a view, the
gradient needs no copy to be sent; where the program has cleared or replaced it, the packer copies it to its place.

Note [scaled copies]: with a power of two ranks the packer multiplies what it copies by 1/ranks, and the sum is the
mean; dividing the sum would be one more pass over the bucket. Such a factor rounds subnormal results only, below 2^-126
in float32. Sums of 16 bits are divided, as they are made in float32 and rounded once. It is the same on all backends,
and so are the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dualdist.backends.arithmetic import INTEGERS, ReduceOp, divide, divide_
from dualdist.backends.base import Backend
from dualdist.backends.operation import Operation, Stages
from dualdist.backends.staging import Staging
from dualdist.collectives.reductions import allreduce_, empty_sparse, sparse_sum
from dualdist.ddp.compression import CastCompression, ErrorFeedback, GradientCompressor, compressor_name
from dualdist.ddp.config import ReducerConfig, wire_dtype
from dualdist.ddp.layout import BUCKET_FLAGS, CONTRIBUTES, HAS_JOINED, IS_NESTED, SKIPPED_STEP, BucketLayout
from dualdist.ddp.nonfinite import nonfinite_kinds
from dualdist.ddp.packer import assign_grad
from dualdist.engine.channel import Channel, Transfer, Work
from dualdist.errors import UsageError
from dualdist.utils import accelerator

# Note [sparse gradients]: a gradient is known to be sparse only once it exists, and never on a rank whose loss does not
# use the parameter. So ranks set flags in the bucket, and a member that is sparse on any rank is reduced separately, in
# parameter order, after the buckets: as a dense one if it is dense on another rank (of tied weights a loss may use one
# only). From then on it takes no space in the bucket.
#
# On a GPU the host does not wait for flags each time. All ranks read them until each member has been dense, which all
# see in the same reduction; from then on a rank that has a sparse gradient sends it as a dense one, without a flag.

SCALED = (torch.float32, torch.float64)  # Note [scaled copies]


class Bucket:
    """Reduce gradients and flags that are packed in one flat tensor.

    The flags are two for each member, "has a dense gradient" and "has a sparse gradient", and those of BUCKET_FLAGS.
    They are summed in the gradients' dtype, in which a sum of many ones may not be exact: a flag is 0 or not.
    """

    may_scale = True  # Note [scaled copies]

    def __init__(self, layout: BucketLayout, config: ReducerConfig, channel: Channel, dense: set[int]) -> None:
        self.layout = layout
        self.config = config
        self.reads_flags_late = accelerator.is_accelerator(layout.device)
        self._dense = dense  # members that all ranks know to have been dense
        self._channel = channel
        self._wire_dtype = wire_dtype(layout.dtype, config)
        divides = config.op == "mean" and config.compressor is None
        is_scaled = (
            self.may_scale
            and divides
            and channel.size & (channel.size - 1) == 0
            and layout.dtype in SCALED
            and config.reduction != "ordered"  # in which the mean divides once, after the sum
        )
        self.scale = 1 / channel.size if is_scaled else 1.0  # of what the packer copies
        # The flags become a mean, too: one that is set stays so, and those that equally many ranks set are equal.
        is_mean = divides and not is_scaled and layout.dtype.is_floating_point
        self._reduced_by: ReduceOp = "mean" if is_mean else "sum"
        self._divides_sum = config.op == "mean" and not is_scaled and not is_mean
        self._work: Work[torch.Tensor] | None = None
        self._result: torch.Tensor | None = None
        self._sent_all_dense = False
        self.sent_bytes = 0  # of gradients, without flags, that this rank gave to the last reduction
        # Of what a compressor returned for each gradient: its shape, its dtype, and the context.
        self._sent: list[tuple[torch.Size, torch.dtype, Any]] = []
        members = [1.0] * len(layout.shapes) + [0.0] * len(layout.shapes)
        self.values = torch.empty(layout.length, dtype=layout.dtype, device=layout.device)
        flags = torch.tensor([*members, *_one_hot(CONTRIBUTES)], dtype=layout.dtype, device="cpu")
        self._all_dense_flags = flags.to(layout.device)  # where they are copied from without a wait
        counts = layout.counts
        self._name = f"{layout.name}/{sum(counts)}"  # as BUCKET_NAME
        self.gradients, self.tail = self.values[: sum(counts)], self.values[sum(counts) :]
        pieces = self.gradients.split(counts)
        # The place of each member, None if it is reduced separately. By .data they are no views for autograd.
        self.views: list[torch.Tensor | None] = [
            None
            if number in layout.unbucketed
            else piece.as_strided(layout.shapes[number], layout.strides[number], piece.storage_offset()).data
            for number, piece in enumerate(pieces)
        ]

    @torch.no_grad()
    def launch(
        self, grads: Sequence[torch.Tensor | None] | None, flag: int = CONTRIBUTES, more_flags: Sequence[int] = ()
    ) -> None:
        """Start the allreduce of the values, with these flags for the bucket.

        The dense gradients are packed, and zeros for others, which `grads` holds; None if all are dense.
        """
        self._sent_all_dense = grads is None
        if grads is not None and (self.config.sparse_as_dense or self._all_stay_dense()):
            for view, grad in zip(self.views, grads, strict=True):
                if view is not None and grad is not None and grad.is_sparse:
                    torch.mul(grad.to_dense(), self.scale, out=view)
        if self.config.gradient_predivide_factor != 1.0:
            self.gradients.div_(self.config.gradient_predivide_factor)
        is_usual = grads is None and flag == CONTRIBUTES
        self.tail.copy_(self._all_dense_flags if is_usual else self._flags(grads, flag), non_blocking=True)
        for each in more_flags:
            self.tail[each].fill_(1)
        self._work = self._start_allreduce(self._name)

    def _start_allreduce(self, name: str) -> Work[torch.Tensor]:
        if self._wire_dtype in self._channel.backend.supported_reduce_dtypes:
            sent = self.values.to(self._wire_dtype)
        else:
            sent = self._compress()
        self.sent_bytes = (sent.numel() - self.tail.numel()) * sent.element_size()
        is_ordered, is_staged = self.config.reduction == "ordered", isinstance(self._channel.backend, Staging)
        stream = accelerator.current_stream(sent.device) if is_staged else None
        ready = None if stream is None else stream.record_event()

        def begin(backend: Backend) -> Operation[torch.Tensor]:  # in another thread, if others are under way
            return allreduce_(backend, sent, self._reduced_by, name, is_ordered=is_ordered, ready=ready)

        return self._start(name, sent, begin, attended=is_staged)

    def _start(
        self,
        name: str,
        sent: torch.Tensor,
        begin: Callable[[Backend], Operation[torch.Tensor] | Stages[torch.Tensor]],
        *,
        attended: bool = False,
    ) -> Work[torch.Tensor]:
        """Queue the reduction; the progress thread advances it between its stages, if those are on the CPU."""
        has_stages_here = sent.device.type == "cpu" and not self._channel.backend.in_program_order
        return self._channel.start(Transfer("allreduce", name, sent), begin, attended=attended or has_stages_here)

    def done(self) -> bool:
        """Return True if wait() would return at once; moves what can be moved."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """Wait for the allreduce."""
        if self._work is not None:
            self._result = self._work.wait()
            self._work = None

    def limit_wait(self, seconds: float) -> None:
        """Let wait() raise CollectiveTimeoutError when nothing makes progress for these seconds."""
        if self._work is not None:
            self._work.timeout_s = min(self._work.timeout_s, seconds)

    def any_rank_set(self, flag: int) -> bool:
        """Return True if any rank launched the bucket with this flag; after wait()."""
        assert self._result is not None, "call wait() first"
        return bool(self._result.view(-1)[flag].item())

    def differing_flags(self) -> list[int]:
        """Return the flags that some ranks set and others did not, unless ranks have joined; after wait()."""
        assert self._result is not None, "call wait() first"
        sums = self._result.view(-1)[-len(BUCKET_FLAGS) :].tolist()
        is_whole = sums[HAS_JOINED] == 0
        return [each for each in (SKIPPED_STEP, IS_NESTED) if is_whole and sums[each] not in (0, sums[CONTRIBUTES])]

    @torch.no_grad()
    def assign_special_grads(self, params: Sequence[torch.Tensor | None], *, as_views: bool) -> list[tuple[int, bool]]:
        """Assign the reduced values where some members are sparse or missing, after unpack().

        A parameter that no rank used keeps None.

        Returns:
            The members to be reduced separately, each with whether as a dense gradient.
        """
        flags = self.read_flags()
        for param, view, (dense, sparse) in zip(params, self.views, flags, strict=True):
            if view is None or param is None:
                continue
            if sparse and not dense and self.config.sparse_as_dense:
                param.grad = view.to_sparse(_sparse_dim(param.grad))
            elif dense and (not sparse or self.config.sparse_as_dense):
                assign_grad(param, view, as_views=as_views)
        return self.members_to_unbucket(flags)

    def are_all_dense(self) -> bool:
        """Return True if every member has a dense gradient on some rank, and a sparse one on none; after unpack()."""
        if not self._sent_all_dense or self.layout.unbucketed:
            return False
        if self.reads_flags_late and (self._all_stay_dense() or self.config.sparse_as_dense):
            return True
        count = len(self.layout.shapes)
        if self.tail[count : 2 * count].any():
            return False
        self._dense.update(range(count))
        return True

    def _all_stay_dense(self) -> bool:
        """Return True if no rank sends sparse gradients any more: Note [sparse gradients]."""
        all_known_dense = self.reads_flags_late and len(self._dense) == len(self.layout.shapes)
        return all_known_dense and not self.layout.unbucketed and not self.config.sparse_as_dense

    def reduced_values(self) -> torch.Tensor:
        """Return the reduced gradients in one tensor, after unpack()."""
        return self.gradients

    def nonfinite_members(self) -> list[int]:
        """Return the members whose reduced gradient is not finite, after unpack()."""
        return [number for number, view in enumerate(self.views) if nonfinite_kinds(view)]

    def read_flags(self) -> list[tuple[bool, bool]]:
        """Return for each member whether any rank had a dense and a sparse gradient, after unpack()."""
        values = (self.tail[: -len(BUCKET_FLAGS)] != 0).tolist()
        flags = list(zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True))
        self._dense.update(number for number, (dense, _) in enumerate(flags) if dense)
        return flags

    def members_to_unbucket(self, flags: Sequence[tuple[bool, bool]]) -> list[tuple[int, bool]]:
        """Return the members to be reduced separately, each with whether as a dense gradient."""
        return [
            (number, dense)
            for number, (dense, sparse) in enumerate(flags)
            if (sparse and not self.config.sparse_as_dense) or (dense and number in self.layout.unbucketed)
        ]

    @torch.no_grad()
    def reduce_unbucketed(self, number: int, grad: torch.Tensor | None, *, as_dense: bool) -> torch.Tensor:
        """Reduce one member separately; None counts as zero."""
        channel, layout, op = self._channel, self.layout, self.config.op
        name, shape = f"{layout.name}.{number}", layout.shapes[number]
        if not as_dense:
            if grad is None:
                grad = empty_sparse(shape, layout.dtype, layout.device)
            own, is_ordered = grad.detach(), self.config.reduction == "ordered"
            return channel.run(name, lambda backend: sparse_sum(backend, own, op, name, is_ordered=is_ordered))
        total = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
        if grad is not None:
            total.copy_(grad.to_dense() if grad.is_sparse else grad)
        by: ReduceOp = "mean" if op == "mean" else "sum"
        is_ordered = self.config.reduction == "ordered"
        return channel.run(name, lambda backend: allreduce_(backend, total, by, name, is_ordered=is_ordered))

    def _flags(self, grads: Sequence[torch.Tensor | None] | None, flag: int) -> torch.Tensor:
        """Return the flags, in pinned memory for an accelerator, to which they are copied without a wait."""
        count, stay_dense = len(self.layout.shapes), self._all_stay_dense()
        dense, sparse = [True] * count, [False] * count
        if grads is not None:
            dense = [not (grad is None or (grad.is_sparse and not stay_dense)) for grad in grads]
            sparse = [grad is not None and grad.is_sparse and not stay_dense for grad in grads]
        flags = [*map(float, (*dense, *sparse)), *_one_hot(flag)]
        return torch.tensor(flags, dtype=self.layout.dtype, device="cpu", pin_memory=self.layout.device.type != "cpu")

    def _compress(self) -> torch.Tensor:
        """Return the tensor to send: the values themselves, or the compressed gradients and the flags."""
        compressor = self._summed_compressor()
        if compressor is None or isinstance(compressor, CastCompression):
            return self.values if compressor is None else compressor.compress(self.values)[0]
        pairs = [compressor.compress(view) for view in self.views if view is not None]
        self._sent = [(tensor.shape, tensor.dtype, ctx) for tensor, ctx in pairs]
        dtypes = [tensor.dtype for tensor, _ in pairs]
        if len({dtype.is_floating_point or dtype.is_complex for dtype in dtypes}) > 1:
            raise UsageError(
                f"{compressor_name(compressor)} returned integers for some gradients and not for others: "
                f"{set(dtypes)}; return one kind for all"
            )
        dtype = dtypes[0] if dtypes else self.tail.dtype
        if dtype in INTEGERS and torch.iinfo(dtype).max < self._channel.size:
            dtype = torch.int32  # for all: sums of the flags of many ranks must not wrap to 0
        return torch.cat([*(tensor.reshape(-1) for tensor, _ in pairs), self.tail.to(dtype)])

    @torch.no_grad()
    def unpack(self) -> None:
        """Finalize the reduced gradients in the values, after wait()."""
        result = self._result
        assert result is not None, "call wait() first"
        is_elsewhere = result.data_ptr() != self.values.data_ptr()
        compressor = self._summed_compressor()
        if compressor is not None and not isinstance(compressor, CastCompression):
            self._decompress(result, compressor)
        elif is_elsewhere and result.dtype == self.values.dtype and self._divides_sum:
            count = self.gradients.numel()
            divide(result[:count], self._channel.size, self.gradients)  # and copy, in one pass
            self.tail.copy_(result[count:])
        else:
            if is_elsewhere:
                self.values.copy_(result)
            if self._divides_sum:
                divide_(self.gradients, self._channel.size)
        self._undo_predivision()

    def _undo_predivision(self) -> None:
        if self.config.gradient_predivide_factor != 1.0:
            self.gradients.mul_(self.config.gradient_predivide_factor)

    def _summed_compressor(self) -> GradientCompressor | None:
        """Return the compressor whose results are summed; a FeedbackBucket has none."""
        assert not isinstance(self.config.compressor, ErrorFeedback)
        return self.config.compressor

    def _decompress(self, result: torch.Tensor, compressor: GradientCompressor) -> None:
        sums, tail = result.tensor_split([result.numel() - self.tail.numel()])
        self.tail.copy_(tail)
        is_mean, can_divide = self.config.op == "mean", sums.is_floating_point() or sums.is_complex()
        if is_mean and can_divide:
            divide_(sums, self._channel.size)
        pieces = sums.split([shape.numel() for shape, *_ in self._sent])
        views = [view for view in self.views if view is not None]
        for view, piece, (shape, dtype, ctx) in zip(views, pieces, self._sent, strict=True):
            view.copy_(compressor.decompress(piece.view(shape).to(dtype), ctx))
        if is_mean and not can_divide:
            divide_(self.gradients, self._channel.size)


def _one_hot(flag: int) -> list[float]:
    return [float(other == flag) for other in BUCKET_FLAGS]


def _sparse_dim(grad: torch.Tensor | None) -> int:
    """Return the number of index dimensions of a sparse gradient: 1 for an embedding's, the row."""
    return grad.sparse_dim() if grad is not None and grad.is_sparse else 1


class BucketStrategy:
    """Reduces each full bucket by one allreduce; strategies that send something else derive from it."""

    has_state = False  # which moves with the optimizer: what was not sent yet
    sends_gradients = True

    def __init__(self, config: ReducerConfig) -> None:
        self.config = config

    def make_bucket(self, layout: BucketLayout, channel: Channel, dense: set[int]) -> Bucket:
        return Bucket(layout, self.config, channel, dense)

    def commit(self, buckets: Sequence[Bucket]) -> None:
        """Store the state after a reduction that the program gets, before its values are assigned."""

    def agree(self, channel: Channel, name: str) -> None:
        """Make those parts of the state equal that all ranks need alike; every rank calls this."""

    def export(self, numbers: Sequence[int | None]) -> dict[str, Any] | None:
        """Return the state by position among these parameters, or None; it shares memory."""
        return None

    def load(
        self, state: Mapping[str, Any] | None, params: Sequence[torch.Tensor], numbers: Sequence[int | None]
    ) -> None:
        """Replace the state by what export() returned; None to begin without."""
