"""The user at the other end of a Unix socket: names in Linux's abstract namespace have no permissions."""

import contextlib
import os
import socket
import struct

PEER = "3i"  # unix(7): struct ucred


def is_own(connection: socket.socket) -> bool:
    """Return True if a process of this user is at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(PEER))
    return bool(struct.unpack(PEER, credentials)[1] == os.getuid())


def connect_to_own(name: str) -> socket.socket | None:
    """Return a connection to the process of this user that listens at the name, or None, without waiting."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    with contextlib.suppress(OSError):  # nobody listens there, or nobody accepts
        connection.connect(name)
        if is_own(connection):
            return connection
    connection.close()
    return None
