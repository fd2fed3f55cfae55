"""Memory shared by processes of one host, which notice when one of them ends.

One process creates the memory and passes it to the others as an open file.

Note [no traces]: the memory is an unnamed file in /dev/shm (O_TMPFILE), passed over a Unix socket in Linux's abstract
namespace. A process killed at any moment leaves nothing behind.

Note [liveness]: every process locks a byte of a second such file. Linux releases the lock however the process ends, and
forked children do not hold it. It is a separate file because mapping memory in Python opens and closes the file once
more, and closing releases all of a process's locks on it.

Note [all or none]: only the C++ extension has the fences that keep one core's writes in order for another. A process
says whether it has the extension when it attaches, and unless all have it none uses the memory. It also says on which
cores it may run: there is no point in spinning on the core of the process that one waits for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dualdist.errors import BackendUnavailableError, RendezvousError
from dualdist.utils import extension
from dualdist.utils.deadline import Deadline
from dualdist.utils.unix_peer import is_own

if TYPE_CHECKING:
    from dualdist.backends.base import Store

FOLDER = "/dev/shm"
FAILED = "!"
MAX_MESSAGE_BYTES = 1 << 16
FLOCK = "@hhqqi0q"  # fcntl(2): struct flock


class SharedSegment:
    """Memory shared by `size` processes, of which this is number `index`."""

    def __init__(self, memory: int, locks: int, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.may_spin = False  # True if every process has a core, once all have attached
        self._memory = memory
        self._locks = locks
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)  # Note [liveness]

    def map(self) -> mmap.mmap:
        """Map all of the memory."""
        return mmap.mmap(self._memory, 0)

    def is_alive(self, index: int) -> bool:
        """Return True if the process of that number, which has attached, still runs."""
        query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
        answer = fcntl.fcntl(self._locks, fcntl.F_GETLK, query)
        return index == self.index or struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK

    def leave(self) -> None:
        """Release the lock, by which the others see that this process has left."""
        fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, self.index)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # modules are gone when the interpreter exits
        close(self._memory)
        close(self._locks)


def open_segment(
    store: Store, key: str, index: int, size: int, nbytes: int, deadline: Deadline, room: int = 0
) -> SharedSegment:
    """Return a segment shared by `size` processes of this host, the first of which creates it; all of them call this.

    Args:
        store: passes the address of a socket to the others, under `key`.
        index: the number of this process.
        nbytes: the size of the memory.
        room: /dev/shm must have so many bytes free.

    Raises:
        BackendUnavailableError: on all processes, if the segment cannot be created or used.
        RendezvousError: not all processes called this in time.
    """
    if index == 0:
        segment = _create(store, key, size, nbytes, deadline, max(room, nbytes))
    else:
        segment = _attach(store, key, index, size, deadline)
    return segment


def unavailable_reason(wanted: int, folder: str = FOLDER) -> str:
    """Return why processes of this host cannot share `wanted` bytes of memory, or ""."""
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
            use = _send_files(files, listener, size - 1, deadline)
        except TimeoutError as error:
            raise _timeout_error(size, deadline) from error
        except OSError as error:
            raise RendezvousError(f"cannot share memory with the ranks of this host: {_reason(error)}") from error
    return _prepared(segment, use)


def _create_files(size: int, nbytes: int, room: int) -> tuple[list[int], SharedSegment]:
    """Create a segment; return its files, which it closes, and the segment."""
    reason = unavailable_reason(room)
    if reason:
        raise BackendUnavailableError(reason)
    try:
        files = [os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600) for _ in range(2)]
        segment = SharedSegment(files[0], files[1], 0, size)
        os.posix_fallocate(files[0], 0, nbytes)
    except OSError as error:
        raise BackendUnavailableError(f"{FOLDER}: {error.strerror}") from error
    return files, segment


def _prepared(segment: SharedSegment, use: Sequence[bool]) -> SharedSegment:
    """Return the segment once all have attached; raise BackendUnavailableError unless all have the extension."""
    all_have_extension, segment.may_spin = use
    if not all_have_extension:
        raise BackendUnavailableError(
            "shared memory needs dualdist's C++ extension on every rank, and a rank of this host does not use it: "
            "dualdist doctor says how to build it"
        )
    return segment


def _send_files(files: list[int], listener: socket.socket, count: int, deadline: Deadline) -> list[bool]:
    """Send the files to `count` processes of this user; once all have attached, tell them how to use the memory."""
    peers: list[socket.socket] = []
    offers = [_offer()]
    with contextlib.ExitStack() as sockets:
        while len(peers) < count:
            peer = sockets.enter_context(listener.accept()[0])
            if not is_own(peer):
                continue
            peer.settimeout(max(deadline.left_s(), 0.001))
            socket.send_fds(peer, [b"f"], files)
            peers.append(peer)
        for peer in peers:
            offer = peer.recv(MAX_MESSAGE_BYTES)
            if not offer:
                raise RendezvousError("a rank of this host ended while it attached to the memory")
            offers.append(json.loads(offer))
        cores = {core for _, cores in offers for core in cores}
        use = [all(has_extension for has_extension, _ in offers), len(cores) >= len(offers)]
        for peer in peers:
            peer.sendall(json.dumps(use).encode())
    return use


def _attach(store: Store, key: str, index: int, size: int, deadline: Deadline) -> SharedSegment:
    try:
        token = store.get(key, deadline.left_s())
    except TimeoutError as error:
        raise _timeout_error(size, deadline) from error
    if token.startswith(FAILED):
        raise BackendUnavailableError(token.removeprefix(FAILED))
    with _socket(deadline) as peer:
        try:
            peer.connect(f"\0{token}")
            if not is_own(peer):
                raise RendezvousError("another user offers the memory of this host's first rank")
            _, files, _, _ = socket.recv_fds(peer, 1, 2)
            if len(files) < 2:  # the kernel drops those for which this process has no room
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            segment = SharedSegment(files[0], files[1], index, size)
            peer.sendall(json.dumps(_offer()).encode())
            use = peer.recv(MAX_MESSAGE_BYTES)
            if not use:
                raise RendezvousError("the first rank of this host ended while the others attached to its memory")
        except OSError as error:
            raise RendezvousError(f"cannot attach to the memory of this host's first rank: {_reason(error)}") from error
    return _prepared(segment, json.loads(use))


def _reason(error: OSError) -> str:
    return f"{error}{'; allow more of them by ulimit -n' if error.errno == errno.EMFILE else ''}"


def _offer() -> tuple[bool, list[int]]:
    """Return whether this process has the extension, and the cores that it may run on."""
    return extension.load() is not None, sorted(os.sched_getaffinity(0))


def _socket(deadline: Deadline) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps messages apart
    connection.settimeout(max(deadline.left_s(), 0.001))
    return connection


def _timeout_error(size: int, deadline: Deadline) -> RendezvousError:
    return RendezvousError(
        f"the {size} ranks of this host did not all attach to its shared memory within {deadline.timeout_s:g} s: "
        "did one of them end?"
    )
