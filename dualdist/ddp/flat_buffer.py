"""Flat buffers that gradients are packed into and that become the parameters' gradients, and their reuse."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence

import torch

from dualdist.backends.base import Buffer, storage_uses
from dualdist.ddp.bucket_plan import BucketPlan
from dualdist.errors import CollectiveError, UnsupportedError

# Note [gradients in the bucket]: gradients become views of the buffer with the reduced values, as with DDP's
# gradient_as_bucket_view=True; they are copied only where a program holds the tensor that autograd made. A buffer that
# is still referenced (by a gradient that was not set to None, or by the program) is not written to: another is used
# until then. Of buffers in memory shared between ranks there are few, and one must be free when the next round begins:
# if none would be, the result is copied to a private buffer. A program may move a gradient to other memory
# (`param.grad.data = x`), or the whole buffer (share_memory_()): then the buffer is replaced.

# Creates the buffer of a number, or returns None if there is no memory for another one.
BufferFactory = Callable[[int], "FlatBuffer | None"]


class FlatBuffer:
    """A flat tensor with a view of each gradient, followed by flags."""

    def __init__(self, values: torch.Tensor, plan: BucketPlan, number: int, buffer: Buffer | None = None) -> None:
        counts = plan.counts
        self.number = number  # in its bucket
        self.values = values
        self.buffer = buffer  # the owner of the values
        self.gradients, self.tail = values[: sum(counts)], values[sum(counts) :]
        pieces = self.gradients.split(counts)
        self.views = {
            number: piece.as_strided(plan.shapes[number], plan.strides[number], piece.storage_offset())
            for number, piece in enumerate(pieces)
            if number not in plan.unbucketed
        }
        del pieces  # which would count as references
        self.all_views = list(self.views.values())
        self._references = reference_counts(self.all_views)
        self._address, self._addresses = values.data_ptr(), list(map(torch.Tensor.data_ptr, self.all_views))
        # Computed, not measured, since other references may be dropped meanwhile.
        self._uses = len((values, self.gradients, self.tail)) + len(self.views)
        # The flat buffers in the same memory, several where buckets replace each other.
        memory = values if buffer is None else buffer.memory
        self._neighbours: weakref.WeakSet[FlatBuffer] = memory.__dict__.setdefault("_flat_buffers", weakref.WeakSet())
        self._other_uses = _uses_without_tensors() + (memory is not values)
        self._neighbours.add(self)

    def is_referenced(self) -> bool:
        """Return True if gradients or the program refer to these elements."""
        neighbours = list(self._neighbours)  # keeps them alive while they are counted
        own_uses = self._other_uses + sum(each._uses for each in neighbours)
        return storage_uses(self.values) > own_uses or any(each._has_referenced_view() for each in neighbours)

    def has_moved(self) -> bool:
        """Return True if the program moved a gradient to other memory: Note [gradients in the bucket]."""
        addresses = list(map(torch.Tensor.data_ptr, self.all_views))
        return self.values.data_ptr() != self._address or addresses != self._addresses

    def _has_referenced_view(self) -> bool:
        return any(map(operator.gt, reference_counts(self.all_views), self._references))


class BufferPool:
    """Up to two flat buffers of a bucket that are used in turn."""

    def __init__(self) -> None:
        self._buffers: list[FlatBuffer] = []  # the last is the one used last

    def acquire(self, create: BufferFactory) -> FlatBuffer:
        """Return an unreferenced buffer."""
        buffer = self._find(self._buffers) or self._create(create)
        if buffer is None:
            gc.collect()  # references may be from garbage
            buffer = self._find(self._buffers)
        if buffer is None:
            raise CollectiveError("the program holds references to gradients in all memory shared between ranks")
        others = [other for other in self._buffers if other is not buffer]
        self._buffers = [*others[-1:], buffer]
        return buffer

    def has_spare(self, create: BufferFactory) -> bool:
        """Return True if another buffer is free while the last one is in use."""
        last = self._buffers[-1]
        found = self._find(self._buffers[:-1]) is not None or self._create(create) is not None
        self._buffers.sort(key=lambda buffer: buffer is last)
        return found

    def clear(self) -> None:
        self._buffers.clear()

    def _find(self, buffers: Sequence[FlatBuffer]) -> FlatBuffer | None:
        for buffer in buffers[::-1]:
            if not buffer.is_referenced():
                if not buffer.has_moved():
                    return buffer
                self._buffers.remove(buffer)
        return None

    def _create(self, create: BufferFactory) -> FlatBuffer | None:
        while (buffer := create(self._lowest_free_number())) is not None:
            self._buffers = [*self._buffers, buffer][-2:]
            if not buffer.is_referenced():  # else gradients of an earlier bucket are in its memory
                return buffer
        return None

    def _lowest_free_number(self) -> int:
        taken = {buffer.number for buffer in self._buffers}
        return next(number for number in itertools.count() if number not in taken)


def is_referenced_elsewhere(grad: torch.Tensor) -> bool:
    """Return True if more than its parameter and one variable of the caller refer to a gradient or to its storage."""
    references, uses = _sole_gradient_counts()
    return reference_count(grad) > references or storage_uses(grad) > uses


def reference_count(tensor: torch.Tensor) -> int:
    """Count Python's and torch's references to a tensor; comparable with counts taken in the same call only."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor) + count


def reference_counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Count the references to many tensors, without a Python frame for each."""
    return list(map(operator.add, map(sys.getrefcount, tensors), map(torch.Tensor._use_count, tensors)))  # type: ignore[attr-defined]


@functools.cache
def _sole_gradient_counts() -> tuple[int, int]:
    """Return the counts of a gradient with no other references, taken as is_referenced_elsewhere() takes them."""
    param = torch.zeros(1, requires_grad=True, device="cpu")
    param.grad = torch.zeros(1, device="cpu")
    grad = param.grad
    return _counts(grad)


def _counts(grad: torch.Tensor) -> tuple[int, int]:
    return reference_count(grad), storage_uses(grad)


@functools.cache
def _uses_without_tensors() -> int:
    """Return what storage_uses() counts beside the tensors."""
    return storage_uses(torch.empty(1, device="cpu")) - 1


class ProducerStreams:
    """The CUDA streams that computed the gradients of a bucket; the host never waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[torch.cuda.Stream] = set()

    def record(self) -> None:
        """Record that the current stream computed a gradient."""
        self._streams.add(torch.cuda.current_stream(self._device))

    def join(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the current stream wait for all recorded ones before it reads the tensors."""
        current = torch.cuda.current_stream(self._device)
        others = self._streams - {current}
        for other in others:
            current.wait_stream(other)
        for tensor in tensors if others else ():
            tensor.record_stream(current)  # it may be freed earlier

    def clear(self) -> None:
        self._streams.clear()


def refuse_capture() -> None:
    """Raise UnsupportedError while the current stream is captured into a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "backward() of a wrapped optimizer's parameters cannot be captured in a CUDA graph: a replay would not "
            "exchange which gradients each rank has. torch.cuda.make_graphed_callables captures the model's own work, "
            "and leaves the reduction outside"
        )
