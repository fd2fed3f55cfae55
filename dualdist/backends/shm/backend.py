"""Tensors between the ranks of one host through the memory they share; beneath the native backend.

Every rank has a slot to write to, and each reduces its part of everybody's slots: the ranks of a host read each other's
memory, and nothing is sent. Ranks move on when they look (Work.done and Work.wait), without a thread. Where there are
several hosts, the first rank of each, its leader, reduces the result with the other leaders, and tells its peers.

Note [in turn]: values that every rank reads whole need no second phase where four buffers are used in turn, and two at
most are under way: whoever writes a fifth has seen that all posted the third, before which they had read the first.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence

import torch

from dualdist.backends.base import Backend, ReduceOp, Work
from dualdist.backends.control_plane import as_bytes
from dualdist.backends.shm.exchange import ShmExchange, exchange_bytes
from dualdist.backends.shm.reduction import (
    BEGUN,
    PIECE_BYTES,
    POSTED,
    REDUCE,
    BufferReduction,
    MultiHostReduction,
    PostedRows,
    SharedBuffer,
    ShmSlots,
    SmallReduction,
    StagedCollective,
    shared_bytes,
)
from dualdist.backends.shm.segment import SegmentPeers, SharedSegment, round_to_pages
from dualdist.errors import BackendUnavailableError

# What passes through in pieces passes through slots of this size; it fits a processor's second cache.
STAGE_BYTES = 1 << 20
MAX_IN_FLIGHT = 2
STAGES = 2 * MAX_IN_FLIGHT
# Up to here every rank reduces all by itself, which takes one phase, not two.
ONE_PHASE_BYTES = 1 << 14
REASON = 500  # characters
# How many slots a rank has to choose from.
SLOTS_PER_RANK = 2


def channel_bytes(size: int) -> int:
    """What a line of so many ranks takes from the start."""
    return exchange_bytes(size) + STAGES * shared_bytes(size, size + 1, STAGE_BYTES)


class HostChannel:
    """A line between the ranks of one host, who all call the same in the same order; leaders reach other hosts."""

    def __init__(
        self,
        segment: SharedSegment,
        ranks: Sequence[int],
        leaders: Backend | None,
        timeout_s: float,
        *,
        is_only_host: bool,
    ) -> None:
        self.peers = SegmentPeers(segment, ranks, timeout_s)
        self.is_only_host = is_only_host
        self.leaders = leaders  # the line between the hosts' first ranks, on those
        self.under_way: list[BufferReduction] = []
        self._segment = segment
        self._mailbox = ShmExchange(self.peers)
        slots = segment.size + 1
        stage_bytes, start = shared_bytes(segment.size, slots, STAGE_BYTES), exchange_bytes(segment.size)
        self._stages = [ShmSlots(segment, start + number * stage_bytes, STAGE_BYTES, slots) for number in range(STAGES)]
        self._end = start + STAGES * stage_bytes
        self._reserved: dict[int, int] = {}  # where buffers start -> bytes of a slot
        self._made: dict[int, ShmSlots] = {}
        self._dropped: dict[int, ShmSlots] = {}
        self._turn = 0
        self._begun = 0  # operations that pass through the stages
        self._last: SmallReduction | None = None

    @property
    def timeout_s(self) -> float:
        return self.peers.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.peers.timeout_s = value
        if self.leaders is not None:
            self.leaders.timeout_s = value

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
        return self._segment.size * SLOTS_PER_RANK if self.is_only_host else self._segment.size + 1

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
            shared.drop()
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
            if not self.is_only_host or number >= SLOTS_PER_RANK:
                return None
            try:
                mine = shared_bytes(size, number * size + self._segment.place, nbytes)
                self._segment.allocate(start + mine, round_to_pages(nbytes))
            except BackendUnavailableError:
                return None
        if start not in self._made:
            self._made[start] = ShmSlots(self._segment, start, nbytes, self._slots)
        return SharedBuffer(self, self._made[start], number, count, dtype)

    def drop(self, start: int) -> None:
        """Nobody uses it any more, but for those who still look at what lies there: every rank says so."""
        shared = self._made.pop(start, None)
        self._dropped[start] = shared or ShmSlots(self._segment, start, self._reserved[start], self._slots)

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        """See Backend.allreduce_; on the only host few values begin to travel now, others when they are waited for."""
        if self.is_only_host and buffer.nbytes <= ONE_PHASE_BYTES:
            self._finish_last()
            self._last = SmallReduction(self, buffer, op)
            return self._last
        return self._passing(lambda: self._in_pieces(buffer, op, name))

    def _passing(self, run: Callable[[], torch.Tensor]) -> StagedCollective:
        """What happens when it is waited for; the others see now that it has begun."""
        self._begun += 1
        stage, number = self._stages[0], self._begun
        stage.say(BEGUN, number)
        # Where there are other hosts, whether those have begun it is not known here.
        return StagedCollective(run, lambda: self.is_only_host and stage.have_all(BEGUN, number))

    def _in_pieces(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> torch.Tensor:
        """Two ranks read all of each other's values; more ranks share the work out, which takes them two phases."""
        self._finish_last()
        flat = buffer.view(-1)
        if self.is_only_host and self._segment.size == 2:
            self._in_pieces_of_two(flat, op)
            return buffer
        begun: list[tuple[torch.Tensor, MultiHostReduction]] = []
        for number, piece in enumerate(flat.split(STAGE_BYTES // flat.itemsize)):
            stage = self._filled(piece)
            begun.append((piece, MultiHostReduction(self, stage, len(piece), flat.dtype, op, f"{name}.{number}")))
            if len(begun) == MAX_IN_FLIGHT:
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
                self.peers.wait(functools.partial(self._stages[turn].have_all, POSTED, number))
            theirs = slots[turn][1 - place]
            reduce(piece, theirs if len(piece) == count else theirs[: len(piece)], out=piece)

        for piece in pieces:
            self._turn += 1
            turn = self._turn % STAGES
            mine = slots[turn][place]
            (mine if len(piece) == count else mine[: len(piece)]).copy_(piece)
            posted.append((piece, turn, self._stages[turn].post()))
            if len(posted) == MAX_IN_FLIGHT:
                finish_first()
        while posted:
            finish_first()

    def allgather(self, tensor: torch.Tensor) -> StagedCollective:
        """See Backend.allgather; on the only host."""
        return self._passing(lambda: self._gathered(tensor))

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        mine = as_bytes(tensor)
        output = mine.new_empty(self._segment.size, len(mine))
        for start in range(0, len(mine), STAGE_BYTES):
            piece = mine[start : start + STAGE_BYTES]
            for row, theirs in zip(output, self._passed(piece, len(piece)), strict=True):
                row[start : start + STAGE_BYTES].copy_(theirs)
        return output.view(-1).view(tensor.dtype).view(self._segment.size * tensor.shape[0], *tensor.shape[1:])

    def broadcast_(self, buffer: torch.Tensor, root: int) -> StagedCollective:
        """See Backend.broadcast_; on the only host."""
        return self._passing(lambda: self._broadcast(buffer, root))

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
        self.peers.wait(posted.arrived)
        return posted.slots(torch.uint8, count)

    def post(self, values: torch.Tensor) -> PostedRows:
        """Let the others read few values."""
        return PostedRows(self._filled(values))

    def _filled(self, values: torch.Tensor) -> ShmSlots:
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
        self.peers.close()


def _finish(piece: torch.Tensor, work: Work) -> None:
    result = work.wait()
    if result is not piece:
        piece.copy_(result)
