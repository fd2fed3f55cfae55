"""Reductions between the ranks of a host that are under way in the memory they share."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dualdist.backends.base import Epilogue, ReduceOp, Work
from dualdist.backends.buffers import storage_uses
from dualdist.backends.shm.exchange import CACHE_LINE_BYTES, WORD_BYTES
from dualdist.backends.shm.segment import SharedSegment, round_to_pages

if TYPE_CHECKING:
    from dualdist.backends.shm.backend import HostChannel

# The words that each rank has in a buffer.
POSTED, FINISHED, SPREAD, DROPPED, CHOSEN, BEGUN = range(6)
REMOVE = 9  # madvise(2): MADV_REMOVE


class ShmSlots:
    """Slots, first one for every rank, and the words that say how far each rank has come."""

    def __init__(self, segment: SharedSegment, start: int, nbytes: int, slots: int) -> None:
        self.size, self.place, self.start = segment.size, segment.place, start
        memory = segment.map(start, shared_bytes(self.size, slots, nbytes))
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        step, width = CACHE_LINE_BYTES // WORD_BYTES, round_to_pages(nbytes)
        others = [place for place in range(self.size) if place != self.place]
        self._mine = self.place * step
        self._theirs = [place * step for place in others]
        body = round_to_pages(self.size * CACHE_LINE_BYTES)
        self._places = [(nbytes, body + number * width) for number in range(slots)]
        # Each has a storage of its own, whose users can be counted.
        self.slots = [self._slot(number) for number in range(slots)]
        self._addresses = [slot.data_ptr() for slot in self.slots]
        self.uses_alone = storage_uses(self.slots[0])
        self.rows: list[weakref.WeakSet[Any]] = [weakref.WeakSet() for _ in self.slots]

    def _slot(self, number: int) -> torch.Tensor:
        nbytes, start = self._places[number]
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=start)

    def own_slot(self, number: int) -> torch.Tensor:
        """One of this rank's; a new one where a program has moved what lay there to other memory of its own."""
        if self.slots[number].data_ptr() != self._addresses[number]:
            self.slots[number], self.rows[number] = self._slot(number), weakref.WeakSet()
        return self.slots[number]

    def post(self) -> int:
        """My values are in my slot; returns the number of the round."""
        number = self._words[self._mine + POSTED] + 1
        self._words[self._mine + POSTED] = number
        return number

    def say(self, word: int, value: int) -> None:
        """Set one of my words."""
        self._words[self._mine + word] = value

    def have_all(self, word: int, number: int) -> bool:
        """Whether this word of all the others has come so far."""
        words = self._words
        return all(words[place + word] >= number for place in self._theirs)

    def has_leader(self, word: int, number: int) -> bool:
        """Whether this word of the leader has come so far."""
        return self._words[word] >= number

    def told(self, word: int) -> list[int]:
        """This word of every rank."""
        return [self._words[place * CACHE_LINE_BYTES // WORD_BYTES + word] for place in range(self.size)]

    def is_looked_at(self) -> bool:
        """Whether anybody here looks at this rank's slots."""
        return any(storage_uses(slot) > self.uses_alone for slot in self.slots[self.place :: self.size])

    def drop(self) -> None:
        """This rank will not use it again."""
        self.say(DROPPED, 1)

    def is_dropped(self) -> bool:
        """Whether no rank uses it any more."""
        return self.have_all(DROPPED, 1) and self._words[self._mine + DROPPED] == 1

    def free(self) -> None:
        """Give the memory back to the system; for the leader, when all have dropped it."""
        self._memory.madvise(REMOVE, 0, len(self._memory))


def shared_bytes(size: int, slots: int, nbytes: int) -> int:
    """What a ShmSlots of so many ranks and slots takes of its segment."""
    return round_to_pages(size * CACHE_LINE_BYTES) + slots * round_to_pages(nbytes)


# Note [phases]: a round of a buffer has two. A rank has "posted" when its values are in its slot, and has "finished"
# when it has reduced its part. On the only host it writes its part of the result into the slots of all, each of which
# is its rank's own again when all have finished. A rank has two slots, and says which one it has "chosen" before it
# posts.
#
# Where there are several hosts, each rank writes its part into a slot for the result, which their leader reduces with
# those of the other hosts. A slot is written again after all have finished, the result after all have posted anew,
# which they do when they have read it.

REDUCE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
# What a rank has just written is still in its second cache when the others' has come.
PIECE_BYTES = 1 << 19
# A part begins on a cache line of its own, for every dtype.
ALIGNED = 64


class BufferReduction(ABC):
    """One round of a buffer, from the moment when this rank's values are in its slot. A Work."""

    def __init__(self, line: HostChannel, shared: ShmSlots, op: ReduceOp) -> None:
        self.is_between_hosts = False  # or has been
        self._line = line
        self._shared = shared
        self._op = op
        self._result: torch.Tensor
        self._is_reduced = self._is_done = False
        self._number = shared.post()
        line.under_way.append(self)

    def done(self) -> bool:
        if not self._is_done:
            self._line.advance()
        return self._is_done

    def wait(self) -> torch.Tensor:
        if not self._is_done:
            self._line.peers.wait(self.done)
        return self._result

    def advance(self, *, may_leave: bool) -> bool:
        """Do what can be done without waiting, and leave the host if it may; whether that was the last of it."""
        shared, number = self._shared, self._number
        if not self._is_reduced:
            if not shared.have_all(POSTED, number):
                return False
            self._reduce(*_part(self._result.numel(), shared.place, shared.size))
            shared.say(FINISHED, number)
            self._is_reduced = True
        self._is_done = shared.have_all(FINISHED, number) and self._has_spread(may_leave)
        return self._is_done

    @abstractmethod
    def _reduce(self, start: int, end: int) -> None:
        """My part of everybody's values, in rank order, so that all sums round alike."""

    def _has_spread(self, may_leave: bool) -> bool:
        """Whether the host's result has become that of all hosts."""
        return True


def _part(count: int, place: int, size: int) -> tuple[int, int]:
    """The first element of a rank's part, and the one after its last."""
    each = -(-count // (size * ALIGNED)) * ALIGNED
    return min(count, place * each), min(count, (place + 1) * each)


class SingleHostReduction(BufferReduction):
    """On the only host: the ranks write their parts of the result into everybody's slots."""

    def __init__(
        self, line: HostChannel, shared: ShmSlots, values: torch.Tensor, op: ReduceOp, settling: Epilogue
    ) -> None:
        self._result = values
        self._settling = settling
        super().__init__(line, shared, op)

    def _reduce(self, start: int, end: int) -> None:
        shared, dtype = self._shared, self._result.dtype
        slots = [shared.slots[choice * shared.size + place] for place, choice in enumerate(shared.told(CHOSEN))]
        step = PIECE_BYTES // dtype.itemsize
        for first in range(start, end, step):
            last = min(first + step, end)
            total, *others = [slot[first * dtype.itemsize : last * dtype.itemsize].view(dtype) for slot in slots]
            reduce_into(total, [total, *others], self._op)
            if first < self._settling.count:
                self._settling.settle(total[: self._settling.count - first])
            for other in others:
                other.copy_(total)


class MultiHostReduction(BufferReduction):
    """One of several hosts: the ranks share the work out, and its leader, with those of the other hosts, ends it."""

    def __init__(
        self, line: HostChannel, shared: ShmSlots, count: int, dtype: torch.dtype, op: ReduceOp, name: str
    ) -> None:
        self._name = name
        self._between_hosts: Work | None = None
        *self._slots, self._result = [slot[: count * dtype.itemsize].view(dtype) for slot in shared.slots]
        super().__init__(line, shared, op)

    def _reduce(self, start: int, end: int) -> None:
        if start < end:
            reduce_into(self._result[start:end], [slot[start:end] for slot in self._slots], self._op)

    def _has_spread(self, may_leave: bool) -> bool:
        if self._line.is_only_host:
            return True
        leaders = self._line.leaders
        if leaders is None:
            return self._shared.has_leader(SPREAD, self._number)
        if self._between_hosts is None and may_leave:
            self._between_hosts = leaders.allreduce_(self._result, self._op, self._name)
            self.is_between_hosts = True
        if self._between_hosts is None or not self._between_hosts.done():
            return False
        self._between_hosts.wait()
        self._shared.say(SPREAD, self._number)
        return True


def reduce_into(total: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reduction of the parts, from the first to the last."""
    if len(parts) == 1:
        return total.copy_(parts[0])
    reduce = REDUCE[op]
    reduce(parts[0], parts[1], out=total)
    for part in parts[2:]:
        reduce(total, part, out=total)
    return total


class SharedBuffer:
    """A Buffer whose values lie in one of this rank's slots."""

    def __init__(self, line: HostChannel, shared: ShmSlots, number: int, count: int, dtype: torch.dtype) -> None:
        chosen = number * shared.size + shared.place
        slot = shared.own_slot(chosen)
        self.values = slot[: count * dtype.itemsize].view(dtype)
        self.settles = line.is_only_host
        self.rows = shared.rows[chosen]
        self.uses_without_rows = shared.uses_alone
        self._line = line
        self._shared = shared
        self._number = number

    def allreduce(self, op: ReduceOp, name: str, settling: Epilogue) -> BufferReduction:
        if not self._line.is_only_host:
            return MultiHostReduction(self._line, self._shared, len(self.values), self.values.dtype, op, name)
        self._line.free_dropped()
        self._shared.say(CHOSEN, self._number)
        return SingleHostReduction(self._line, self._shared, self.values, op, settling)


class SmallReduction:
    """A reduction of few values, which every rank reduces by itself; one at a time is under way. A Work."""

    def __init__(self, line: HostChannel, buffer: torch.Tensor, op: ReduceOp) -> None:
        self._line = line
        self._buffer = buffer
        self._op = op
        self._posted = line.post(buffer.view(-1))
        self._is_done = False

    def done(self) -> bool:
        if not self._is_done and self._posted.arrived():
            flat = self._buffer.view(-1)
            reduce_into(flat, self._posted.slots(flat.dtype, len(flat)), self._op)
            self._is_done = True
        return self._is_done

    def wait(self) -> torch.Tensor:
        if not self._is_done:
            self._line.peers.wait(self.done)
        return self._buffer


class PostedRows:
    """What a rank has let all others read, and will read from them."""

    def __init__(self, stage: ShmSlots) -> None:
        self._stage = stage
        self._number = stage.post()

    def arrived(self) -> bool:
        """Whether all ranks have posted theirs."""
        return self._stage.have_all(POSTED, self._number)

    def slots(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """What every rank has posted."""
        slots = self._stage.slots[: self._stage.size]
        return [slot[: count * dtype.itemsize].view(dtype) for slot in slots]


class StagedCollective:
    """An operation whose tensors pass through the stages; it happens in wait(). A Work.

    It counts as done once all have begun it: wait() then returns as soon as all wait. Who has joined finds out by this
    that the others have begun something.
    """

    def __init__(self, run: Callable[[], torch.Tensor], have_begun: Callable[[], bool]) -> None:
        self._run: Callable[[], torch.Tensor] | None = run
        self._have_begun = have_begun
        self._result: torch.Tensor

    def done(self) -> bool:
        return self._run is None or self._have_begun()

    def wait(self) -> torch.Tensor:
        if self._run is not None:
            self._result = self._run()
            self._run = None
        return self._result
