"""Collectives between the ranks of one host, and of several through the first rank of each.

They queue for the host's channel (channel.py), which waits for ranks; csrc/shared_memory.cpp, or its twin
python_channel.py, moves and reduces the data.
"""

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
        result: torch.Tensor,
        begin: Callable[[], None],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._collectives = collectives
        self._number = collectives.host.channel.announce()
        self._result = result
        self._begin = begin  # in the channel
        self._finish = finish  # after the channel has
        self._has_begun = self._has_ended = False
        collectives.queue.append(self)

    def done(self) -> bool:
        # Whether other hosts have begun it is unknown here.
        is_known, channel = self._collectives.is_only_host, self._collectives.host.channel
        return self._has_ended or (is_known and channel.have_all_announced(self._number))

    def wait(self) -> torch.Tensor:
        queue = self._collectives.queue
        while not self._has_ended:
            queue[0].run()
            queue.popleft()
        return self._result

    def run(self) -> None:
        if not self._has_begun:
            self._begin()
            self._has_begun = True
        self._collectives.host.finish()
        if self._finish is not None:
            self._finish()
        self._has_ended = True

    def try_wait(self, seconds: float) -> bool:
        """Return True if this is done within `seconds`; False at once if others are before it, or between hosts."""
        collectives = self._collectives
        if not self._has_ended and collectives.is_only_host and collectives.queue[0] is self:
            if not self._has_begun:
                self._begin()
                self._has_begun = True
            if collectives.host.channel.advance(seconds):
                self._has_ended = True
                collectives.queue.popleft()
        return self._has_ended


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
        begin = partial(self.host.channel.begin_allreduce, given, buffer, OPS.index(op))
        return HostWork(
            self, buffer, begin, None if self.is_only_host else partial(self._reduce_between_hosts, op, name, buffer)
        )

    def _reduce_between_hosts(self, op: ReduceOp, name: str, buffer: torch.Tensor) -> None:
        if self.leaders is not None:
            self.leaders.allreduce_(buffer, op, name).wait()
        self.host.channel.begin_broadcast(buffer, 0)
        self.host.finish()

    def allgather(self, tensor: torch.Tensor, output: torch.Tensor | None) -> HostWork:
        """See Backend.allgather; on a single host."""
        target = gathered(tensor, self.host.size, output)
        return HostWork(self, target, partial(self.host.channel.begin_allgather, tensor, target))

    def broadcast_(self, buffer: torch.Tensor, root: int) -> HostWork:
        """See Backend.broadcast_; on a single host."""
        return HostWork(self, buffer, partial(self.host.channel.begin_broadcast, buffer, root))

    def close(self) -> None:
        self.host.close()
