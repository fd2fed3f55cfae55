"""Collectives between the ranks of one host, and of several through the first rank of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from dualdist.backends.base import Backend, ReduceOp, gathered
from dualdist.backends.shm.channel import OPS, HostRanks

# All slots together: a chunk stays in cache from the copy to its slot until all ranks have read it.
TOTAL_BYTES = 1 << 21
MIN_SLOT_BYTES = 1 << 16
# Between hosts, smaller tensors go straight over the network.
SMALL_BYTES = 1 << 14


def slot_bytes(size: int) -> int:
    """Return the size of the slots, of which each rank has two."""
    return max(1, TOTAL_BYTES // (2 * size * MIN_SLOT_BYTES)) * MIN_SLOT_BYTES


class HostWork:
    """An operation that runs when it, or a later one, is waited for. A Work.

    It is done once all ranks have begun it: wait() then returns as soon as all wait. A joined rank learns by this that
    the others have begun an operation.
    """

    def __init__(
        self,
        collectives: HostCollectives,
        begin: Callable[[], torch.Tensor],
        finish: Callable[[torch.Tensor], None] = lambda result: None,
    ) -> None:
        self._collectives = collectives
        self._number = collectives.host.channel.announce()
        self._begin = begin  # in the channel; returns where the result will be
        self._finish = finish  # after the channel has
        self._begun: torch.Tensor | None = None
        self._result: torch.Tensor | None = None
        collectives.queue.append(self)

    def done(self) -> bool:
        # Whether other hosts have begun it is unknown here.
        is_known, channel = self._collectives.is_only_host, self._collectives.host.channel
        return self._result is not None or (is_known and channel.have_all_announced(self._number))

    def wait(self) -> torch.Tensor:
        queue = self._collectives.queue
        while self._result is None:
            queue[0].run()
            queue.popleft()
        return self._result

    def run(self) -> None:
        found = self._begin() if self._begun is None else self._begun
        self._begun = found
        self._collectives.host.finish()
        self._finish(found)
        self._result = found

    def try_wait(self, seconds: float) -> bool:
        """Return True if this is done within `seconds`; False at once if others are before it, or between hosts."""
        collectives = self._collectives
        if self._result is None and collectives.is_only_host and collectives.queue[0] is self:
            self._begun = self._begin() if self._begun is None else self._begun
            if collectives.host.channel.advance(seconds):
                self._result = self._begun
                collectives.queue.popleft()
        return self._result is not None


class HostCollectives:
    """The operations of a backend between the ranks of a host, all of its ranks or some.

    Args:
        host: the ranks of this host.
        leaders: connects the hosts' first ranks, on those.
        is_only_host: whether all of the backend's ranks are on this host.
    """

    def __init__(self, host: HostRanks, leaders: Backend | None, *, is_only_host: bool) -> None:
        self.host = host
        self.leaders = leaders
        self.is_only_host = is_only_host
        self.queue: deque[HostWork] = deque()  # what has not run yet, in the order in which all ranks begin it

    @property
    def timeout_s(self) -> float:
        return self.host.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.host.timeout_s = value
        if self.leaders is not None:
            self.leaders.timeout_s = value

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None) -> HostWork:
        """See Backend.allreduce_; takes means on a single host only."""
        given = buffer if source is None else source

        def begin() -> torch.Tensor:
            self.host.channel.begin_allreduce(given, buffer, OPS.index(op))
            return buffer

        return HostWork(self, begin, partial(self._reduce_between_hosts, op, name))

    def _reduce_between_hosts(self, op: ReduceOp, name: str, buffer: torch.Tensor) -> None:
        if self.is_only_host:
            return
        if self.leaders is not None:
            self.leaders.allreduce_(buffer, op, name).wait()
        self.host.channel.begin_broadcast(buffer, 0)
        self.host.finish()

    def allgather(self, tensor: torch.Tensor, output: torch.Tensor | None) -> HostWork:
        """See Backend.allgather; on a single host."""

        def begin() -> torch.Tensor:
            target = gathered(tensor, self.host.size, output)
            self.host.channel.begin_allgather(tensor, target)
            return target

        return HostWork(self, begin)

    def broadcast_(self, buffer: torch.Tensor, root: int) -> HostWork:
        """See Backend.broadcast_; on a single host."""

        def begin() -> torch.Tensor:
            self.host.channel.begin_broadcast(buffer, root)
            return buffer

        return HostWork(self, begin)

    def close(self) -> None:
        self.host.close()
