"""Output of a rank that is about to end: wait until its launcher has read it."""

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


def wait_until_read(output: int) -> None:
    """Wait until the reader of the pipe `output` has read all of it, for a second at most."""
    deadline = time.monotonic() + READ_S
    with contextlib.suppress(OSError):
        while stat.S_ISFIFO(os.fstat(output).st_mode) and time.monotonic() < deadline:
            unread = bytearray(4)
            fcntl.ioctl(output, termios.FIONREAD, unread)
            if int.from_bytes(unread, sys.byteorder) == 0:
                return
            time.sleep(POLL_S)
