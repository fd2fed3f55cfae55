"""Programs of dualdist's on other hosts, started by ssh: requests and replies are lines of JSON on their pipes."""

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any

from dualdist.errors import LaunchError
from dualdist.launch import ssh
from dualdist.launch.job import Site
from dualdist.launch.processes import signals_deferred
from dualdist.utils.deadline import Deadline, LineReader


class HostPeer:
    """A program of dualdist's on a host, with its standard error in a file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], stderr: IO[bytes], site: Site) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self._process = process
        self._input = process.stdin.fileno()
        self._output = LineReader(process.stdout.fileno())
        self._stderr = stderr
        self._site = site

    def exchange(self, what: str, deadline: Deadline, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send the request, if any, and return the next message; raise LaunchError without one in time.

        Processes that ssh started may outlive it and hold its pipes: no read or write may rely on its end.
        """
        try:
            if request is not None:
                with contextlib.suppress(BrokenPipeError):  # the program's exit code, below, says why it ended
                    _write(self._input, json.dumps(request).encode() + b"\n", deadline)
            line = self._output.readline(deadline)
            while line and not line.startswith(b"{"):  # start-up files of the remote shell may print other lines first
                line = self._output.readline(deadline)
            if not line.endswith(b"\n"):
                code = self._process.wait(deadline.left_s())
                self._stderr.seek(0)
                stderr = self._stderr.read().decode(errors="replace")
                raise LaunchError(ssh.describe_ssh_failure(self.name, code, stderr, self._site))
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise LaunchError(
                f"host {self.name!r} did not {what} within {deadline.timeout_s:g} s: is it up?"
            ) from error
        try:
            return dict(json.loads(line))
        except ValueError as error:
            text = line[-200:].decode(errors="replace")
            raise LaunchError(f"host {self.name!r} replied {text!r}, which this dualdist cannot parse") from error


def _write(pipe: int, data: bytes, deadline: Deadline) -> None:
    """Write to a pipe; raise TimeoutError if it stays full."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    for start in range(0, len(data), select.PIPE_BUF):  # poll() promises room for so many bytes
        if not poll.poll(1000 * deadline.left_s()):
            raise TimeoutError
        os.write(pipe, data[start : start + select.PIPE_BUF])


@contextmanager
def start_peer(name: str, argv: Sequence[str], site: Site) -> Iterator[HostPeer]:
    """Start the command, which runs a program on the host; an exception, Ctrl-C too, and the block's end kill it."""
    with ExitStack() as stack:
        stderr, pipe = stack.enter_context(tempfile.TemporaryFile()), subprocess.PIPE
        try:
            with signals_deferred():
                process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=stderr)
                stack.enter_context(process)
                stack.callback(process.kill)
        except OSError as error:
            raise LaunchError(f"{argv[0]} cannot be started ({error}): it is needed to reach host {name!r}") from error
        yield HostPeer(name, process, stderr, site)
