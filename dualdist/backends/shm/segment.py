"""Memory that several processes of one host share: made by one of them, and handed to the others without a name.

Note [no traces]: the memory is a file in /dev/shm that never has a name (O_TMPFILE), which travels as an open file over
a Unix socket in Linux's abstract namespace. Whatever is killed at whatever moment, nothing stays behind.

Note [who lives]: every process locks a byte of a second such file. Linux takes the lock away when the process ends,
however it ends, and children that it forks do not have it. It is a file of its own, because mapping memory in Python
opens and closes the file once more, and closing gives up all of a process's locks on it.
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
    BackendUnavailableError,
    CollectiveTimeoutError,
    NotInitializedError,
    RankLostError,
    RendezvousError,
)
from dualdist.utils.deadline import Deadline

if TYPE_CHECKING:
    from dualdist.backends.base import Store

FOLDER = "/dev/shm"
# Without fences, which Python does not have, only these processors show one core's writes to another in their order.
ORDERED_PROCESSORS = ("x86_64", "AMD64")
# How a rank waits: it polls, then lets others have the core in between, then sleeps and looks who still lives.
POLLS = 100
BUSY_S = 0.002
PAUSE_S = 0.0001
LIVENESS_CHECK_S = 0.2
FAILED = "!"
FLOCK = "@hhqqi0q"  # fcntl(2): struct flock
PEER = "3i"  # unix(7): struct ucred


def unavailable_reason(wanted: int, folder: str = FOLDER) -> str:
    """Why ranks of this host cannot share so many bytes of memory, or nothing."""
    if platform.machine() not in ORDERED_PROCESSORS:
        return f"a {platform.machine()} processor may show writes in another order"
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
    """Memory shared by `size` processes, of which this is number `place`; it grows as it is needed."""

    def __init__(self, memory: int, locks: int, place: int, size: int) -> None:
        self.place = place
        self.size = size
        self._memory = memory
        self._locks = locks
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)  # Note [who lives]

    def allocate(self, start: int, nbytes: int, end: int = 0) -> None:
        """Make room at `start`, and let the segment reach as far as `end`, up to which it has no room yet; one process
        does it for all. BackendUnavailableError where there is none.
        """
        try:
            os.posix_fallocate(self._memory, start, nbytes)
            if end > os.fstat(self._memory).st_size:
                os.ftruncate(self._memory, end)
        except OSError as error:
            raise BackendUnavailableError(f"{FOLDER}: {error.strerror}") from error

    def map(self, start: int, nbytes: int) -> mmap.mmap:
        """The bytes from `start`, a multiple of the page size, which stay as long as anything looks at them."""
        return mmap.mmap(self._memory, nbytes, offset=start)

    def is_alive(self, place: int) -> bool:
        """Whether the process of that number, which has attached, still runs."""
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        told = fcntl.fcntl(self._locks, fcntl.F_GETLK, asked)
        return place == self.place or struct.unpack(FLOCK, told)[0] != fcntl.F_UNLCK

    def leave(self) -> None:
        """For the others, this process is gone; the files are closed when nothing uses the segment any more."""
        fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, self.place)

    def __del__(self) -> None:
        os.close(self._memory)
        os.close(self._locks)


class SegmentPeers:
    """The ranks that share a segment, for those who wait for them."""

    def __init__(self, segment: SharedSegment, ranks: Sequence[int], timeout_s: float) -> None:
        self.segment = segment
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.is_open = True

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return once ready() is true; CollectiveTimeoutError, or RankLostError where a rank has ended."""
        for _ in range(POLLS):
            if ready():
                return
        deadline = Deadline(self.timeout_s)
        busy_until = time.monotonic() + BUSY_S
        while time.monotonic() < busy_until:
            if ready():
                return
            os.sched_yield()
        look_at = time.monotonic() + LIVENESS_CHECK_S
        while not ready():
            deadline.sleep(PAUSE_S)
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + LIVENESS_CHECK_S
            if not self.is_open:
                raise NotInitializedError("this group has been closed: by dd.shutdown(), or by dd.remove_group()")
            lost = [rank for place, rank in enumerate(self.ranks) if not self.segment.is_alive(place)]
            if lost and not ready():
                error = RankLostError(f"rank {', '.join(map(str, lost))} ended or left")
                error.ranks = tuple(lost)
                raise error
            if deadline.passed() and not ready():
                raise CollectiveTimeoutError(f"not all ranks arrived within {deadline.timeout_s:g} s")

    def close(self) -> None:
        """Wait for nobody any more, and let the others know."""
        if self.is_open:
            self.is_open = False
            self.segment.leave()


def round_to_pages(nbytes: int) -> int:
    """The number of bytes, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def open_segment(
    store: Store, key: str, place: int, size: int, nbytes: int, deadline: Deadline, room: int = 0
) -> SharedSegment:
    """A segment of `size` processes of this host, the first of which makes it; all of them call this.

    There shall be `room` for so many bytes in the end.

    BackendUnavailableError on all of them where it cannot be made; RendezvousError where they do not meet.
    """
    if place == 0:
        return _make(store, key, size, nbytes, deadline, max(room, nbytes))
    try:
        token = store.get(key, deadline.left_s())
    except TimeoutError as error:
        raise _late(size, deadline) from error
    if token.startswith(FAILED):
        raise BackendUnavailableError(token.removeprefix(FAILED))
    with _socket(deadline) as peer:
        try:
            peer.connect(f"\0{token}")
            if _user_of(peer) != os.getuid():
                raise RendezvousError("the memory of this host's first rank is offered by another user")
            _, files, _, _ = socket.recv_fds(peer, 1, 2)
            segment = SharedSegment(files[0], files[1], place, size)
            peer.sendall(b"k")
            if peer.recv(1) != b"k":
                raise RendezvousError("the first rank of this host ended while the others attached to its memory")
        except (OSError, IndexError) as error:
            raise RendezvousError(f"cannot attach to the memory of this host's first rank ({error})") from error
    return segment


def _make(store: Store, key: str, size: int, nbytes: int, deadline: Deadline, room: int) -> SharedSegment:
    try:
        files, segment = _files(size, nbytes, room)
    except BackendUnavailableError as error:
        store.set(key, f"{FAILED}{error}")
        raise
    token = f"dualdist-{secrets.token_hex(16)}"
    with _socket(deadline) as listener:
        listener.bind(f"\0{token}")
        listener.listen(size)
        store.set(key, token)
        try:
            _hand_out(files, listener, size - 1, deadline)
        except OSError as error:
            raise _late(size, deadline) from error
    return segment


def _files(size: int, nbytes: int, room: int) -> tuple[list[int], SharedSegment]:
    """The files of a new segment, which the segment closes; BackendUnavailableError where there is no room."""
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


def _hand_out(files: list[int], listener: socket.socket, count: int, deadline: Deadline) -> None:
    """Give the files to so many processes of this user, and let them go on when all have attached."""
    peers: list[socket.socket] = []
    with contextlib.ExitStack() as sockets:
        while len(peers) < count:
            peer = sockets.enter_context(listener.accept()[0])
            if _user_of(peer) != os.getuid():  # names in the abstract namespace have no permissions
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
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.settimeout(max(deadline.left_s(), 0.001))
    return found


def _user_of(peer: socket.socket) -> int:
    """The user at the other end."""
    told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(PEER))
    return int(struct.unpack(PEER, told)[1])


def _late(size: int, deadline: Deadline) -> RendezvousError:
    return RendezvousError(
        f"the {size} ranks of this host did not all attach to its shared memory within {deadline.timeout_s:g} s: "
        "did one of them end?"
    )
