"""Memory shared by processes of one host, and the exchange of short messages through it.

One process creates the memory and passes it to the others as an open file.

Note [no traces]: the memory is an unnamed file in /dev/shm (O_TMPFILE), passed over a Unix socket in Linux's abstract
namespace. A process killed at any moment leaves nothing behind.

Note [liveness]: every process locks a byte of a second such file. Linux releases the lock however the process ends, and
forked children do not hold it. It is a separate file because mapping memory in Python opens and closes the file once
more, and closing releases all of a process's locks on it.

Note [two rows]: a rank writes its messages into two rows alternately. A message is overwritten by the next but one,
which is written after the message in between has been read; its readers posted that after they had read this one.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dualdist.errors import (
    CLOSED,
    BackendUnavailableError,
    CollectiveTimeoutError,
    NotInitializedError,
    RankLostError,
    RendezvousError,
)
from dualdist.utils.deadline import Deadline

if TYPE_CHECKING:
    from dualdist.backends.base import Store

ROW_BYTES = 1024
CACHE_LINE_BYTES = 64  # each rank writes to its own cache lines
WORD_BYTES = 8
LENGTH_BYTES = 4
INLINE_BYTES = ROW_BYTES - LENGTH_BYTES
FRAGMENT_BYTES = INLINE_BYTES - LENGTH_BYTES
FOLDER = "/dev/shm"
# Python has no memory fences: only these processors make one core's writes visible to another in order.
ORDERED_PROCESSORS = ("x86_64", "AMD64")
# A rank waits by polling, then yielding its core between polls, then sleeping and checking which ranks are alive.
POLLS = 100
BUSY_S = 0.002
PAUSE_S = 0.0001
LIVENESS_CHECK_S = 0.2
FAILED = "!"
FLOCK = "@hhqqi0q"  # fcntl(2): struct flock
PEER = "3i"  # unix(7): struct ucred


def unavailable_reason(wanted: int, folder: str = FOLDER) -> str:
    """Return why ranks of this host cannot share `wanted` bytes of memory, or ""."""
    if platform.machine() not in ORDERED_PROCESSORS:
        return f"a {platform.machine()} processor may reorder writes"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    free = found.f_bavail * found.f_frsize
    if free < wanted:
        return (
            f"{folder} has {free / 2**20:.0f} MiB free, which should be {wanted / 2**20:.0f} or more "
            "(for a container: docker run --shm-size=1g, or --ipc=host)"
        )
    return ""


class SharedSegment:
    """Memory shared by `size` processes, of which this is number `index`; it grows on demand."""

    def __init__(self, memory: int, locks: int, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self._memory = memory
        self._locks = locks
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)  # Note [liveness]

    def allocate(self, start: int, nbytes: int, end: int = 0) -> None:
        """Allocate memory at `start`, and extend the segment to `end` without allocating it, for all processes.

        Raises:
            BackendUnavailableError: there is no memory left.
        """
        try:
            os.posix_fallocate(self._memory, start, nbytes)
            if end > os.fstat(self._memory).st_size:
                os.ftruncate(self._memory, end)
        except OSError as error:
            raise BackendUnavailableError(f"{FOLDER}: {error.strerror}") from error

    def map(self, start: int, nbytes: int) -> mmap.mmap:
        """Map the bytes from `start`, a multiple of the page size."""
        return mmap.mmap(self._memory, nbytes, offset=start)

    def is_alive(self, index: int) -> bool:
        """Return True if the process of that number, which has attached, still runs."""
        query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
        answer = fcntl.fcntl(self._locks, fcntl.F_GETLK, query)
        return index == self.index or struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK

    def leave(self) -> None:
        """Release the lock, by which the others see that this process has left."""
        fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, self.index)

    def __del__(self) -> None:
        os.close(self._memory)
        os.close(self._locks)


class SegmentPeers:
    """Waits for the ranks that share a segment."""

    def __init__(self, segment: SharedSegment, ranks: Sequence[int], timeout_s: float) -> None:
        self.segment = segment
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.is_open = True

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ready() is true; raise CollectiveTimeoutError, or RankLostError if a rank has ended."""
        for _ in range(POLLS):
            if ready():
                return
        busy_until = time.monotonic() + BUSY_S
        while time.monotonic() < busy_until:
            if ready():
                return
            os.sched_yield()
        timeout_s = self.timeout_s
        end = time.monotonic() + timeout_s
        check_at = time.monotonic() + LIVENESS_CHECK_S
        while not ready():
            time.sleep(PAUSE_S)
            if time.monotonic() < check_at:
                continue
            check_at = time.monotonic() + LIVENESS_CHECK_S
            if not self.is_open:
                raise NotInitializedError(CLOSED)
            lost = [rank for index, rank in enumerate(self.ranks) if not self.segment.is_alive(index)]
            if lost and not ready():
                error = RankLostError(f"rank {', '.join(map(str, lost))} ended or left")
                error.ranks = tuple(lost)
                raise error
            if time.monotonic() >= end and not ready():
                raise CollectiveTimeoutError(f"not all ranks arrived within {timeout_s:g} s")

    def close(self) -> None:
        """End waits with an error, here and in the other processes."""
        if self.is_open:
            self.is_open = False
            self.segment.leave()


def round_to_pages(nbytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def open_segment(
    store: Store, key: str, index: int, size: int, nbytes: int, deadline: Deadline, room: int = 0
) -> SharedSegment:
    """Return a segment shared by `size` processes of this host, the first of which creates it; all of them call this.

    Args:
        store: passes the address of a socket to the others, under `key`.
        index: the number of this process.
        nbytes: allocated at once.
        room: /dev/shm must have so many bytes free.

    Raises:
        BackendUnavailableError: on all processes, if the segment cannot be created.
        RendezvousError: not all processes called this in time.
    """
    if index == 0:
        return _create(store, key, size, nbytes, deadline, max(room, nbytes))
    try:
        token = store.get(key, deadline.left_s())
    except TimeoutError as error:
        raise _timeout_error(size, deadline) from error
    if token.startswith(FAILED):
        raise BackendUnavailableError(token.removeprefix(FAILED))
    with _socket(deadline) as peer:
        try:
            peer.connect(f"\0{token}")
            if _user_of(peer) != os.getuid():
                raise RendezvousError("another user offers the memory of this host's first rank")
            _, files, _, _ = socket.recv_fds(peer, 1, 2)
            segment = SharedSegment(files[0], files[1], index, size)
            peer.sendall(b"k")
            if peer.recv(1) != b"k":
                raise RendezvousError("the first rank of this host ended while the others attached to its memory")
        except (OSError, IndexError) as error:
            raise RendezvousError(f"cannot attach to the memory of this host's first rank ({error})") from error
    return segment


def _create(store: Store, key: str, size: int, nbytes: int, deadline: Deadline, room: int) -> SharedSegment:
    try:
        files, segment = _create_files(size, nbytes, room)
    except BackendUnavailableError as error:
        store.set(key, f"{FAILED}{error}")
        raise
    token = f"dualdist-{secrets.token_hex(16)}"
    with _socket(deadline) as listener:
        listener.bind(f"\0{token}")
        listener.listen(size)
        store.set(key, token)
        try:
            _send_files(files, listener, size - 1, deadline)
        except OSError as error:
            raise _timeout_error(size, deadline) from error
    return segment


def _create_files(size: int, nbytes: int, room: int) -> tuple[list[int], SharedSegment]:
    """Create a segment; return its files, which it closes, and the segment."""
    reason = unavailable_reason(room)
    if reason:
        raise BackendUnavailableError(reason)
    try:
        files = [os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600) for _ in range(2)]
        segment = SharedSegment(files[0], files[1], 0, size)
    except OSError as error:
        raise BackendUnavailableError(f"{FOLDER}: {error.strerror}") from error
    segment.allocate(0, nbytes)
    return files, segment


def _send_files(files: list[int], listener: socket.socket, count: int, deadline: Deadline) -> None:
    """Send the files to `count` processes of this user, and release these when all have attached."""
    peers: list[socket.socket] = []
    with contextlib.ExitStack() as sockets:
        while len(peers) < count:
            peer = sockets.enter_context(listener.accept()[0])
            if _user_of(peer) != os.getuid():  # the abstract namespace has no permissions
                continue
            peer.settimeout(max(deadline.left_s(), 0.001))
            socket.send_fds(peer, [b"f"], files)
            peers.append(peer)
        for peer in peers:
            if peer.recv(1) != b"k":
                raise RendezvousError("a rank of this host ended while it attached to the memory")
        for peer in peers:
            peer.sendall(b"k")


def _socket(deadline: Deadline) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(max(deadline.left_s(), 0.001))
    return connection


def _user_of(peer: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(PEER))
    return int(struct.unpack(PEER, credentials)[1])


def _timeout_error(size: int, deadline: Deadline) -> RendezvousError:
    return RendezvousError(
        f"the {size} ranks of this host did not all attach to its shared memory within {deadline.timeout_s:g} s: "
        "did one of them end?"
    )


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
        for word in self._others:  # noqa: SIM110  a generator would be called for every rank
            if words[word] < sent:
                return False
        return True

    def read(self) -> list[bytes]:
        """Wait for the last message of every rank; return them in rank order."""
        self.peers.wait(self.have_all_posted)
        messages = []
        for index in range(self.size):
            start = (2 * index + (self._sent - 1) % 2) * ROW_BYTES
            length = int.from_bytes(self._rows[start : start + LENGTH_BYTES], "little")
            messages.append(bytes(self._rows[start + LENGTH_BYTES : start + LENGTH_BYTES + length]))
        return messages

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
        return len(self._payload) <= FRAGMENT_BYTES and set(self._exchange.read()) == {self._first}

    def suffixes(self, prefix: bytes) -> list[bytes] | None:
        """Return what follows `prefix` in each payload; None unless all are short, of one length, and have it."""
        if len(self._payload) > FRAGMENT_BYTES:
            return None
        length, prefix = len(self._first), self._first[:LENGTH_BYTES] + prefix
        suffixes = []
        for message in self._exchange.read():
            if len(message) != length or not message.startswith(prefix):
                return None
            suffixes.append(message[len(prefix) :])
        return suffixes

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
