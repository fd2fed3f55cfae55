"""The Python twin of the extension's ShmChannel, for processors that do not reorder writes.

Every rank has two slots, which it fills in turn, one for each chunk, and a counter of the chunks that it has posted.
All ranks read the slots of all. A rank that fills a slot again has seen all ranks post the chunk in between, before
which they had read that slot.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator

import torch

from dualdist.backends.control_plane import as_bytes

CACHE_LINE_BYTES = 64  # each rank writes to its own cache line
WORD_BYTES = 8
HEADER = struct.Struct("2I56x")  # the lengths of a message's text and payload, at the start of its slot
# A rank waits by polling, then yielding its core between polls, then sleeping.
POLLS = 100
BUSY_S = 0.002
PAUSE_S = 0.0001
# In the order of channel.OPS.
REDUCE = (torch.add, torch.mul, torch.minimum, torch.maximum, torch.add)
MEAN = 4


def channel_bytes(size: int, slot_bytes: int) -> int:
    """Return the size of the memory of a channel, in C++ and here."""
    return CACHE_LINE_BYTES * (1 + size) + 2 * size * slot_bytes


class PythonChannel:
    """See ShmChannel in dualdist/csrc/shared_memory.cpp.

    Between the start of an operation and the end of advance(), tensors are left unchanged.
    """

    def __init__(self, memory: mmap.mmap, index: int, size: int, slot_bytes: int) -> None:
        self.steps = 0  # how often this rank has got on, in what it waits for
        self._index, self._size, self._slot_bytes = index, size, slot_bytes
        header = CACHE_LINE_BYTES * (1 + size)
        self._words = memoryview(memory)[:header].cast("q")
        self._bytes = memoryview(memory)[header:]
        line = CACHE_LINE_BYTES // WORD_BYTES
        self._announced = range(line, header // WORD_BYTES, line)
        self._posted = range(line + 1, header // WORD_BYTES, line)
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=header, count=2 * size * slot_bytes)
        self._slots = slots.view(size, 2, slot_bytes)
        self._turn = 0
        self._running: Iterator[None] | None = None  # runs up to the next wait for all ranks

    def announce(self) -> int:
        """Count an operation that this rank is ready for; return its number."""
        word = self._announced[self._index]
        self._words[word] += 1
        return self._words[word]

    def have_all_announced(self, number: int) -> bool:
        """Return True if every rank has announced so many operations."""
        return all(self._words[word] >= number for word in self._announced)

    def begin_message(self, text: bytes, payload: torch.Tensor | None) -> None:
        """Begin to exchange a text, and the elements of a contiguous tensor."""
        data = b"" if payload is None else payload.detach().numpy().tobytes()
        message = HEADER.pack(len(text), len(data)) + data + text
        if len(message) > self._slot_bytes:
            raise ValueError("the message is too long")
        self._turn ^= 1
        start = self._slot_start(self._index)
        self._bytes[start : start + len(message)] = message
        self._post()
        self._running = iter([None])
        next(self._running)

    def texts(self) -> list[bytes]:
        """Return the texts of all ranks, in rank order."""
        return [self._message(rank)[1] for rank in range(self._size)]

    def are_texts_equal(self) -> bool:
        """Return True if all ranks sent the same text, and payloads of one size."""
        first = self._message(0)
        return all(self._message(rank) == first for rank in range(1, self._size))

    def reduce_payloads(self, tensor: torch.Tensor, op: int, in_place: bool) -> torch.Tensor:
        """Return the reduction of the payloads, of which `tensor` was this rank's, by the op of that index in OPS."""
        result = tensor.detach() if in_place else torch.empty_like(tensor)
        flat = result.view(-1)
        values = slice(HEADER.size, HEADER.size + tensor.nbytes)
        self._reduce(flat, [slot[values].view(tensor.dtype) for slot in self._slots[:, self._turn]], op)
        return tensor if in_place else result

    def begin_allreduce(self, tensor: torch.Tensor, output: torch.Tensor, op: int) -> None:
        """Begin to reduce a contiguous tensor into another, or itself, by the op of that index in OPS."""
        self._running = self._allreduce(tensor.view(-1), output.view(-1), op)

    def begin_allgather(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Begin to gather contiguous tensors of one shape: (*s) -> (size, *s)."""
        self._running = self._allgather(as_bytes(tensor), as_bytes(output).view(self._size, -1))

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Begin to copy the contiguous tensor of number `root` to all ranks."""
        self._running = self._broadcast(as_bytes(tensor), root)

    def advance(self, wait_s: float) -> bool:
        """Go on for at most `wait_s`, or until a signal comes; return True when the operation has ended."""
        while self._running is not None:
            if not self._wait_for_all(wait_s):
                return False
            try:
                next(self._running)
            except StopIteration:
                self._running = None
        return True

    def _allreduce(self, flat: torch.Tensor, output: torch.Tensor, op: int) -> Iterator[None]:
        count = self._slot_bytes // flat.itemsize
        for start in range(0, len(flat), count):
            chunk = flat[start : start + count]
            self._fill(as_bytes(chunk))
            yield
            slots = self._slots[:, self._turn, : chunk.nbytes]
            self._reduce(output[start : start + count], [slot.view(flat.dtype) for slot in slots], op)

    def _allgather(self, data: torch.Tensor, rows: torch.Tensor) -> Iterator[None]:
        for start in range(0, len(data), self._slot_bytes):
            chunk = slice(start, start + self._slot_bytes)
            self._fill(data[chunk])
            yield
            rows[:, chunk].copy_(self._slots[:, self._turn, : len(data[chunk])])

    def _broadcast(self, data: torch.Tensor, root: int) -> Iterator[None]:
        for start in range(0, len(data), self._slot_bytes):
            chunk = data[start : start + self._slot_bytes]
            self._fill(chunk if root == self._index else chunk[:0])
            yield
            if root != self._index:
                chunk.copy_(self._slots[root, self._turn, : len(chunk)])

    def _fill(self, data: torch.Tensor) -> None:
        self._turn ^= 1
        self._slots[self._index, self._turn, : len(data)].copy_(data)
        self._post()

    def _post(self) -> None:
        self.steps += 1
        self._words[self._posted[self._index]] = self.steps

    def _have_all_posted(self) -> bool:
        words, steps = self._words, self.steps
        for word in self._posted:  # noqa: SIM110  a generator would be called for every rank
            if words[word] < steps:
                return False
        return True

    def _wait_for_all(self, wait_s: float) -> bool:
        start, polls = time.monotonic(), 0
        while not self._have_all_posted():
            polls += 1
            if polls <= POLLS:
                continue
            waited_s = time.monotonic() - start
            if waited_s >= wait_s:
                return False
            if waited_s < BUSY_S:
                os.sched_yield()
            else:
                time.sleep(PAUSE_S)
        return True

    def _slot_start(self, rank: int) -> int:
        return (2 * rank + self._turn) * self._slot_bytes

    def _message(self, rank: int) -> tuple[int, bytes]:
        """Return the length of the payload and the text of a rank's message."""
        start = self._slot_start(rank)
        text_bytes, payload_bytes = HEADER.unpack_from(self._bytes, start)
        start += HEADER.size + payload_bytes
        return payload_bytes, bytes(self._bytes[start : start + text_bytes])

    def _reduce(self, total: torch.Tensor, parts: list[torch.Tensor], op: int) -> None:
        """Reduce the parts into `total`, from the first to the last, so that all ranks round alike."""
        if len(parts) == 1:
            total.copy_(parts[0])
            return
        reduced = parts[0]
        for part in parts[1:]:
            reduced = REDUCE[op](reduced, part, out=total)
        if op != MEAN:
            return
        if self._size & (self._size - 1):  # as dualdist.collectives.reductions.divide_
            total.div_(self._size)
        else:
            total.mul_(1 / self._size)
