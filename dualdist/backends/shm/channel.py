"""Collectives between the ranks of one host through shared memory, used by the native backend.

Every rank has slots that it writes to and the others read. Ranks progress when they poll (Work.done and Work.wait),
without a thread. If there are several hosts, the first rank of each, its leader, reduces the host's result with the
other leaders. There are three allreduce algorithms. Medians of 12 interleaved rounds, 2 ranks on 2 cores of a busy
machine, OMP_NUM_THREADS=1, 64 KiB, 1 MiB and 16 MiB of float32: one phase 0.15, 0.20 and 15 ms, two phases through the
staging slots 0.20, 0.38 and 23 ms; more ranks than two would read too much in one phase. Buffers of gradients are
reduced where they are, which saves both copies.

Note [staging]: values that every rank reads whole need no second phase if STAGES stages are used in turn and at most
MAX_IN_FLIGHT are in flight: a rank that writes to the first stage again has seen all ranks post to the third, before
which they had read the first.

Note [phases]: a round of a Buffer has two phases. A rank has "posted" when its values are in its slot, and "finished"
when it has reduced its part. On a single host it writes its part of the result into the slots of all ranks, each of
which is its rank's own again when all have finished. A rank has two slots, and sets which one is "chosen" before it
posts. With several hosts, each rank writes its part into a slot for the result, which the leader reduces with those of
the other hosts. A slot is written again after all have finished, and the result after all have posted again, which they
do when they have read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dualdist.backends.base import Backend, Epilogue, ReduceOp, Work, storage_uses
from dualdist.backends.control_plane import as_bytes
from dualdist.backends.shm.segment import (
    CACHE_LINE_BYTES,
    WORD_BYTES,
    SegmentPeers,
    SharedSegment,
    ShmExchange,
    exchange_bytes,
    round_to_pages,
)
from dualdist.errors import BackendUnavailableError

# Size of a staging slot, which fits the L2 cache; larger tensors pass through in chunks.
STAGE_BYTES = 1 << 20
MAX_IN_FLIGHT = 2
STAGES = 2 * MAX_IN_FLIGHT
# Up to this size, and for two ranks at any size, every rank reduces all values itself in one phase.
ONE_PHASE_BYTES = 1 << 14
# A chunk that a rank has just written is still in its L2 cache when the others' arrive.
CHUNK_BYTES = 1 << 19
REASON_CHARS = 500
SLOTS_PER_RANK = 2
# A rank's part begins on its own cache line, for every dtype.
ALIGNED = 64
# The counters that each rank has per slot set.
POSTED, FINISHED, SPREAD, RELEASED, CHOSEN, STARTED = range(6)
REMOVE = 9  # madvise(2): MADV_REMOVE
REDUCE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def slot_set_bytes(size: int, slots: int, nbytes: int) -> int:
    """Return the bytes that a SlotSet takes of its segment."""
    return round_to_pages(size * CACHE_LINE_BYTES) + slots * round_to_pages(nbytes)


def channel_bytes(size: int) -> int:
    """Return the bytes that a channel of `size` ranks takes before buffers are reserved."""
    return exchange_bytes(size) + STAGES * slot_set_bytes(size, size + 1, STAGE_BYTES)


class SlotSet:
    """Slots in shared memory, the first of which belong to the ranks in turn, and each rank's counters."""

    def __init__(self, segment: SharedSegment, start: int, nbytes: int, slots: int) -> None:
        self.size, self.index, self.start = segment.size, segment.index, start
        memory = segment.map(start, slot_set_bytes(self.size, slots, nbytes))
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        step, width = CACHE_LINE_BYTES // WORD_BYTES, round_to_pages(nbytes)
        self._own = self.index * step
        self._others = [index * step for index in range(self.size) if index != self.index]
        body = round_to_pages(self.size * CACHE_LINE_BYTES)
        self._extents = [(nbytes, body + number * width) for number in range(slots)]
        # Each slot has its own storage, whose users can be counted.
        self.slots = [self._slot(number) for number in range(slots)]
        self._addresses = [slot.data_ptr() for slot in self.slots]
        self._unused = storage_uses(self.slots[0])

    def _slot(self, number: int) -> torch.Tensor:
        nbytes, start = self._extents[number]
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=start)

    def own_slot(self, number: int) -> torch.Tensor:
        """Return one of this rank's slots, mapped again if the program has moved its tensor to other memory."""
        if self.slots[number].data_ptr() != self._addresses[number]:
            self.slots[number] = self._slot(number)
        return self.slots[number]

    def advance(self, counter: int) -> int:
        """Add 1 to one of this rank's counters, which all ranks advance in the same order; return its value."""
        number = self._words[self._own + counter] + 1
        self._words[self._own + counter] = number
        return number

    def signal(self, counter: int, value: int) -> None:
        """Set one of this rank's counters."""
        self._words[self._own + counter] = value

    def have_all(self, counter: int, number: int) -> bool:
        """Return True if this counter of all other ranks has reached `number`."""
        words = self._words
        for index in self._others:  # noqa: SIM110  a generator would be called for every rank
            if words[index + counter] < number:
                return False
        return True

    def has_leader(self, counter: int, number: int) -> bool:
        return self._words[counter] >= number

    def read(self, counter: int) -> list[int]:
        """Return this counter of every rank."""
        return [self._words[index * CACHE_LINE_BYTES // WORD_BYTES + counter] for index in range(self.size)]

    def rank_slots(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Return the first `count` elements in the first slot of every rank."""
        return [slot[: count * dtype.itemsize].view(dtype) for slot in self.slots[: self.size]]

    def is_used(self) -> bool:
        """Return True if a tensor of this process is in one of this rank's slots."""
        return any(storage_uses(slot) > self._unused for slot in self.slots[self.index :: self.size])

    def is_released(self) -> bool:
        """Return True if all ranks have released these slots."""
        return self.have_all(RELEASED, 1) and self._words[self._own + RELEASED] == 1

    def free(self) -> None:
        """Return the memory to the system; the leader does this when all have released it."""
        self._memory.madvise(REMOVE, 0, len(self._memory))


class HostChannel:
    """Collectives between the ranks of one host, which all call the same methods in the same order."""

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
        self.leaders = leaders  # connects the hosts' first ranks, on those
        self.running: list[TwoPhaseReduction] = []
        self._segment = segment
        self._exchange = ShmExchange(self.peers)
        slots = segment.size + 1
        stage_bytes, start = slot_set_bytes(segment.size, slots, STAGE_BYTES), exchange_bytes(segment.size)
        self.stages = [SlotSet(segment, start + number * stage_bytes, STAGE_BYTES, slots) for number in range(STAGES)]
        self._end = start + STAGES * stage_bytes
        self._reserved: dict[int, int] = {}  # start of a region -> bytes of a slot
        self._mapped: dict[int, SlotSet] = {}
        self._released: dict[int, SlotSet] = {}
        self._turn = 0
        self._last: OnePhaseReduction | None = None

    @property
    def timeout_s(self) -> float:
        return self.peers.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.peers.timeout_s = value
        if self.leaders is not None:
            self.leaders.timeout_s = value

    def advance(self) -> None:
        """Advance all running two-phase reductions as far as possible; between hosts, in the order of their start."""
        may_leave = True
        for work in list(self.running):
            if work.advance(may_leave=may_leave):
                self.running.remove(work)
            elif not work.is_between_hosts:
                may_leave = False

    def reserve(self, nbytes: int) -> tuple[int, str]:
        """Reserve slots of `nbytes` for each rank; return the region and why it failed, the same on all hosts."""
        start = self._end
        self._end += slot_set_bytes(self._segment.size, self._buffer_slots, nbytes)
        reason = b""
        self._reserved[start] = nbytes
        self.free_released()
        if self._segment.index == 0:
            reason = self._allocate(start, nbytes).encode()[:REASON_CHARS]
        return start, self._exchange.exchange(reason)[0].decode(errors="replace")

    @property
    def _buffer_slots(self) -> int:
        """Return the slots of a region: two for each rank; with several hosts one for each and one for the result."""
        return self._segment.size * SLOTS_PER_RANK if self.is_only_host else self._segment.size + 1

    def _allocate(self, start: int, nbytes: int) -> str:
        """Allocate the first slot of every rank, the second ones being allocated on demand; return why it failed."""
        slots = self._segment.size if self.is_only_host else self._buffer_slots
        reason = ""
        try:
            self._segment.allocate(start, slot_set_bytes(self._segment.size, slots, nbytes), self._end)
        except BackendUnavailableError as error:
            reason = str(error)
        if self.leaders is not None:
            fails = torch.tensor([bool(reason)], dtype=torch.uint8, device="cpu")
            if self.leaders.allreduce_(fails, "max", "reserve").wait().item() and not reason:
                reason = "another host has no room for it"
        return reason

    def free_released(self) -> None:
        """Return released memory to the system once no rank has a tensor in it."""
        if not self._released:
            return
        for start, slots in list(self._released.items()):
            if slots.is_used():
                continue
            slots.signal(RELEASED, 1)
            if self._segment.index == 0:
                if not slots.is_released():
                    continue
                slots.free()
            del self._released[start], self._reserved[start]  # other ranks read the counters no more: they may be gone

    def buffer(self, start: int, number: int, count: int, dtype: torch.dtype) -> SharedBuffer | None:
        """Return this rank's buffer `number` of a region, None if there is no such slot or no memory."""
        self.free_released()
        nbytes, size = self._reserved[start], self._segment.size
        if number:
            if not self.is_only_host or number >= SLOTS_PER_RANK:
                return None
            try:
                offset = slot_set_bytes(size, number * size + self._segment.index, nbytes)
                self._segment.allocate(start + offset, round_to_pages(nbytes))
            except BackendUnavailableError:
                return None
        if start not in self._mapped:
            self._mapped[start] = SlotSet(self._segment, start, nbytes, self._buffer_slots)
        return SharedBuffer(self, self._mapped[start], number, count, dtype)

    def release(self, start: int) -> None:
        """Stop using a region, on every rank; it is freed when no tensor is left in it."""
        slots = self._mapped.pop(start, None)
        self._released[start] = slots or SlotSet(self._segment, start, self._reserved[start], self._buffer_slots)

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        """See Backend.allreduce_; on a single host small tensors are posted now, others when they are waited for."""
        if self.is_only_host and buffer.nbytes <= ONE_PHASE_BYTES:
            self._finish_last()
            self._last = OnePhaseReduction(self, buffer, op)
            return self._last
        if self.is_only_host and self._segment.size == 2:
            return StagedCollective(self, partial(self._reduce_in_one_phase, buffer, op))
        return StagedCollective(self, partial(self._reduce_in_two_phases, buffer, op, name))

    def _reduce_in_one_phase(self, buffer: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        if self._last is not None:
            self._finish_last()
        flat = buffer.view(-1)
        running: deque[OnePhaseReduction] = deque()
        for chunk in flat.split(CHUNK_BYTES // flat.itemsize):
            running.append(OnePhaseReduction(self, chunk, op))
            if len(running) == MAX_IN_FLIGHT:
                running.popleft().wait()
        while running:
            running.popleft().wait()
        return buffer

    def _reduce_in_two_phases(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> torch.Tensor:
        self._finish_last()
        flat = buffer.view(-1)
        running: deque[tuple[torch.Tensor, ResultSlotReduction]] = deque()

        def finish_first() -> None:
            chunk, work = running.popleft()
            chunk.copy_(work.wait())

        for number, chunk in enumerate(flat.split(STAGE_BYTES // flat.itemsize)):
            stage = self.fill_stage(chunk)
            work = ResultSlotReduction(self, stage, len(chunk), flat.dtype, op, f"{name}.{number}")
            running.append((chunk, work))
            if len(running) == MAX_IN_FLIGHT:
                finish_first()
        while running:
            finish_first()
        return buffer

    def allgather(self, tensor: torch.Tensor) -> StagedCollective:
        """See Backend.allgather; on a single host."""
        return StagedCollective(self, partial(self._allgather, tensor))

    def _allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        data = as_bytes(tensor)
        output = data.new_empty(self._segment.size, len(data))
        for start in range(0, len(data), STAGE_BYTES):
            chunk = data[start : start + STAGE_BYTES]
            for row, block in zip(output, self._exchange_chunk(chunk, len(chunk)), strict=True):
                row[start : start + STAGE_BYTES].copy_(block)
        return output.view(-1).view(tensor.dtype).view(self._segment.size * tensor.shape[0], *tensor.shape[1:])

    def broadcast_(self, buffer: torch.Tensor, root: int) -> StagedCollective:
        """See Backend.broadcast_; on a single host."""
        return StagedCollective(self, partial(self._broadcast, buffer, root))

    def _broadcast(self, buffer: torch.Tensor, root: int) -> torch.Tensor:
        is_root = self._segment.index == root
        for chunk in as_bytes(buffer).split(STAGE_BYTES):
            blocks = self._exchange_chunk(chunk if is_root else chunk[:0], len(chunk))
            if not is_root:
                chunk.copy_(blocks[root])
        return buffer

    def _exchange_chunk(self, data: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return the bytes of every rank, to be read before the next call: Note [staging]."""
        self._finish_last()
        stage = self.fill_stage(data)
        number = stage.advance(POSTED)
        self.peers.wait(lambda: stage.have_all(POSTED, number))
        return stage.rank_slots(torch.uint8, count)

    def fill_stage(self, values: torch.Tensor) -> SlotSet:
        """Copy values into this rank's slot of the next stage, and return that."""
        self._turn += 1
        stage = self.stages[self._turn % STAGES]
        if len(values):
            stage.slots[stage.index][: values.nbytes].view(values.dtype).copy_(values)
        return stage

    def _finish_last(self) -> None:
        if self._last is not None:
            self._last.wait()
            self._last = None

    def close(self) -> None:
        self.peers.close()


class OnePhaseReduction:
    """A reduction in place of at most CHUNK_BYTES in which every rank reads the values of all. A Work."""

    def __init__(self, channel: HostChannel, buffer: torch.Tensor, op: ReduceOp) -> None:
        self._channel = channel
        self._buffer = buffer
        self._op = op
        self._stage = channel.fill_stage(buffer.view(-1))
        self._number = self._stage.advance(POSTED)
        self._is_reduced = False

    def done(self) -> bool:
        return self._is_reduced or self._stage.have_all(POSTED, self._number)

    def wait(self) -> torch.Tensor:
        if self._is_reduced:
            return self._buffer
        stage, number = self._stage, self._number
        if not stage.have_all(POSTED, number):
            self._channel.peers.wait(partial(stage.have_all, POSTED, number))
        flat, reduce, total = self._buffer.view(-1), REDUCE[self._op], None
        for index, slot in enumerate(stage.slots[: stage.size]):
            # The buffer itself, which is still in the cache, where it is one of the first two operands.
            part = flat if index == stage.index < 2 else slot[: flat.nbytes].view(flat.dtype)
            total = part if total is None else reduce(total, part, out=flat)
        self._is_reduced = True
        return self._buffer


class StagedCollective:
    """An operation through the stages, which runs in wait(). A Work.

    It is done once all ranks have started it: wait() then returns as soon as all wait. A joined rank learns by this
    that the others have started an operation.
    """

    def __init__(self, channel: HostChannel, run: Callable[[], torch.Tensor]) -> None:
        self._is_only_host = channel.is_only_host
        self._stage = channel.stages[0]
        self._number = self._stage.advance(STARTED)
        self._run: Callable[[], torch.Tensor] | None = run
        self._result: torch.Tensor

    def done(self) -> bool:
        # Whether other hosts have started it is unknown here.
        return self._run is None or (self._is_only_host and self._stage.have_all(STARTED, self._number))

    def wait(self) -> torch.Tensor:
        if self._run is not None:
            self._result = self._run()
            self._run = None
        return self._result


class TwoPhaseReduction(ABC):
    """A reduction in which every rank reduces a part, from the moment when its values are in its slot. A Work."""

    def __init__(self, channel: HostChannel, slots: SlotSet, op: ReduceOp) -> None:
        self.is_between_hosts = False  # the leader has started to reduce with the other hosts
        self._channel = channel
        self._slots = slots
        self._op = op
        self._result: torch.Tensor
        self._is_reduced = self._is_done = False
        self._number = slots.advance(POSTED)
        channel.running.append(self)

    def done(self) -> bool:
        if not self._is_done:
            self._channel.advance()
        return self._is_done

    def wait(self) -> torch.Tensor:
        if not self._is_done:
            self._channel.peers.wait(self.done)
        return self._result

    def advance(self, *, may_leave: bool) -> bool:
        """Do what is possible without waiting, and reduce between hosts if `may_leave`; return True when done."""
        slots, number = self._slots, self._number
        if not self._is_reduced:
            if not slots.have_all(POSTED, number):
                return False
            self._reduce(*_part(self._result.numel(), slots.index, slots.size))
            slots.signal(FINISHED, number)
            self._is_reduced = True
        self._is_done = slots.have_all(FINISHED, number) and self._has_spread(may_leave)
        return self._is_done

    @abstractmethod
    def _reduce(self, start: int, end: int) -> None:
        """Reduce this rank's part of all values, in rank order, so that all sums round alike."""

    def _has_spread(self, may_leave: bool) -> bool:
        """Return True if the host's result is that of all hosts."""
        return True


def _part(count: int, index: int, size: int) -> tuple[int, int]:
    """Return the start and end of a rank's part."""
    each = -(-count // (size * ALIGNED)) * ALIGNED
    return min(count, index * each), min(count, (index + 1) * each)


class InPlaceReduction(TwoPhaseReduction):
    """A reduction of buffers on a single host: each rank writes its part of the result into the slots of all."""

    def __init__(
        self, channel: HostChannel, slots: SlotSet, values: torch.Tensor, op: ReduceOp, epilogue: Epilogue
    ) -> None:
        self._result = values
        self._epilogue = epilogue
        super().__init__(channel, slots, op)

    def _reduce(self, start: int, end: int) -> None:
        slots, dtype = self._slots, self._result.dtype
        chosen = [slots.slots[number * slots.size + index] for index, number in enumerate(slots.read(CHOSEN))]
        step = CHUNK_BYTES // dtype.itemsize
        for first in range(start, end, step):
            last = min(first + step, end)
            total, *others = [slot[first * dtype.itemsize : last * dtype.itemsize].view(dtype) for slot in chosen]
            reduce_into(total, [total, *others], self._op)
            if first < self._epilogue.count:
                self._epilogue.apply(total[: self._epilogue.count - first])
            for other in others:
                other.copy_(total)


class ResultSlotReduction(TwoPhaseReduction):
    """A reduction into the slot for the result, which the leader reduces with those of other hosts."""

    def __init__(
        self, channel: HostChannel, slots: SlotSet, count: int, dtype: torch.dtype, op: ReduceOp, name: str
    ) -> None:
        self._name = name
        self._between_hosts: Work | None = None
        *self._inputs, self._result = [slot[: count * dtype.itemsize].view(dtype) for slot in slots.slots]
        super().__init__(channel, slots, op)

    def _reduce(self, start: int, end: int) -> None:
        if start < end:
            reduce_into(self._result[start:end], [values[start:end] for values in self._inputs], self._op)

    def _has_spread(self, may_leave: bool) -> bool:
        if self._channel.is_only_host:
            return True
        leaders = self._channel.leaders
        if leaders is None:
            return self._slots.has_leader(SPREAD, self._number)
        if self._between_hosts is None and may_leave:
            self._between_hosts = leaders.allreduce_(self._result, self._op, self._name)
            self.is_between_hosts = True
        if self._between_hosts is None or not self._between_hosts.done():
            return False
        self._between_hosts.wait()
        self._slots.signal(SPREAD, self._number)
        return True


def reduce_into(total: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduce the parts into `total`, from the first to the last."""
    if len(parts) == 1:
        return total.copy_(parts[0])
    reduce = REDUCE[op]
    reduce(parts[0], parts[1], out=total)
    for part in parts[2:]:
        reduce(total, part, out=total)
    return total


class SharedBuffer:
    """A Buffer whose values are in one of this rank's slots."""

    def __init__(self, channel: HostChannel, slots: SlotSet, number: int, count: int, dtype: torch.dtype) -> None:
        self.memory = slots.own_slot(number * slots.size + slots.index)
        self.values = self.memory[: count * dtype.itemsize].view(dtype)
        self.applies_epilogue = channel.is_only_host
        self._channel = channel
        self._slots = slots
        self._number = number

    def allreduce(self, op: ReduceOp, name: str, epilogue: Epilogue) -> TwoPhaseReduction:
        if not self._channel.is_only_host:
            return ResultSlotReduction(self._channel, self._slots, len(self.values), self.values.dtype, op, name)
        self._channel.free_released()
        self._slots.signal(CHOSEN, self._number)
        return InPlaceReduction(self._channel, self._slots, self.values, op, epilogue)
