"""How many bytes the TCP connections of this process have carried, by what Linux keeps of each."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

FOLDER = "/proc/self/fd"
# struct tcp_info of linux/tcp.h: tcpi_bytes_acked stands at byte 120, in Linux 4.1 and later.
INFO_BYTES, ACKED_AT, ACKED = 128, 120, "=Q"


def tcp_bytes_sent() -> int | None:
    """What the open connections have sent and the other end has confirmed; None where the system does not tell.

    Of shared memory, InfiniBand and NVLink it sees nothing.
    """
    if not os.path.isdir(FOLDER) or not hasattr(socket, "TCP_INFO"):
        return None
    return sum(_acknowledged(connection) for connection in _connections())


def _connections() -> Iterator[socket.socket]:
    """A second handle on every TCP connection of this process, closed after use."""
    for name in os.listdir(FOLDER):
        with contextlib.suppress(OSError):  # closed since, or no socket
            if os.readlink(f"{FOLDER}/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                        yield found


def _acknowledged(connection: socket.socket) -> int:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:
        return 0
    return int(struct.unpack_from(ACKED, info, ACKED_AT)[0]) if len(info) == INFO_BYTES else 0
