"""ssh: command lines that run something on another host, their guard, programs of dualdist's there, and errors.

srun reaches the nodes of a Slurm allocation, which often refuse ssh.

    python -m dualdist.launch.ssh [--env-from-stdin] ARGV...

is the guard: it runs a command on a host that was reached by ssh, and ends it when that connection ends. With
--env-from-stdin a line of JSON on standard input has more variables for the command: secrets must not be on a command
line. sshd does not signal the end of its client, but it closes the pipe to which the command prints: the guard polls
it. If the whole host is cut off, sshd does not notice; a control channel to `dualdist run`, as ranks have one, does.
"""

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import IO, Any

from dualdist.errors import LaunchError
from dualdist.launch import processes
from dualdist.launch.job import Command, Site
from dualdist.launch.launchers.srun import TASK_VARIABLES, step_argv
from dualdist.launch.processes import signals_deferred
from dualdist.utils import control_channel
from dualdist.utils.control_channel import CONTROL_VARIABLE
from dualdist.utils.deadline import Deadline, LineReader
from dualdist.utils.redaction import is_secret

# Never ask for a password. A host that is silent for 20 s is lost.
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
NO_STDIN = "-n"  # else ssh forwards the terminal's input to a rank
GUARD = ("-m", "dualdist.launch.ssh")
ENV_FROM_STDIN = "--env-from-stdin"  # an option of the guard
GUARD_GRACE_S = 3.0
GUARD_POLL_MS = 500
HANG_UP = select.POLLERR | select.POLLHUP
# Exit codes of the remote shell before python runs, and ssh's own.
NO_FOLDER, NO_PYTHON, SSH_FAILED = 71, 72, 255
FAILURES = (
    (("Permission denied",), "it requires a password: put your public key there by `ssh-copy-id {host}`"),
    (("Could not resolve hostname", "Name or service not known"), "its name does not resolve: is it spelled right?"),
    (
        ("Host key verification", "HOST IDENTIFICATION HAS CHANGED"),
        "its key is unknown: run `ssh {host}` and compare it",
    ),
    (("Connection refused",), "it runs no ssh server on that port"),
    (
        ("timed out", "No route to", "unreachable", "Connection closed"),
        "it does not answer: is it up, the address right?",
    ),
)


def wrap_remote(command: Command, site: Site, *, control_port: int | None = None) -> Command:
    """Return the local command that runs the given one on its host, by srun or by ssh under a guard.

    srun hands on its environment. ssh forwards `control_port` of that host to this one; as all users of both hosts see
    command lines, secrets go to the guard's standard input.
    """
    if command.host is None:
        return command
    if command.host in site.node_cores:
        secrets = (name for name in site.secret_names if name not in command.env)
        argv, unset = step_argv(command.host, site, command.argv), (*TASK_VARIABLES, *secrets)
        return replace(command, argv=argv, host=None, unset=unset)
    private = {name: value for name, value in command.env.items() if name == CONTROL_VARIABLE or is_secret(name)}
    public = {name: value for name, value in command.env.items() if name not in private}
    guarded = [site.python, *GUARD, *([ENV_FROM_STDIN] if private else []), *command.argv]
    forward = ("-R", f"127.0.0.1:{control_port}:127.0.0.1:{control_port}") if control_port is not None else ()
    line = f"cd {shlex.quote(site.folder)} && exec {shlex.join([*_env(public), *guarded])}"
    argv = ("ssh", *([] if private else [NO_STDIN]), *OPTIONS, *forward, command.host, line)
    return Command(argv, stdin=json.dumps(private) if private else "")


def remote_python_argv(host: str, site: Site, env: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the argv that runs python with these arguments on a host; of ssh it exits by the codes above."""
    if host in site.node_cores:
        return [*step_argv(host, site, [site.python, *words])]
    folder, python = shlex.quote(site.folder), shlex.quote(site.python)
    checks = f"cd {folder} || exit {NO_FOLDER}; test -x {python} || exit {NO_PYTHON}; "
    public = {name: value for name, value in env.items() if not is_secret(name)}
    line = shlex.join([*_env(public), site.python, *words])
    return ["ssh", *OPTIONS, host, shlex.join(["sh", "-c", f"{checks}exec {line}"])]


class HostPeer:
    """A program of dualdist's on a host: requests and replies are lines of JSON; its standard error is in a file."""

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
                raise LaunchError(describe_ssh_failure(self.name, code, stderr, self._site))
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


def describe_ssh_failure(host: str, code: int, stderr: str, site: Site) -> str:
    """Return why a host cannot take part, from the exit code and stderr of its probe."""
    last_line = (stderr.strip().splitlines() or [f"exit code {code}"])[-1]
    if code == NO_FOLDER:
        return f"host {host!r} has no folder {site.folder}: start the job in one that every host has"
    if code == NO_PYTHON:
        return f"host {host!r} has no {site.python}: every host needs the same environment at the same path"
    if code == SSH_FAILED:
        for words, meaning in FAILURES:
            if any(word in stderr for word in words):
                return f"host {host!r} cannot be reached by ssh: {meaning.format(host=host)} ({last_line})"
        return f"host {host!r} cannot be reached by ssh ({last_line})"
    if "No module named" in stderr:
        return f"host {host!r}: {site.python} does not find dualdist there ({last_line}): install it on every host"
    return f"host {host!r} cannot run {site.python} ({last_line})"


def _env(env: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in env.items())] if env else []


def run_guarded(argv: Sequence[str]) -> int:
    environ = dict(os.environ)
    if argv[:1] == [ENV_FROM_STDIN]:
        argv = argv[1:]
        environ |= json.loads(sys.stdin.readline())
    find, mark_variables = processes.mark_job(environ)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: received.append(number))
    child = subprocess.Popen(argv, env={**environ, **mark_variables}, stdin=subprocess.DEVNULL, start_new_session=True)
    poll = select.poll()
    for output in (1, 2):
        poll.register(output, 0)  # poll() always reports errors and hang-ups
    connection = _connect_guard(environ)
    if connection is not None:
        poll.register(connection, select.POLLIN)  # a guard gets no messages: readable means closed
    with contextlib.suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(child.pid), select.POLLIN)
    while child.poll() is None and not received:
        events = poll.poll(GUARD_POLL_MS)
        if any(event & HANG_UP or (connection and file == connection.fileno()) for file, event in events):
            received.append(signal.SIGHUP)
    if received:
        processes.terminate_and_wait(find, GUARD_GRACE_S)
    else:
        processes.wait_or_kill(find, GUARD_GRACE_S)
    try:
        code = child.wait(processes.KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # in uninterruptible sleep
        code = -signal.SIGKILL
    return 128 - code if code < 0 else code


def _connect_guard(environ: Mapping[str, str]) -> socket.socket | None:
    """Return the control channel; None for a command of a dry run, which has no `dualdist run`."""
    if CONTROL_VARIABLE not in environ:
        return None
    address = control_channel.ControlAddress.loads(environ[CONTROL_VARIABLE])
    hello = control_channel.RankHello(address.token, None, socket.gethostname(), is_guard=True)
    try:
        return control_channel.connect(address, hello)
    except control_channel.ControlChannelError:
        return None


if __name__ == "__main__":
    sys.exit(run_guarded(sys.argv[1:]))
