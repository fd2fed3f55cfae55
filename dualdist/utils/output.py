"""What a rank has printed reaches its launcher before the rank ends the launcher."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import termios
import time

STDERR = 2
READ_S = 1.0
POLL_S = 0.001


def await_reader(output: int) -> None:
    """What was printed to a pipe has been read, or a second has passed."""
    deadline = time.monotonic() + READ_S
    with contextlib.suppress(OSError):
        while stat.S_ISFIFO(os.fstat(output).st_mode) and time.monotonic() < deadline:
            unread = bytearray(4)
            fcntl.ioctl(output, termios.FIONREAD, unread)
            if int.from_bytes(unread, sys.byteorder) == 0:
                return
            time.sleep(POLL_S)
