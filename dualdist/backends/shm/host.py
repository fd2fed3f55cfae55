"""The ranks of one host: operations and messages through shared memory, one at a time, in one order on all ranks.

csrc/shared_memory.cpp moves and reduces the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import Message, gathered
from dualdist.backends.operation import Operation
from dualdist.backends.shm.segment import SharedSegment, open_segment
from dualdist.errors import CollectiveError
from dualdist.utils import extension
from dualdist.utils.deadline import Deadline

if TYPE_CHECKING:
    from dualdist.backends.base import Store

OPS: tuple[ReduceOp, ...] = ("sum", "product", "min", "max", "mean")
# Seconds for which a rank that waits polls before it yields its core, if every rank has a core.
SPIN_S = 0.00003
# The size of all slots together. A chunk stays in cache from the copy to its slot until all ranks have read it.
TOTAL_BYTES = 1 << 21
MIN_SLOT_BYTES = 1 << 16
# The size of slots that carry messages alone, of the length in front of a message, and of a fragment of its text.
MESSAGE_SLOT_BYTES = 17 << 10
LENGTH_BYTES = 4
FRAGMENT_BYTES = 768
# The largest payload of a rank, which all others read, and the largest of all ranks together.
PAYLOAD_BYTES, PAYLOADS_BYTES = 16 << 10, 64 << 10
CACHE_LINE_BYTES = 64


def slot_bytes(size: int) -> int:
    """Return the size of the slots, of which each rank has two."""
    return max(1, TOTAL_BYTES // (2 * size * MIN_SLOT_BYTES)) * MIN_SLOT_BYTES


def memory_bytes(size: int, slot_bytes: int) -> int:
    """Return the size of the memory, as ShmChannel.needed_bytes() in C++."""
    return CACHE_LINE_BYTES + 2 * size * slot_bytes


class HostRanks:
    """The ranks of one host and the memory between them. A Messenger."""

    def __init__(self, segment: SharedSegment, ranks: Sequence[int], slot_bytes: int) -> None:
        self.size, self.index = segment.size, segment.index
        self.payload_bytes = min(PAYLOAD_BYTES, PAYLOADS_BYTES // segment.size)  # a field of Messenger
        self.is_open = True
        self._segment = segment
        self._ranks = ranks
        module: Any = extension.load()
        spin_s = SPIN_S if segment.may_spin else 0.0
        self.memory: Any = module.ShmChannel(segment.map(), segment.index, segment.size, slot_bytes, spin_s)
        # A method of Messenger.
        self.message: Callable[[bytes, torch.Tensor | None], Message] = partial(HostMessage, self.memory, self.size)

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, source: torch.Tensor | None = None) -> HostOperation:
        """See Backend.allreduce_; takes means, too."""
        given = buffer if source is None else source
        return HostOperation(self.memory, buffer, partial(self.memory.begin_allreduce, given, buffer, OPS.index(op)))

    def allgather(self, tensor: torch.Tensor, output: torch.Tensor | None) -> HostOperation:
        """See Backend.allgather."""
        target = gathered(tensor, self.size, output)
        return HostOperation(self.memory, target, partial(self.memory.begin_allgather, tensor, target))

    def broadcast_(self, buffer: torch.Tensor, root: int) -> HostOperation:
        """See Backend.broadcast_."""
        return HostOperation(self.memory, buffer, partial(self.memory.begin_broadcast, buffer, root))

    def reduce_scatter_(self, buffer: torch.Tensor, starts: Sequence[int], op: ReduceOp) -> HostOperation:
        """Reduce bytes [starts[i], starts[i + 1]) of `buffer` on rank i; the rest is undefined afterwards."""
        begin = partial(self.memory.begin_reduce_scatter, buffer, list(starts), OPS.index(op))
        return HostOperation(self.memory, buffer, begin)

    def share_(self, buffer: torch.Tensor, starts: Sequence[int]) -> HostOperation:
        """Copy bytes [starts[i], starts[i + 1]) of `buffer` from rank i to all ranks."""
        return HostOperation(self.memory, buffer, partial(self.memory.begin_share, buffer, list(starts)))

    def lost_ranks(self) -> list[int]:
        """Return the ranks whose processes have ended or left."""
        return [rank for index, rank in enumerate(self._ranks) if not self._segment.is_alive(index)]

    def close(self) -> None:
        """Leave, which the other processes notice when they wait for this one, and free the memory."""
        if self.is_open:
            self.is_open = False
            self._segment.leave()
            self.memory = self.message = LeftMemory()


def connect_host(
    store: Store, key: str, ranks: Sequence[int], index: int, slot_bytes: int, deadline: Deadline, room: int = 0
) -> HostRanks:
    """Connect these ranks of one host, of which this is number `index`; all of them call this: see open_segment()."""
    size = len(ranks)
    segment = open_segment(store, key, index, size, memory_bytes(size, slot_bytes), deadline, room)
    return HostRanks(segment, ranks, slot_bytes)


class LeftMemory:
    """Takes the place of the memory that this rank has left after a failure, or at the end of the session."""

    def __getattr__(self, name: str) -> Any:
        raise CollectiveError("this rank has left the shared memory of its host")

    def __call__(self, *_: Any) -> Any:
        raise CollectiveError("this rank has left the shared memory of its host")


class HostOperation(Operation[torch.Tensor]):
    """An operation in shared memory, which begins when it is first advanced: those before it have ended then."""

    def __init__(self, memory: Any, result: torch.Tensor, begin: Callable[[], None]) -> None:
        self.result = result
        self._memory = memory
        self._begin: Callable[[], None] | None = begin
        self._has_begun = self._has_ended = False

    @property
    def steps(self) -> int:
        return int(self._memory.steps) if self._has_begun and not self._has_ended else 0

    def advance(self, wait_s: float) -> bool:
        if not self._has_begun:
            if self._begin is None:
                raise CollectiveError("it was interrupted as it began")
            begin, self._begin = self._begin, None
            begin()
            self._has_begun = True
        if not self._has_ended:
            self._has_ended = self._memory.advance(wait_s)
        return self._has_ended


class HostMessage(Message):
    """A message through shared memory, in as many fragments as the longest one needs."""

    def __init__(self, memory: Any, size: int, data: bytes, payload: torch.Tensor | None) -> None:
        self._memory = memory
        self._size = size
        self._data = data
        self._payload = payload
        self._received: list[bytes] = []  # what each rank sent, unless all sent the same few bytes
        self._next = 0  # where the fragment that is exchanged next, or now, begins
        self._is_posted = self._has_ended = False

    def advance(self, wait_s: float) -> bool:
        while not self._has_ended:
            if not self._is_posted:
                self._is_posted = True
                fragment = self._data[self._next : self._next + FRAGMENT_BYTES]
                if self._next == 0:
                    fragment = len(self._data).to_bytes(LENGTH_BYTES, "little") + fragment
                self._memory.begin_message(fragment, self._payload)
            if not self._memory.advance(wait_s):
                return False
            if self._next == 0 and len(self._data) <= FRAGMENT_BYTES and self._memory.are_texts_equal():
                self.is_equal = self._has_ended = True
            else:
                self._read()
        return True

    def _read(self) -> None:
        """Keep the fragments of all ranks, and prepare the next one unless these are the last."""
        texts = self._memory.texts()
        self._received = texts if self._next == 0 else [*map(bytes.__add__, self._received, texts)]
        self._next += FRAGMENT_BYTES
        self._is_posted, self._payload = False, None
        longest = max(int.from_bytes(received[:LENGTH_BYTES], "little") for received in self._received)
        self._has_ended = self._next >= longest

    @property
    def result(self) -> list[bytes]:  # type: ignore[override]
        if self.is_equal:
            return [self._data] * self._size
        return [received[LENGTH_BYTES:] for received in self._received]

    def reduce_payloads(self, tensor: torch.Tensor, op: ReduceOp, *, in_place: bool) -> torch.Tensor:
        reduced: torch.Tensor = self._memory.reduce_payloads(tensor, OPS.index(op), in_place)
        return reduced
