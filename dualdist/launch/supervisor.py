"""Supervise the commands of a job: collect the reports of its ranks, end it when one fails, leave no process behind."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dualdist.errors import LaunchError
from dualdist.launch import processes
from dualdist.launch.failure import RankEnd, exit_code, first_failure
from dualdist.launch.job import Command
from dualdist.launch.processes import TERMINATION_SIGNALS, signals_handled
from dualdist.launch.relay import OutputRelay
from dualdist.utils import control_channel
from dualdist.utils.control_channel import ControlAddress, RankEnded, RankFailing, RankHello
from dualdist.utils.network_interfaces import open_listener
from dualdist.utils.redaction import redact_command
from dualdist.utils.variables import NOTICE, PREEMPTION_SIGNALS, REQUEUE

# Seconds for the other ranks to end after a failure.
GRACE_S = 3.0
# Seconds for a job to stop after a notice, and between looks for the notice's file.
NOTICE_S = 120.0
NOTICE_POLL_S = 1.0
# Seconds for launchers and ranks to end after SIGTERM: longer than a rank gives its program.
END_S = 8.0
TICK_S = 0.1
# Seconds for a connection to send its RankHello.
HELLO_S = 5.0
# A lost rank failed by the traceback that it printed at most so many seconds before.
FAILING_S = 5.0


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job.

    Attributes:
        failure: the rank that failed first.
        error: why the job was ended, if neither a rank nor a launcher failed.
        stop_signal: the signal that asked the job to stop, or 0.
        seconds: of the job with its restarts, which dualdist.launch.runner sets.
    """

    code: int
    failure: RankEnd | None = None
    error: str = ""
    stop_signal: int = 0
    seconds: float = 0.0


@dataclass
class Connection:
    """A connection to the control channel; `hello` is None until its first message. `data` is an incomplete message."""

    opened_at: float
    hello: RankHello | None = None
    data: bytes = b""
    has_ended: bool = False
    failing: str = ""
    failing_at: float = 0.0

    @property
    def is_rank(self) -> bool:
        return self.hello is not None and not self.hello.is_guard


def listen(addresses: Sequence[str], *, is_local: bool) -> tuple[socket.socket, ControlAddress]:
    """Return the server of the control channel and its address, for ranks of this host alone if `is_local`."""
    server = open_listener(0, loopback_only=is_local)
    server.setblocking(False)
    distinct, token = tuple(dict.fromkeys(addresses)), secrets.token_hex(16)
    return server, ControlAddress(distinct, server.getsockname()[1], token)


@dataclass
class Supervisor:
    """One run of a job; `launcher_restarts_ranks` as horovodrun's elastic mode does, so that a lost one ends nothing.

    With `has_frames` ranks frame their stderr, and what the launcher itself writes there is dropped after a failure.
    `ends` and `hosts` are those of the ranks that connected.
    """

    commands: Sequence[Command]
    server: socket.socket
    token: str
    environ: Mapping[str, str]
    stdout: int | None = None
    launcher_restarts_ranks: bool = False
    has_frames: bool = False
    ends: list[RankEnd] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections: dict[socket.socket, Connection] = {}
        self._relays: list[OutputRelay] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._find_marked, self._mark_variables = processes.mark_job(self.environ)
        self._is_ending = False
        self._stop_signal = self._num_ends_before_stop = 0
        self._received: list[int] = []  # signals that are not yet forwarded to the ranks
        self._notice_checked_at = time.monotonic()

    def run(self, timeout_s: float | None) -> JobOutcome:
        """Start all commands, and return when all have ended on every host; LaunchError if one cannot be started."""
        began = time.monotonic()
        self._selector.register(self.server, selectors.EVENT_READ, self._accept)
        error = ""
        try:
            with signals_handled(PREEMPTION_SIGNALS, lambda number, frame: self._received.append(number)):
                self._start_all()
                error = self._watch(began, timeout_s)
            if error:
                error = f"{error}; {processes.describe_processes(self._find_marked())}"
        finally:
            self._end()
        return self._outcome(error)

    def _outcome(self, error: str) -> JobOutcome:
        codes = [process.returncode for process in self._processes]
        failure, stopped = first_failure(self.ends), self._stop_signal
        # One rank that stopped on notice is enough: it does after all have saved, whatever becomes of the others.
        if not error and any(end.code == REQUEUE for end in self.ends):
            return JobOutcome(REQUEUE, stop_signal=stopped)
        if stopped and any([*codes, failure, error]):
            return JobOutcome(128 + stopped, error=error, stop_signal=stopped)
        code = 124 if error else exit_code(codes, failure, launcher_restarts_ranks=self.launcher_restarts_ranks)
        return JobOutcome(code, failure if code and not error else None, error, stopped)

    def _start_all(self) -> None:
        for command in self.commands:
            self._start(command)

    def _start(self, command: Command) -> None:
        is_relayed = bool(command.prefix)
        try:
            process = subprocess.Popen(
                command.argv,
                env={**command.environment(self.environ), **self._mark_variables},
                stdin=subprocess.PIPE if command.stdin else None,
                stdout=subprocess.PIPE if is_relayed else self.stdout,
                stderr=subprocess.PIPE if is_relayed or self.has_frames else None,
                start_new_session=True,
            )
        except OSError as error:
            line = shlex.join(redact_command(command.argv))
            raise LaunchError(f"the job could not be started ({error}): {line}") from error
        self._processes.append(process)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # its exit code says why
                process.stdin.write(f"{command.stdin}\n".encode())
        for source, target in ((process.stdout, self.stdout or 1), (process.stderr, 2)):
            if source is not None:
                hides = self._hides_launcher_output if self.has_frames else None
                relay = OutputRelay(os.dup(source.fileno()), [target], strip=command.prefix, hides_unframed=hides)
                source.close()
                self._relays.append(relay)
                self._selector.register(
                    relay.source, selectors.EVENT_READ, lambda relay=relay: relay.pump_into(self._selector)
                )

    def _watch(self, began: float, timeout_s: float | None) -> str:
        """Return "" when all commands have ended, or a failed job's grace is over; else the error of a timeout."""
        failed_at = stopped_at = math.inf
        while any(process.poll() is None for process in self._processes):
            self._step(TICK_S)
            now = time.monotonic()
            if self._forward_stop():
                stopped_at = min(stopped_at, now)
            if self._has_failed() or (self._stop_signal and self._have_ranks_ended()):
                failed_at = min(failed_at, now)
            if now > failed_at + GRACE_S:
                return ""
            if now > stopped_at + NOTICE_S:
                return f"the job did not stop within {NOTICE_S:g} s of {signal.Signals(self._stop_signal).name}"
            if timeout_s is not None and now > began + timeout_s:
                return f"the job was not done after {round(timeout_s, 1):g} s"
        return ""

    def _has_failed(self) -> bool:
        """Return True if the job can no longer succeed."""
        if any(process.poll() for process in self._processes):
            return True
        if self._stop_signal:
            return any(end.code != 0 for end in self.ends[self._num_ends_before_stop :])
        return not self.launcher_restarts_ranks and any(end.code != 0 for end in self.ends)

    def _hides_launcher_output(self) -> bool:
        """Return True if a rank has failed, or the job is being ended."""
        return self._is_ending or bool(self._stop_signal) or any(end.code != 0 for end in self.ends)

    def _have_ranks_ended(self) -> bool:
        """Return True if every rank that connected has reported its end."""
        return bool(self.ends) and not any(each.is_rank and not each.has_ended for each in self._connections.values())

    def _forward_stop(self) -> bool:
        """Send received stop signals to the ranks, and SIGTERM when the notice's file appears; return True if any."""
        notice = self.environ.get(NOTICE)
        if not self._stop_signal and notice and time.monotonic() > self._notice_checked_at + NOTICE_POLL_S:
            self._notice_checked_at = time.monotonic()
            if os.path.exists(notice):
                self._received.append(signal.SIGTERM)
        numbers = bytes(self._received)
        self._received.clear()
        for sock, connection in self._connections.items() if numbers else ():
            if connection.is_rank:
                with contextlib.suppress(OSError):
                    sock.sendall(numbers)
        if numbers and not self._stop_signal:
            self._stop_signal, self._num_ends_before_stop = numbers[0], len(self.ends)
        return bool(numbers)

    def _end(self) -> None:
        """End all launchers, and all ranks by closing their connections; kill what is left on this host."""
        with signals_handled([*TERMINATION_SIGNALS, *PREEMPTION_SIGNALS, signal.SIGINT], signal.SIG_IGN):
            for process in self._processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
            self._is_ending = True
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
            connections = self._connections.values()
            self._step_until(lambda: not self._running() and not any(each.hello for each in connections), END_S)
            left = processes.wait_or_kill(self._find_marked, 1.0, self._running)
            if left and not any(process.poll() for process in self._processes):
                described = processes.describe_processes(left)
                print(f"dualdist run: killed processes that the job left behind; {described}", file=sys.stderr)
            self._step_until(lambda: not any(relay.is_open for relay in self._relays), 1.0)
            for relay in self._relays:
                relay.close()
            for sock in self._connections:
                sock.close()
            self._selector.close()

    def _running(self) -> list[int]:
        return [process.pid for process in self._processes if process.poll() is None]

    def _step_until(self, condition: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not condition() and time.monotonic() < deadline:
            self._step(TICK_S)

    def _step(self, wait_s: float) -> None:
        # Reports of ranks first: what a launcher writes of a failure is dropped.
        for key, _ in sorted(self._selector.select(wait_s), key=lambda ready: isinstance(ready[0].fileobj, int)):
            key.data()
        self._drop_unidentified(HELLO_S)

    def _accept(self) -> None:
        try:
            sock, _ = self.server.accept()
        except OSError:  # it is closed again, or there are too many open files
            self._drop_unidentified(0)
            return
        sock.setblocking(False)
        self._connections[sock] = Connection(time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._receive(sock))

    def _drop_unidentified(self, age_s: float) -> None:
        """Drop connections that sent no RankHello within `age_s`."""
        opened = time.monotonic() - age_s
        for sock in [sock for sock, each in self._connections.items() if not each.hello and each.opened_at <= opened]:
            self._drop(sock)

    def _receive(self, sock: socket.socket) -> None:
        connection = self._connections.get(sock)
        if connection is None:  # dropped in this step
            return
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(connection.data) > control_channel.MAX_MESSAGE_BYTES:
            self._drop(sock)
            return
        *messages, connection.data = (connection.data + data).split(b"\n")
        for message in messages:
            if not self._handle(sock, connection, message):
                self._drop(sock)
                return

    def _handle(self, sock: socket.socket, connection: Connection, message: bytes) -> bool:
        """Handle a message; return False for one that no rank of this job sends."""
        if connection.hello is None:
            hello = control_channel.loads(RankHello, message)
            if hello is None or hello.token != self.token or self._is_ending:
                return False
            connection.hello = hello
            self.hosts |= {hello.host} if connection.is_rank else set()
            with contextlib.suppress(OSError):
                has_to_stop = self._stop_signal and connection.is_rank
                sock.sendall(control_channel.WELCOME + (bytes([self._stop_signal]) if has_to_stop else b""))
                control_channel.keep_alive(sock)
            return True
        if failing := control_channel.loads(RankFailing, message):
            connection.failing, connection.failing_at = failing.traceback, time.monotonic()
            return True
        if ended := control_channel.loads(RankEnded, message):
            connection.has_ended = True
            at_s, hello = time.monotonic() - ended.age_s, connection.hello
            end = RankEnd(hello.rank, hello.host, ended.code, at_s, ended.was_terminated, ended.text)
            self.ends.append(end)
        return ended is not None

    def _drop(self, sock: socket.socket) -> None:
        """Close a connection; its rank is lost unless it reported its end."""
        self._selector.unregister(sock)
        connection = self._connections.pop(sock)
        sock.close()
        hello, now = connection.hello, time.monotonic()
        if hello is None or connection.has_ended or hello.is_guard:
            return
        text = connection.failing if now < connection.failing_at + FAILING_S else ""
        if text or not self._is_ending:
            self.ends.append(RankEnd(hello.rank, hello.host, None, now, text=text))
