"""Runs one command on a host that was reached by ssh, and ends it when that connection ends.

    python -m dualdist.launch.remote_guard [--told] ARGV...

With --told its standard input has more variables for the command, a line of JSON: not all may stand on a command line.

sshd tells nobody when its client has gone, but it closes the pipe to which the command prints; this process sees that.
Where the whole host has been cut off, sshd does not know; a line to `dualdist run`, as ranks have one, tells.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from dualdist.launch import control_channel, processes
from dualdist.launch.ssh import ENV_FROM_STDIN

GRACE_S = 3.0
POLL_MS = 500
GONE = select.POLLERR | select.POLLHUP


def main(argv: Sequence[str]) -> int:
    environ = dict(os.environ)
    if argv[:1] == [ENV_FROM_STDIN]:
        argv = argv[1:]
        environ |= json.loads(sys.stdin.readline())
    mark, marking = processes.new_job_mark(environ)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: told.append(number))
    child = subprocess.Popen(argv, env={**environ, **marking}, stdin=subprocess.DEVNULL, start_new_session=True)
    watched = select.poll()
    for output in (1, 2):
        watched.register(output, 0)  # errors and hang-ups are reported unasked
    line = _line(environ)
    if line is not None:
        watched.register(line, select.POLLIN)  # nothing is ever said on it: it can only end
    with contextlib.suppress(OSError, AttributeError):
        watched.register(os.pidfd_open(child.pid), select.POLLIN)
    while child.poll() is None and not told:
        events = watched.poll(POLL_MS)
        if any(event & GONE or (line is not None and file == line.fileno()) for file, event in events):
            told.append(signal.SIGHUP)
    if told:
        processes.terminate_and_wait(mark, GRACE_S)
    else:
        processes.wait_or_kill(mark, GRACE_S)
    try:
        code = child.wait(processes.KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # the kernel holds it
        code = -signal.SIGKILL
    return 128 - code if code < 0 else code


def _line(environ: Mapping[str, str]) -> socket.socket | None:
    """None where nobody would answer: a pasted command has no `dualdist run`."""
    if control_channel.CONTROL_VARIABLE not in environ:
        return None
    address = control_channel.ControlAddress.loads(environ[control_channel.CONTROL_VARIABLE])
    try:
        return control_channel.connect(
            address, control_channel.RankHello(address.token, None, socket.gethostname(), 0, is_guard=True)
        )
    except control_channel.ControlChannelError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
