"""Memory that the ranks of a host write to, and the words by which they tell each other how far they are."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dualdist.backends.holders import uses
from dualdist.backends.shm.exchange import LINE_BYTES, WORD_BYTES
from dualdist.backends.shm.segment import Segment, pages

# The words that each rank has in a buffer.
POSTED, FINISHED, SPREAD, DROPPED, CHOSEN, BEGUN = range(6)
REMOVE = 9  # madvise(2): MADV_REMOVE


class Shared:
    """Slots, first one for every rank, and the words that say how far each rank has come."""

    def __init__(self, segment: Segment, start: int, nbytes: int, slots: int) -> None:
        self.size, self.place, self.start = segment.size, segment.place, start
        memory = segment.map(start, shared_bytes(self.size, slots, nbytes))
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        step, width = LINE_BYTES // WORD_BYTES, pages(nbytes)
        others = [place for place in range(self.size) if place != self.place]
        self._mine = self.place * step
        self._theirs = [place * step for place in others]
        body = pages(self.size * LINE_BYTES)
        self._places = [(nbytes, body + number * width) for number in range(slots)]
        # Each has a storage of its own, whose users can be counted.
        self.slots = [self._slot(number) for number in range(slots)]
        self._addresses = [slot.data_ptr() for slot in self.slots]
        self.uses_alone = uses(self.slots[0])
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
        return [self._words[place * LINE_BYTES // WORD_BYTES + word] for place in range(self.size)]

    def is_looked_at(self) -> bool:
        """Whether anybody here looks at this rank's slots."""
        return any(uses(slot) > self.uses_alone for slot in self.slots[self.place :: self.size])

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
    """What a Shared of so many ranks and slots takes of its segment."""
    return pages(size * LINE_BYTES) + slots * pages(nbytes)
