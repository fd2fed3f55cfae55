"""How the ranks of one host tell each other a few bytes, in microseconds.

Note [two rows]: a rank writes its messages into two rows in turn. A message in a row is overwritten by the next but
one; that is written when the message in between has been read, which its readers wrote after they had read this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualdist.backends.shm.segment import SegmentPeers, open_segment, round_to_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualdist.backends.base import Store
    from dualdist.utils.deadline import Deadline

ROW_BYTES = 1024
CACHE_LINE_BYTES = 64  # of a processor's cache: what one rank writes is alone on its line
WORD_BYTES = 8
LENGTH_BYTES = 4
INLINE_BYTES = ROW_BYTES - LENGTH_BYTES
FRAGMENT_BYTES = INLINE_BYTES - LENGTH_BYTES


def exchange_bytes(size: int) -> int:
    """What the mailbox of so many ranks takes of a segment."""
    return round_to_pages(size * (CACHE_LINE_BYTES + 2 * ROW_BYTES))


class ShmExchange:
    """Lies at the beginning of a segment."""

    def __init__(self, peers: SegmentPeers) -> None:
        segment = peers.segment
        self.size = segment.size
        self.peers = peers
        memory = memoryview(segment.map(0, exchange_bytes(self.size)))
        self._words = memory.cast("q")
        self._rows = memory[self.size * CACHE_LINE_BYTES :]
        self._mine = segment.place * CACHE_LINE_BYTES // WORD_BYTES
        self._theirs = [place * CACHE_LINE_BYTES // WORD_BYTES for place in range(self.size) if place != segment.place]
        self._place = segment.place
        self._sent = 0

    def post(self, message: bytes) -> None:
        """Let the others read the message, which is at most INLINE_BYTES long."""
        start = (2 * self._place + self._sent % 2) * ROW_BYTES
        self._rows[start : start + LENGTH_BYTES] = len(message).to_bytes(LENGTH_BYTES, "little")
        self._rows[start + LENGTH_BYTES : start + LENGTH_BYTES + len(message)] = message
        self._sent += 1
        self._words[self._mine] = self._sent

    def have_all_posted(self) -> bool:
        """Whether the message that goes with the one posted last has come from every rank."""
        words, sent = self._words, self._sent
        return all(words[word] >= sent for word in self._theirs)

    def read(self) -> list[bytes]:
        """What every rank has posted, in the order of their places, once all have."""
        self.peers.wait(self.have_all_posted)
        messages = []
        for place in range(self.size):
            start = (2 * place + (self._sent - 1) % 2) * ROW_BYTES
            length = int.from_bytes(self._rows[start : start + LENGTH_BYTES], "little")
            messages.append(bytes(self._rows[start + LENGTH_BYTES : start + LENGTH_BYTES + length]))
        return messages

    def all_posted(self, message: bytes) -> bool:
        """Whether every rank has posted this same message, once all have."""
        self.peers.wait(self.have_all_posted)
        for place in range(self.size):
            start = (2 * place + (self._sent - 1) % 2) * ROW_BYTES
            if bytes(self._rows[start + LENGTH_BYTES : start + LENGTH_BYTES + len(message)]) != message:
                return False
        return True

    def suffixes(self, head: bytes, length: int) -> list[bytes] | None:
        """What follows `head` in every rank's message of this length; None where some rank posted anything else."""
        self.peers.wait(self.have_all_posted)
        rows, middle, turn = self._rows, len(head), (self._sent - 1) % 2
        tails = []
        for place in range(self.size):
            start = (2 * place + turn) * ROW_BYTES + LENGTH_BYTES
            message = bytes(rows[start : start + length])
            if not message.startswith(head):
                return None
            tails.append(message[middle:])
        return tails

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, on every rank."""
        self.post(message)
        return self.read()

    def close(self) -> None:
        self.peers.close()


class ShmMessage:
    """Every rank's bytes, of any length, on every rank; the first sheet of each is sent when this is made."""

    def __init__(self, mailbox: ShmExchange, payload: bytes) -> None:
        self._mailbox = mailbox
        self._payload = payload
        self._first = len(payload).to_bytes(LENGTH_BYTES, "little") + payload[:FRAGMENT_BYTES]
        mailbox.post(self._first)

    def all_equal(self) -> bool:
        """Whether all ranks are known to have passed the same, which is quicker to say than what they passed."""
        return len(self._payload) <= FRAGMENT_BYTES and self._mailbox.all_posted(self._first)

    def suffixes(self, agreed: bytes) -> list[bytes] | None:
        """What follows `agreed` in what the ranks passed; None where some rank passed anything else."""
        if len(self._payload) > FRAGMENT_BYTES:
            return None
        return self._mailbox.suffixes(self._first[:LENGTH_BYTES] + agreed, len(self._first))

    def done(self) -> bool:
        """Whether the first sheet, mostly the only one, has arrived from every rank."""
        return self._mailbox.have_all_posted()

    def wait(self) -> list[bytes]:
        """What the ranks passed, in rank order."""
        said = self._mailbox.read()
        longest = max(int.from_bytes(sheet[:LENGTH_BYTES], "little") for sheet in said)
        payloads = [sheet[LENGTH_BYTES:] for sheet in said]
        for start in range(FRAGMENT_BYTES, longest, FRAGMENT_BYTES):
            more = self._mailbox.exchange(self._payload[start : start + FRAGMENT_BYTES])
            payloads = [payload + sheet for payload, sheet in zip(payloads, more, strict=True)]
        return payloads


def open_exchange(store: Store, key: str, ranks: Sequence[int], place: int, deadline: Deadline) -> ShmExchange:
    """A mailbox of these ranks, of which this is number `place`; all of them call this, and share a host."""
    segment = open_segment(store, key, place, len(ranks), exchange_bytes(len(ranks)), deadline)
    return ShmExchange(SegmentPeers(segment, ranks, deadline.timeout_s))
