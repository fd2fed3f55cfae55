"""Run one command on a host that was reached by ssh, and end it when that connection ends.

    python -m dualdist.launch.remote_guard [--env-from-stdin] ARGV...

With --env-from-stdin a line of JSON on standard input has more variables for the command: secrets must not be on a
command line.

sshd does not signal the end of its client, but it closes the pipe to which the command prints: this process polls it.
If the whole host is cut off, sshd does not notice; a control channel to `dualdist run`, as ranks have one, does.
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
HANG_UP = select.POLLERR | select.POLLHUP


def main(argv: Sequence[str]) -> int:
    environ = dict(os.environ)
    if argv[:1] == [ENV_FROM_STDIN]:
        argv = argv[1:]
        environ |= json.loads(sys.stdin.readline())
    mark, mark_variables = processes.new_job_mark(environ)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: received.append(number))
    child = subprocess.Popen(argv, env={**environ, **mark_variables}, stdin=subprocess.DEVNULL, start_new_session=True)
    poll = select.poll()
    for output in (1, 2):
        poll.register(output, 0)  # poll() always reports errors and hang-ups
    connection = _connect(environ)
    if connection is not None:
        poll.register(connection, select.POLLIN)  # a guard gets no messages: readable means closed
    with contextlib.suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(child.pid), select.POLLIN)
    while child.poll() is None and not received:
        events = poll.poll(POLL_MS)
        if any(event & HANG_UP or (connection and file == connection.fileno()) for file, event in events):
            received.append(signal.SIGHUP)
    if received:
        processes.terminate_and_wait(mark, GRACE_S)
    else:
        processes.wait_or_kill(mark, GRACE_S)
    try:
        code = child.wait(processes.KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # in uninterruptible sleep
        code = -signal.SIGKILL
    return 128 - code if code < 0 else code


def _connect(environ: Mapping[str, str]) -> socket.socket | None:
    """Return the control channel; None for a command of a dry run, which has no `dualdist run`."""
    if control_channel.CONTROL_VARIABLE not in environ:
        return None
    address = control_channel.ControlAddress.loads(environ[control_channel.CONTROL_VARIABLE])
    hello = control_channel.RankHello(address.token, None, socket.gethostname(), 0, is_guard=True)
    try:
        return control_channel.connect(address, hello)
    except control_channel.ControlChannelError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
