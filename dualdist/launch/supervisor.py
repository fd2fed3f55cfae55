"""Runs the commands of a job to their end: hears from every rank, ends all when one fails, leaves nothing behind."""

from __future__ import annotations

import contextlib
import math
import os
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
from dualdist.launch import control_channel, processes
from dualdist.launch.failure import RankEnd, exit_code, first_failure, has_stopped_on_notice
from dualdist.launch.job import Command
from dualdist.launch.processes import signals_ignored, stop_signals_caught
from dualdist.launch.relay import OutputRelay
from dualdist.utils.exit_codes import NOTICE, REQUEUE
from dualdist.utils.redaction import redact_command

# Seconds that the others get to end by themselves after a failure.
GRACE_S = 3.0
# Seconds that a job gets to stop when it was told to, and between looks for the file that tells it.
NOTICE_S = 120.0
LOOK_S = 1.0
# Seconds in which launchers and ranks must have ended when told to: more than a rank gives its program.
END_S = 8.0
TICK_S = 0.1
# Seconds in which whoever connects must have said who it is.
HELLO_S = 5.0
# Seconds in which a rank that printed a traceback and was lost is taken to have been lost by it.
FAILING_S = 5.0


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended. `why` says what ended it where that was neither a rank nor a launcher.

    `told` is the number of the signal by which the job was told to stop, or 0.
    """

    code: int
    seconds: float
    failure: RankEnd | None = None
    why: str = ""
    told: int = 0


@dataclass
class _RankConnection:
    """A rank's line to us, and what has arrived of its next message; a stranger's, as long as it has not said hello."""

    opened_at: float
    hello: control_channel.RankHello | None = None
    data: bytes = b""
    has_ended: bool = False
    failing: str = ""
    failing_at: float = 0.0

    @property
    def is_rank(self) -> bool:
        return self.hello is not None and not self.hello.is_guard


@dataclass
class ControlListener:
    """Where ranks report; open it before the commands are built, as they carry its address."""

    server: socket.socket
    address: control_channel.ControlAddress

    @staticmethod
    def open(addresses: Sequence[str], *, is_local: bool) -> ControlListener:
        """It listens on loopback only where all ranks run on this host."""
        server = socket.create_server(("127.0.0.1" if is_local else "", 0), backlog=1024)
        server.setblocking(False)
        return ControlListener(server, control_channel.ControlAddress.new(addresses, server.getsockname()[1]))

    def close(self) -> None:
        self.server.close()


@dataclass
class Supervisor:
    """One run of a job. `restarts` is how often the launcher restarts failed ranks itself."""

    commands: Sequence[Command]
    listener: ControlListener
    environ: Mapping[str, str]
    restarts: int = 0
    stdout: int | None = None
    ends: list[RankEnd] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lines: dict[socket.socket, _RankConnection] = {}
        self._relays: list[OutputRelay] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._mark, self._marking = processes.new_job_mark(self.environ)
        self._has_cut = False
        self._told = self._ended_before = 0  # by which signal the job was told to stop, and after how many ends
        self._to_tell: list[int] = []
        self._looked_at = time.monotonic()

    def run(self, timeout_s: float | None) -> JobOutcome:
        """Start all, and return when all have ended, on every host. LaunchError where a command cannot be started."""
        began = time.monotonic()
        self._selector.register(self.listener.server, selectors.EVENT_READ, self._accept)
        why = ""
        try:
            with stop_signals_caught(self._to_tell.append):
                for command in self.commands:
                    self._start(command)
                why = self._watch(began, timeout_s)
            if why:
                why = f"{why}; {processes.describe_processes(processes.find_marked(self._mark))}"
        finally:
            self._end()
        return self._outcome(time.monotonic() - began, why)

    def _outcome(self, seconds: float, why: str) -> JobOutcome:
        codes = [process.returncode for process in self._processes]
        failed = first_failure(self.ends)
        if not why and has_stopped_on_notice(self.ends):
            return JobOutcome(REQUEUE, seconds, told=self._told)
        if self._told and any([*codes, failed, why]):
            return JobOutcome(128 + self._told, seconds, why=why, told=self._told)
        code = 124 if why else exit_code(codes, failed, may_restart=self.restarts > 0)
        return JobOutcome(code, seconds, failed if code and not why else None, why, self._told)

    def _start(self, command: Command) -> None:
        relayed = bool(command.prefix)
        output = subprocess.PIPE if relayed else self.stdout
        try:
            process = subprocess.Popen(
                command.argv,
                env={**command.environment(self.environ), **self._marking},
                stdin=subprocess.PIPE if command.stdin else None,
                stdout=output,
                stderr=subprocess.PIPE if relayed else None,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"the job could not be started ({error}): {shlex.join(redact_command(command.argv))}"
            ) from error
        self._processes.append(process)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it has ended, and says why itself
                process.stdin.write(f"{command.stdin}\n".encode())
        for source, target in ((process.stdout, self.stdout or 1), (process.stderr, 2)):
            if source is not None:
                relay = OutputRelay(os.dup(source.fileno()), [target], strip=command.prefix)
                source.close()
                self._relays.append(relay)
                self._selector.register(relay.source, selectors.EVENT_READ, lambda relay=relay: self._pump(relay))

    def _watch(self, began: float, timeout_s: float | None) -> str:
        """Until all commands have ended, or a failed job has had its time; says so where the job's time was up."""
        over_at = told_at = math.inf
        while any(process.poll() is None for process in self._processes):
            self._step(TICK_S)
            now = time.monotonic()
            if self._tell():
                told_at = min(told_at, now)
            if self._has_failed() or (self._told and self._have_all_ended()):
                over_at = min(over_at, now)
            if now > over_at + GRACE_S:
                return ""
            if now > told_at + NOTICE_S:
                return f"the job did not stop within {NOTICE_S:g} s of {signal.Signals(self._told).name}"
            if timeout_s is not None and now > began + timeout_s:
                return f"the job was not done after {round(timeout_s, 1):g} s"
        return ""

    def _has_failed(self) -> bool:
        """Whether nothing that is still to come can make the job succeed."""
        if any(process.poll() for process in self._processes):
            return True
        if self._told:
            return any(end.has_failed for end in self.ends[self._ended_before :])
        return any(end.has_failed and end.round >= self.restarts for end in self.ends)

    def _have_all_ended(self) -> bool:
        """Whether no rank that has reported is left."""
        return bool(self.ends) and not any(line.is_rank and not line.has_ended for line in self._lines.values())

    def _tell(self) -> bool:
        """Pass on what tells the job to stop, if anything has come."""
        notice = self.environ.get(NOTICE)
        if not self._told and notice and time.monotonic() > self._looked_at + LOOK_S:
            self._looked_at = time.monotonic()
            if os.path.exists(notice):
                self._to_tell.append(signal.SIGTERM)
        numbers = bytes(self._to_tell)
        self._to_tell.clear()
        for connection, line in self._lines.items() if numbers else ():
            if line.is_rank:
                with contextlib.suppress(OSError):
                    connection.sendall(numbers)
        if numbers and not self._told:
            self._told, self._ended_before = numbers[0], len(self.ends)
        return bool(numbers)

    def _end(self) -> None:
        """Nothing of the job is left, here or elsewhere: launchers are asked to end, and every rank's line is cut."""
        with signals_ignored():
            for process in self._processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)
            self._has_cut = True
            for connection in self._lines:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
            self._until(lambda: not self._has_ranks() and not self._running(), END_S)
            left = processes.wait_or_kill(self._mark, 1.0, self._running)
            if left and not any(process.poll() for process in self._processes):
                print(
                    f"dualdist run: what the job left behind was ended; {processes.describe_processes(left)}",
                    file=sys.stderr,
                )
            self._until(lambda: not any(relay.is_open for relay in self._relays), 1.0)
            for relay in self._relays:
                relay.close()
            for connection in self._lines:
                connection.close()
            self._selector.close()

    def _has_ranks(self) -> bool:
        return any(line.hello is not None for line in self._lines.values())

    def _running(self) -> list[int]:
        return [process.pid for process in self._processes if process.poll() is None]

    def _until(self, holds: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not holds() and time.monotonic() < deadline:
            self._step(TICK_S)

    def _step(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            key.data()
        self._drop_strangers(HELLO_S)

    def _pump(self, relay: OutputRelay) -> None:
        source = relay.source
        relay.pump()
        if not relay.is_open:
            self._selector.unregister(source)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.server.accept()
        except OSError:  # it has gone again, or we have no more files
            self._drop_strangers(0)
            return
        connection.setblocking(False)
        self._lines[connection] = _RankConnection(time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(connection))

    def _drop_strangers(self, age_s: float) -> None:
        """Nobody holds a line, or the job's end, by saying nothing for so long."""
        opened = time.monotonic() - age_s
        for connection in [each for each, line in self._lines.items() if not line.hello and line.opened_at <= opened]:
            self._drop(connection)

    def _hear(self, connection: socket.socket) -> None:
        line = self._lines.get(connection)
        if line is None:  # dropped a moment ago
            return
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(line.data) > control_channel.MAX_MESSAGE_BYTES:
            self._drop(connection)
            return
        *messages, line.data = (line.data + data).split(b"\n")
        for message in messages:
            if not self._understood(connection, line, message):
                self._drop(connection)
                return

    def _understood(self, connection: socket.socket, line: _RankConnection, message: bytes) -> bool:
        """A rank says who it is, then how it ended; whoever says anything else is no rank of ours."""
        if line.hello is None:
            line.hello = control_channel.loads(control_channel.RankHello, message)
            if line.hello is None or line.hello.token != self.listener.address.token or self._is_over(line.hello):
                line.hello = None
                return False
            with contextlib.suppress(OSError):
                connection.sendall(control_channel.WELCOME + bytes([self._told] * bool(self._told and line.is_rank)))
                control_channel.keep_alive(connection)
            return True
        if failing := control_channel.loads(control_channel.RankFailing, message):
            line.failing, line.failing_at = failing.traceback, time.monotonic()
            return True
        ended = control_channel.loads(control_channel.RankEnded, message)
        if ended is None:
            return False
        line.has_ended = True
        at_s = time.monotonic() - ended.age_s
        told = ended.was_terminated
        self.ends.append(
            RankEnd(line.hello.rank, line.hello.host, ended.code, at_s, line.hello.round, told, ended.text)
        )
        return True

    def _is_over(self, hello: control_channel.RankHello) -> bool:
        """Whether the job needs the rank no more: one that the launcher starts anew when all were told to stop."""
        return self._has_cut or (bool(self._told) and any(end.round < hello.round for end in self.ends))

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        line = self._lines.pop(connection)
        connection.close()
        hello, now = line.hello, time.monotonic()
        if hello is None or line.has_ended or hello.is_guard:
            return
        text = line.failing if now < line.failing_at + FAILING_S else ""
        if text or not self._has_cut:
            self.ends.append(RankEnd(hello.rank, hello.host, None, now, hello.round, text=text))
