"""A channel between the ranks of one host: one operation at a time through shared memory, begun by all in one order.

Messages go through it too: the requests that precede collectives, and the values of small tensors.

Its operations are those of PythonChannel, mostly in C++: the extension's ShmChannel has the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dualdist.backends.base import ReduceOp, timeout_error
from dualdist.backends.shm.python_channel import PythonChannel, channel_bytes
from dualdist.backends.shm.segment import SharedSegment, open_segment
from dualdist.errors import CLOSED, NotInitializedError, RankLostError
from dualdist.utils import extension
from dualdist.utils.deadline import Deadline

if TYPE_CHECKING:
    from dualdist.backends.base import Store

OPS: tuple[ReduceOp, ...] = ("sum", "product", "min", "max", "mean")
# Seconds for which a rank that waits polls before it yields its core, if every rank has a core.
SPIN_S = 0.00003
LIVENESS_CHECK_S = 0.2
# Messages: of each slot, with the payload and both lengths; of a length; of the text in a slot; of the payload.
SLOT_BYTES = 1 << 10
LENGTH_BYTES = 4
FRAGMENT_BYTES = 768
PAYLOAD_BYTES = 128  # with a request it fits one row of ControlAllgather, too


class HostRanks:
    """The ranks of one host, and the channel between them."""

    def __init__(self, segment: SharedSegment, ranks: Sequence[int], slot_bytes: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.size, self.index = segment.size, segment.index
        self.is_open = True
        self._segment = segment
        self._ranks = ranks
        arguments: Any = segment.map(), segment.index, segment.size, slot_bytes
        module = extension.load() if segment.use.by_extension else None
        self.channel: PythonChannel = (
            PythonChannel(*arguments)
            if module is None
            else module.ShmChannel(*arguments, SPIN_S if segment.use.may_spin else 0.0)
        )

    def finish(self) -> None:
        """Wait until the operation of the channel has ended.

        Raises:
            RankLostError: a rank has ended.
            CollectiveTimeoutError: this rank did not get on for `timeout_s`.
        """
        channel = self.channel
        if channel.advance(LIVENESS_CHECK_S):  # mostly
            return
        steps, deadline = channel.steps, Deadline(self.timeout_s)
        while not channel.advance(LIVENESS_CHECK_S):
            if not self.is_open:
                raise NotInitializedError(CLOSED)
            lost = [rank for index, rank in enumerate(self._ranks) if not self._segment.is_alive(index)]
            if lost and not channel.advance(0.0):
                error = RankLostError(f"rank {', '.join(map(str, lost))} called dd.shutdown() or ended")
                error.ranks = tuple(lost)
                raise error
            if channel.steps != steps:
                steps, deadline = channel.steps, Deadline(self.timeout_s)
            elif deadline.passed() and not channel.advance(0.0):
                raise timeout_error(deadline.timeout_s)

    def close(self) -> None:
        """End waits with an error, here and in the other processes."""
        if self.is_open:
            self.is_open = False
            self._segment.leave()


def connect_host(
    store: Store,
    key: str,
    ranks: Sequence[int],
    index: int,
    slot_bytes: int,
    deadline: Deadline,
    room: int = 0,
) -> HostRanks:
    """Connect these ranks of one host, of which this is number `index`; all of them call this: see open_segment()."""
    size = len(ranks)
    segment = open_segment(store, key, index, size, channel_bytes(size, slot_bytes), deadline, room)
    return HostRanks(segment, ranks, slot_bytes, deadline.timeout_s)


class ShmMessage:
    """An allgather of bytes of any length, with the elements of a small tensor if there is one.

    The first fragment is posted when this is created.
    """

    def __init__(self, host: HostRanks, data: bytes, payload: torch.Tensor | None = None) -> None:
        self._host = host
        self._data = data
        host.channel.begin_message(len(data).to_bytes(LENGTH_BYTES, "little") + data[:FRAGMENT_BYTES], payload)

    def done(self) -> bool:
        """Return True if the first fragment, mostly the only one, has arrived from every rank."""
        return self._host.channel.advance(0.0)

    def all_equal(self) -> bool:
        """Return True if all ranks sent the same and it is short: faster than comparing the results of wait()."""
        if not self._host.channel.advance(LIVENESS_CHECK_S):
            self._host.finish()
        return len(self._data) <= FRAGMENT_BYTES and self._host.channel.are_texts_equal()

    def reduce_payloads(self, tensor: torch.Tensor, op: ReduceOp, *, in_place: bool) -> torch.Tensor:
        """Return the reduction of the ranks' tensors, if all_equal(); `tensor` is this rank's."""
        return self._host.channel.reduce_payloads(tensor, OPS.index(op), in_place)

    def wait(self) -> list[bytes]:
        """Return the bytes of all ranks, in rank order."""
        self._host.finish()
        fragments = self._host.channel.texts()
        longest = max(int.from_bytes(fragment[:LENGTH_BYTES], "little") for fragment in fragments)
        collected = [fragment[LENGTH_BYTES:] for fragment in fragments]
        for start in range(FRAGMENT_BYTES, longest, FRAGMENT_BYTES):
            self._host.channel.begin_message(self._data[start : start + FRAGMENT_BYTES], None)
            self._host.finish()
            more = self._host.channel.texts()
            collected = [data + fragment for data, fragment in zip(collected, more, strict=True)]
        return collected
