"""reduction="ordered": sums in the order of ranks, element by element, so that every backend gives the same bits.

Note [rank order]: a sum of floats depends on its order, and from three ranks on transports add in different orders,
which mostly depend on the position of an element in its buffer, too. Shared memory on one host adds in rank order at
all sizes, and a sum of two has one order: these reduce as usual. Elsewhere the buffer is cut into one part for each
rank: an alltoall brings rank r the r-th part of every rank, it adds them in rank order, and an allgather returns the
sums. A rank sends 2 (n - 1) / n of the buffer, as in a ring. Numbers below 32 bits are added in float32 and rounded
once, after the division of a mean. Integers, minima and maxima are exact in any order.

Note [gathers]: the second message of a bucket begins once its first has arrived, at another moment on each rank, and
transports match operations by their order. So the second messages of gradients have connections of their own, on which
they begin in bucket order, while backward() may launch more buckets on the first ones.
"""

from collections import deque

import torch

from dualdist.backends.base import (
    ALL_DTYPES,
    Backend,
    CompletedWork,
    ConvertedWork,
    ForwardingBackend,
    ReduceOp,
    Work,
    filled,
)
from dualdist.backends.control_plane import as_bytes
from dualdist.collectives.reductions import WIDER, divide_, reduce_rows

COMPLEX = frozenset(dtype for dtype in ALL_DTYPES if dtype.is_complex)  # which callers reduce as pairs of floats
FLOATS = frozenset((torch.float32, torch.float64, *(dtype for dtype in WIDER if dtype.is_floating_point)))


class RankOrderBackend(ForwardingBackend):
    """A backend that adds floats in the order of ranks: Note [rank order].

    Args:
        backend: moves the tensors.
        gathers: connects the same ranks, for the second messages of operations that are not waited for one by one. By
            default they take `backend` too, in the order in which the program waits: Note [gathers].
    """

    def __init__(self, backend: Backend, gathers: Backend | None = None) -> None:
        super().__init__(backend)
        self.gathers = gathers
        self.unfinished: deque[OrderedWork] = deque()  # whose second message has not begun
        self.traceable = False
        self.done_means_all_started = True  # also of an alltoall; shared memory where it is not true is not used
        self.mean_devices = self.rank_order_devices = frozenset(("cpu", "cuda"))
        self.supported_reduce_dtypes = (backend.supported_reduce_dtypes | FLOATS) - COMPLEX
        self.allgather, self.broadcast_, self.alltoall = backend.allgather, backend.broadcast_, backend.alltoall

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None) -> Work:
        backend, dtype, device = self._backend, buffer.dtype, buffer.device.type
        if self.size == 1:
            return CompletedWork(filled(buffer, source))
        if not dtype.is_floating_point:
            return backend.allreduce_(buffer, op, name, source)
        has_order = device in backend.rank_order_devices
        if dtype in WIDER and has_order:
            wide = (buffer if source is None else source).to(WIDER[dtype])
            return ConvertedWork(self._allreduce_as_usual_(wide, op, name), buffer.copy_)
        if (has_order or self.size == 2) and dtype not in WIDER and dtype in backend.supported_reduce_dtypes:
            return self._allreduce_as_usual_(buffer, op, name, source)
        filled(buffer, source)
        return OrderedWork(self, backend, buffer, op, name) if buffer.numel() else CompletedWork(buffer)

    def _allreduce_as_usual_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> Work:
        backend = self._backend
        if op != "mean" or buffer.device.type in backend.mean_devices:
            return backend.allreduce_(buffer, op, name, source)
        return ConvertedWork(backend.allreduce_(buffer, "sum", name, source), lambda total: divide_(total, self.size))


class OrderedWork:
    """A reduction by alltoall, sums here and allgather: Note [rank order]. It is done once all ranks have begun it."""

    def __init__(
        self, ordered: RankOrderBackend, backend: Backend, buffer: torch.Tensor, op: ReduceOp, name: str
    ) -> None:
        size, count = ordered.size, buffer.numel()
        share = -(-count // size)  # of every rank; the last ones have less, or nothing
        counts = [min(share, max(0, count - rank * share)) for rank in range(size)]
        self._ordered = ordered
        self._gathers = ordered.gathers or backend
        self._buffer, self._op, self._name = buffer, op, name
        self._share, self._own = share, counts[ordered.rank]
        self._gathered: Work | None = None
        width = buffer.element_size()
        sent = [each * width for each in counts]
        self._scattered = backend.alltoall(as_bytes(buffer), sent, [self._own * width] * size, f"{name}.scatter")
        ordered.unfinished.append(self)

    def done(self) -> bool:
        # NCCL's operations on two communicators keep one order on all ranks: that of wait().
        unfinished = self._ordered.unfinished
        if self._ordered.gathers is not None and self._buffer.device.type == "cpu":
            while unfinished and unfinished[0]._scattered.done():
                unfinished[0].begin_gather()
        return self._gathered is not None or self._scattered.done()

    def wait(self) -> torch.Tensor:
        while self._gathered is None:
            self._ordered.unfinished[0].begin_gather()
        data = as_bytes(self._buffer)
        data.copy_(self._gathered.wait()[: len(data)])
        return self._buffer

    def begin_gather(self) -> None:
        """Add the parts of all ranks, and begin to send the sum to all; the first of the unfinished ones does so."""
        rows = self._scattered.wait().view(self._buffer.dtype).view(self._ordered.size, self._own)
        total = reduce_rows(rows, self._op)
        if self._own < self._share:
            padded = total.new_zeros(self._share)
            padded[: self._own] = total
            total = padded
        self._gathered = self._gathers.allgather(as_bytes(total), f"{self._name}.gather")
        self._ordered.unfinished.popleft()
