"""Exchange of short messages between the ranks of one host through shared memory, in microseconds.

Note [two rows]: a rank writes its messages into two rows alternately. A message is overwritten by the next but one,
which is written after the message in between has been read; its readers posted that after they had read this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualdist.backends.shm.segment import SegmentPeers, open_segment, round_to_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualdist.backends.base import Store
    from dualdist.utils.deadline import Deadline

ROW_BYTES = 1024
CACHE_LINE_BYTES = 64  # each rank writes to its own cache lines
WORD_BYTES = 8
LENGTH_BYTES = 4
INLINE_BYTES = ROW_BYTES - LENGTH_BYTES
FRAGMENT_BYTES = INLINE_BYTES - LENGTH_BYTES


def exchange_bytes(size: int) -> int:
    """Return the bytes that the exchange of `size` ranks takes of a segment."""
    return round_to_pages(size * (CACHE_LINE_BYTES + 2 * ROW_BYTES))


class ShmExchange:
    """Message rows at the beginning of a segment, with a counter of messages for each rank."""

    def __init__(self, peers: SegmentPeers) -> None:
        segment = peers.segment
        self.size = segment.size
        self.peers = peers
        memory = memoryview(segment.map(0, exchange_bytes(self.size)))
        self._words = memory.cast("q")
        self._rows = memory[self.size * CACHE_LINE_BYTES :]
        self._own = segment.index * CACHE_LINE_BYTES // WORD_BYTES
        self._others = [index * CACHE_LINE_BYTES // WORD_BYTES for index in range(self.size) if index != segment.index]
        self._index = segment.index
        self._sent = 0

    def post(self, message: bytes) -> None:
        """Publish a message of at most INLINE_BYTES."""
        start = (2 * self._index + self._sent % 2) * ROW_BYTES
        self._rows[start : start + LENGTH_BYTES] = len(message).to_bytes(LENGTH_BYTES, "little")
        self._rows[start + LENGTH_BYTES : start + LENGTH_BYTES + len(message)] = message
        self._sent += 1
        self._words[self._own] = self._sent

    def have_all_posted(self) -> bool:
        """Return True if every rank has posted as many messages as this one."""
        words, sent = self._words, self._sent
        return all(words[word] >= sent for word in self._others)

    def read(self) -> list[bytes]:
        """Wait for the last message of every rank; return them in rank order."""
        self.peers.wait(self.have_all_posted)
        messages = []
        for index in range(self.size):
            start = (2 * index + (self._sent - 1) % 2) * ROW_BYTES
            length = int.from_bytes(self._rows[start : start + LENGTH_BYTES], "little")
            messages.append(bytes(self._rows[start + LENGTH_BYTES : start + LENGTH_BYTES + length]))
        return messages

    def all_posted(self, message: bytes) -> bool:
        """Wait for the last message of every rank; return True if all are equal to `message`."""
        self.peers.wait(self.have_all_posted)
        for index in range(self.size):
            start = (2 * index + (self._sent - 1) % 2) * ROW_BYTES
            if bytes(self._rows[start + LENGTH_BYTES : start + LENGTH_BYTES + len(message)]) != message:
                return False
        return True

    def suffixes(self, prefix: bytes, length: int) -> list[bytes] | None:
        """Return what follows `prefix` in each rank's message of this length; None unless all have this prefix."""
        self.peers.wait(self.have_all_posted)
        rows, middle, turn = self._rows, len(prefix), (self._sent - 1) % 2
        suffixes = []
        for index in range(self.size):
            start = (2 * index + turn) * ROW_BYTES + LENGTH_BYTES
            message = bytes(rows[start : start + length])
            if not message.startswith(prefix):
                return None
            suffixes.append(message[middle:])
        return suffixes

    def exchange(self, message: bytes) -> list[bytes]:
        """Post a message and return those of all ranks, in rank order."""
        self.post(message)
        return self.read()

    def close(self) -> None:
        self.peers.close()


class ShmMessage:
    """An allgather of bytes of any length; the first fragment is posted when this is created."""

    def __init__(self, exchange: ShmExchange, payload: bytes) -> None:
        self._exchange = exchange
        self._payload = payload
        self._first = len(payload).to_bytes(LENGTH_BYTES, "little") + payload[:FRAGMENT_BYTES]
        exchange.post(self._first)

    def all_equal(self) -> bool:
        """Return True if all payloads are equal and short: faster than comparing the results of wait()."""
        return len(self._payload) <= FRAGMENT_BYTES and self._exchange.all_posted(self._first)

    def suffixes(self, prefix: bytes) -> list[bytes] | None:
        """Return what follows `prefix` in each payload; None unless all are short, of one length, and have it."""
        if len(self._payload) > FRAGMENT_BYTES:
            return None
        return self._exchange.suffixes(self._first[:LENGTH_BYTES] + prefix, len(self._first))

    def done(self) -> bool:
        """Return True if the first fragment, mostly the only one, has arrived from every rank."""
        return self._exchange.have_all_posted()

    def wait(self) -> list[bytes]:
        """Return the payloads of all ranks, in rank order."""
        fragments = self._exchange.read()
        longest = max(int.from_bytes(fragment[:LENGTH_BYTES], "little") for fragment in fragments)
        payloads = [fragment[LENGTH_BYTES:] for fragment in fragments]
        for start in range(FRAGMENT_BYTES, longest, FRAGMENT_BYTES):
            more = self._exchange.exchange(self._payload[start : start + FRAGMENT_BYTES])
            payloads = [payload + fragment for payload, fragment in zip(payloads, more, strict=True)]
        return payloads


def open_exchange(store: Store, key: str, ranks: Sequence[int], index: int, deadline: Deadline) -> ShmExchange:
    """Open the exchange of these ranks of one host, of which this is number `index`; all of them call this."""
    segment = open_segment(store, key, index, len(ranks), exchange_bytes(len(ranks)), deadline)
    return ShmExchange(SegmentPeers(segment, ranks, deadline.timeout_s))
