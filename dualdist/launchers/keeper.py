"""Runs one command on a host that was reached by ssh, and ends it when that connection ends.

    python -m dualdist.launchers.keeper ARGV...

sshd tells nobody when its client has gone, but it closes the pipe to which the command prints; this process sees that.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

from dualdist.launchers import processes

GRACE_S = 3.0
POLL_MS = 500
GONE = select.POLLERR | select.POLLHUP


def main(argv: Sequence[str]) -> int:
    mark, marking = processes.marked(os.environ)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: told.append(number))
    child = subprocess.Popen(argv, env={**os.environ, **marking}, start_new_session=True)
    watched = select.poll()
    for output in (1, 2):
        watched.register(output, 0)  # errors and hang-ups are reported unasked
    with contextlib.suppress(OSError, AttributeError):
        watched.register(os.pidfd_open(child.pid), select.POLLIN)
    while child.poll() is None and not told:
        if any(event & GONE for _, event in watched.poll(POLL_MS)):
            told.append(signal.SIGHUP)
    if told:
        processes.end(mark, GRACE_S)
    else:
        processes.killed(mark, GRACE_S)
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
