"""Tensors between the ranks of one host through the memory they share; beneath the native backend.

Every rank has a slot to write to, and each reduces its part of everybody's slots: the ranks of a host read each other's
memory, and nothing is sent. Ranks move on when they look (Work.done and Work.wait), without a thread. Where there are
several hosts, the first rank of each, its leader, reduces the result with the other leaders, and tells its neighbours.

Note [phases]: a round of a buffer has two. A rank has "posted" when its values are in its slot, and has "finished" when
it has reduced its part. On the only host it writes its part of the result into the slots of all, each of which is its
rank's own again when all have finished. A rank has two slots, and says which one it has "chosen" before it posts.

Where there are several hosts, each rank writes its part into a slot for the result, which their leader reduces with
those of the other hosts. A slot is written again after all have finished, the result after all have posted anew, which
they do when they have read it.

Note [in turn]: values that every rank reads whole need no second phase where four buffers are used in turn, and two at
most are under way: whoever writes a fifth has seen that all posted the third, before which they had read the first.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dualdist.backends.base import Backend, ReduceOp, Settling, Work
from dualdist.errors import BackendUnavailableError
from dualdist.holders import uses
from dualdist.mailbox import LINE_BYTES, WORD_BYTES, Mailbox
from dualdist.mailbox import nbytes as mailbox_bytes
from dualdist.moves import as_bytes
from dualdist.shared_memory import Neighbours, Segment, pages

REDUCE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
# What passes through in pieces passes through slots of this size; it fits a processor's second cache.
STAGE_BYTES = 1 << 20
AT_ONCE = 2
# Two ranks pass smaller ones: what a rank has just written is still in its second cache when the other's has come.
PIECE_BYTES = 1 << 19
STAGES = 2 * AT_ONCE
# Up to here every rank reduces all by itself, which takes one phase, not two.
WHOLE_BYTES = 1 << 14
REASON = 500  # characters
# A part begins on a cache line of its own, for every dtype.
ALIGNED = 64
# The words that each rank has in a buffer.
POSTED, FINISHED, SPREAD, DROPPED, CHOSEN = range(5)
# How many slots a rank has to choose from.
CHOICES = 2
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

    def is_dropped(self) -> bool:
        """Whether no rank uses it any more."""
        return self.have_all(DROPPED, 1) and self._words[self._mine + DROPPED] == 1

    def free(self) -> None:
        """Give the memory back to the system; for the leader, when all have dropped it."""
        self._memory.madvise(REMOVE, 0, len(self._memory))


def line_bytes(size: int) -> int:
    """What a line of so many ranks takes from the start."""
    return mailbox_bytes(size) + STAGES * shared_bytes(size, size + 1, STAGE_BYTES)


def shared_bytes(size: int, slots: int, nbytes: int) -> int:
    """What a Shared of so many ranks and slots takes of its segment."""
    return pages(size * LINE_BYTES) + slots * pages(nbytes)


class OnHost:
    """One round of a buffer, from the moment when this rank's values are in its slot. A Work."""

    def __init__(self, line: HostLine, shared: Shared, op: ReduceOp) -> None:
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
            self._line.neighbours.wait(self.done)
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

    def _reduce(self, start: int, end: int) -> None:
        """My part of everybody's values, in rank order, so that all sums round alike."""
        raise NotImplementedError

    def _has_spread(self, may_leave: bool) -> bool:
        """Whether the host's result has become that of all hosts."""
        return True


def _part(count: int, place: int, size: int) -> tuple[int, int]:
    """The first element of a rank's part, and the one after its last."""
    each = -(-count // (size * ALIGNED)) * ALIGNED
    return min(count, place * each), min(count, (place + 1) * each)


class InSlots(OnHost):
    """On the only host: the ranks write their parts of the result into everybody's slots."""

    def __init__(self, line: HostLine, shared: Shared, values: torch.Tensor, op: ReduceOp, settling: Settling) -> None:
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


class Reduction(OnHost):
    """One of several hosts: the ranks share the work out, and its leader, with those of the other hosts, ends it."""

    def __init__(self, line: HostLine, shared: Shared, count: int, dtype: torch.dtype, op: ReduceOp, name: str) -> None:
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

    def __init__(self, line: HostLine, shared: Shared, number: int, count: int, dtype: torch.dtype) -> None:
        chosen = number * shared.size + shared.place
        slot = shared.own_slot(chosen)
        self.values = slot[: count * dtype.itemsize].view(dtype)
        self.settles = line.is_only_host
        self.rows = shared.rows[chosen]
        self.uses_without_rows = shared.uses_alone
        self._line = line
        self._shared = shared
        self._number = number

    def allreduce(self, op: ReduceOp, name: str, settling: Settling) -> OnHost:
        if not self._line.is_only_host:
            return Reduction(self._line, self._shared, len(self.values), self.values.dtype, op, name)
        self._line.free_dropped()
        self._shared.say(CHOSEN, self._number)
        return InSlots(self._line, self._shared, self.values, op, settling)


class Whole:
    """A reduction of few values, which every rank reduces by itself; one at a time is under way. A Work."""

    def __init__(self, line: HostLine, buffer: torch.Tensor, op: ReduceOp) -> None:
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
            self._line.neighbours.wait(self.done)
        return self._buffer


class Posted:
    """What a rank has let all others read, and will read from them."""

    def __init__(self, stage: Shared) -> None:
        self._stage = stage
        self._number = stage.post()

    def arrived(self) -> bool:
        """Whether all ranks have posted theirs."""
        return self._stage.have_all(POSTED, self._number)

    def slots(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """What every rank has posted."""
        slots = self._stage.slots[: self._stage.size]
        return [slot[: count * dtype.itemsize].view(dtype) for slot in slots]


class Passing:
    """An operation whose tensors pass through the stages; it happens in wait(). A Work."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run: Callable[[], torch.Tensor] | None = run
        self._result: torch.Tensor

    def done(self) -> bool:
        return self._run is None

    def wait(self) -> torch.Tensor:
        if self._run is not None:
            self._result = self._run()
            self._run = None
        return self._result


class HostLine:
    """A line between the ranks of one host, who all call the same in the same order; leaders reach other hosts."""

    def __init__(
        self, segment: Segment, ranks: Sequence[int], leaders: Backend | None, timeout_s: float, *, is_only_host: bool
    ) -> None:
        self.neighbours = Neighbours(segment, ranks, timeout_s)
        self.is_only_host = is_only_host
        self.leaders = leaders  # the line between the hosts' first ranks, on those
        self.under_way: list[OnHost] = []
        self._segment = segment
        self._mailbox = Mailbox(self.neighbours)
        slots = segment.size + 1
        stage_bytes, start = shared_bytes(segment.size, slots, STAGE_BYTES), mailbox_bytes(segment.size)
        self._stages = [Shared(segment, start + number * stage_bytes, STAGE_BYTES, slots) for number in range(STAGES)]
        self._end = start + STAGES * stage_bytes
        self._reserved: dict[int, int] = {}  # where buffers start -> bytes of a slot
        self._made: dict[int, Shared] = {}
        self._dropped: dict[int, Shared] = {}
        self._turn = 0
        self._last: Whole | None = None

    def advance(self) -> None:
        """Take everything that is under way as far as it goes; between hosts, in the order in which it began."""
        may_leave = True
        for work in list(self.under_way):
            if work.advance(may_leave=may_leave):
                self.under_way.remove(work)
            elif not work.is_between_hosts:
                may_leave = False

    def reserve(self, nbytes: int) -> tuple[int, str]:
        """Where a buffer of so many bytes for each rank lies, and why it does not fit: the same on all hosts."""
        start = self._end
        self._end += shared_bytes(self._segment.size, self._slots, nbytes)
        said = b""
        self._reserved[start] = nbytes
        self.free_dropped()
        if self._segment.place == 0:
            said = self._allocated(start, nbytes).encode()[:REASON]
        return start, self._mailbox.exchange(said)[0].decode(errors="replace")

    @property
    def _slots(self) -> int:
        """Those of a buffer: two for each rank, or where there are several hosts one, and one for the result."""
        return self._segment.size * CHOICES if self.is_only_host else self._segment.size + 1

    def _allocated(self, start: int, nbytes: int) -> str:
        """Make room, for the first slot of every rank only: a rank that needs its second one sees to it then."""
        slots = self._segment.size if self.is_only_host else self._slots
        reason = ""
        try:
            self._segment.allocate(start, shared_bytes(self._segment.size, slots, nbytes), self._end)
        except BackendUnavailableError as error:
            reason = str(error)
        if self.leaders is not None:
            fails = torch.tensor([bool(reason)], dtype=torch.uint8, device="cpu")
            if self.leaders.allreduce_(fails, "max", "reserve").wait().item() and not reason:
                reason = "another host has no room for it"
        return reason

    def free_dropped(self) -> None:
        """What nobody looks at any more, on no rank, goes back to the system."""
        if not self._dropped:
            return
        for start, shared in list(self._dropped.items()):
            if shared.is_looked_at():
                continue
            shared.say(DROPPED, 1)
            if self._segment.place == 0:
                if not shared.is_dropped():
                    continue
                shared.free()
            del self._dropped[start], self._reserved[start]  # the others never look again: the words may be gone

    def buffer(self, start: int, number: int, count: int, dtype: torch.dtype) -> SharedBuffer | None:
        """This rank's buffer of that number where it was reserved; None where there is no such slot, or no room."""
        self.free_dropped()
        nbytes, size = self._reserved[start], self._segment.size
        if number:
            if not self.is_only_host or number >= CHOICES:
                return None
            try:
                mine = shared_bytes(size, number * size + self._segment.place, nbytes)
                self._segment.allocate(start + mine, pages(nbytes))
            except BackendUnavailableError:
                return None
        if start not in self._made:
            self._made[start] = Shared(self._segment, start, nbytes, self._slots)
        return SharedBuffer(self, self._made[start], number, count, dtype)

    def drop(self, start: int) -> None:
        """Nobody uses it any more, but for those who still look at what lies there: every rank says so."""
        shared = self._made.pop(start, None)
        self._dropped[start] = shared or Shared(self._segment, start, self._reserved[start], self._slots)

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        """See Backend.allreduce_; on the only host few values begin to travel now, others when they are waited for."""
        if self.is_only_host and buffer.nbytes <= WHOLE_BYTES:
            self._finish_last()
            self._last = Whole(self, buffer, op)
            return self._last
        return Passing(lambda: self._in_pieces(buffer, op, name))

    def _in_pieces(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> torch.Tensor:
        """Two ranks read all of each other's values; more ranks share the work out, which takes them two phases."""
        self._finish_last()
        flat = buffer.view(-1)
        if self.is_only_host and self._segment.size == 2:
            self._in_pieces_of_two(flat, op)
            return buffer
        begun: list[tuple[torch.Tensor, Reduction]] = []
        for number, piece in enumerate(flat.split(STAGE_BYTES // flat.itemsize)):
            stage = self._filled(piece)
            begun.append((piece, Reduction(self, stage, len(piece), flat.dtype, op, f"{name}.{number}")))
            if len(begun) == AT_ONCE:
                _finish(*begun.pop(0))
        for piece, work in begun:
            _finish(piece, work)
        return buffer

    def _in_pieces_of_two(self, flat: torch.Tensor, op: ReduceOp) -> None:
        """Reduce in place with the other rank of two: each piece is still in the cache when the other's comes.

        The order of the two values does not matter to the result of any operation: it is the same on both ranks.
        """
        pieces = flat.split(PIECE_BYTES // flat.itemsize)
        count, place, reduce = len(pieces[0]), self._segment.place, REDUCE[op]
        slots = [[slot[: count * flat.itemsize].view(flat.dtype) for slot in stage.slots[:2]] for stage in self._stages]
        posted: deque[tuple[torch.Tensor, int, int]] = deque()

        def finish_first() -> None:
            piece, turn, number = posted.popleft()
            if not self._stages[turn].have_all(POSTED, number):
                self.neighbours.wait(functools.partial(self._stages[turn].have_all, POSTED, number))
            theirs = slots[turn][1 - place]
            reduce(piece, theirs if len(piece) == count else theirs[: len(piece)], out=piece)

        for piece in pieces:
            self._turn += 1
            turn = self._turn % STAGES
            mine = slots[turn][place]
            (mine if len(piece) == count else mine[: len(piece)]).copy_(piece)
            posted.append((piece, turn, self._stages[turn].post()))
            if len(posted) == AT_ONCE:
                finish_first()
        while posted:
            finish_first()

    def allgather(self, tensor: torch.Tensor) -> Passing:
        """See Backend.allgather; on the only host."""
        return Passing(lambda: self._gathered(tensor))

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        mine = as_bytes(tensor)
        output = mine.new_empty(self._segment.size, len(mine))
        for start in range(0, len(mine), STAGE_BYTES):
            piece = mine[start : start + STAGE_BYTES]
            for row, theirs in zip(output, self._passed(piece, len(piece)), strict=True):
                row[start : start + STAGE_BYTES].copy_(theirs)
        return output.view(-1).view(tensor.dtype).view(self._segment.size * tensor.shape[0], *tensor.shape[1:])

    def broadcast_(self, buffer: torch.Tensor, root: int) -> Passing:
        """See Backend.broadcast_; on the only host."""
        return Passing(lambda: self._broadcast(buffer, root))

    def _broadcast(self, buffer: torch.Tensor, root: int) -> torch.Tensor:
        is_root = self._segment.place == root
        for piece in as_bytes(buffer).split(STAGE_BYTES):
            found = self._passed(piece if is_root else piece[:0], len(piece))
            if not is_root:
                piece.copy_(found[root])
        return buffer

    def _passed(self, mine: torch.Tensor, count: int) -> list[torch.Tensor]:
        """The bytes that every rank gives, to be read before the next call: Note [in turn]."""
        self._finish_last()
        posted = self.post(mine)
        self.neighbours.wait(posted.arrived)
        return posted.slots(torch.uint8, count)

    def post(self, values: torch.Tensor) -> Posted:
        """Let the others read few values."""
        return Posted(self._filled(values))

    def _filled(self, values: torch.Tensor) -> Shared:
        """The next stage, with these values in my slot."""
        self._turn += 1
        stage = self._stages[self._turn % STAGES]
        if len(values):
            stage.slots[stage.place][: values.nbytes].view(values.dtype).copy_(values)
        return stage

    def _finish_last(self) -> None:
        if self._last is not None:
            self._last.wait()
            self._last = None

    def close(self) -> None:
        self.neighbours.close()


def _finish(piece: torch.Tensor, work: Work) -> None:
    result = work.wait()
    if result is not piece:
        piece.copy_(result)
