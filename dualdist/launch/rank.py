"""One rank of `dualdist run`: the program as a child, its output in order, its end told, nothing left behind.

    python -m dualdist.launch.rank [--tag] [--tag-host] [--log-dir=FOLDER] PROGRAM...

PROGRAM is what follows `python`. The child has this process' environment, stdin and inherited files, so that it finds
its launcher as if this process were not there; this one ends as the child does, by the same code or signal.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualdist.environments import detect
from dualdist.errors import TopologyError
from dualdist.launch import control_channel, failure, processes
from dualdist.launch.relay import OutputRelay

# Set by launchers that restart ranks, and by `dualdist run` where it does.
ROUNDS = ("TORCHELASTIC_RESTART_COUNT", "DUALDIST_RUN_ROUND")
SLURM_NODE = "SLURMD_NODENAME"
# Passed on to the child. What a scheduler sends before it ends a job is among them.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Seconds that a child gets when the job has ended, and what it left behind when it has.
GRACE_S = 3.0
LEFT_S = 1.0
# Seconds after the child's end in which others, that it started, may still print to its pipes.
DRAIN_S = 0.5
# Seconds in which what follows the head of a traceback may belong to it.
FAILING_S = 1.0
# Of Open MPI 4 and 5, and of MPICH and its kin.
DAEMONS = ("orted", "prted", "hydra_pmi_proxy")
PARENT_POLL_S = 1.0
TAIL = 1 << 16


@dataclass(frozen=True)
class RankSettings:
    """The program, and how its output is shown: `has_tag` marks lines with the rank, `has_host` also with the host."""

    program: tuple[str, ...]
    has_tag: bool = False
    has_host: bool = False
    folder: str | None = None


def rank_argv(settings: RankSettings) -> tuple[str, ...]:
    """Return the arguments of `python` for these settings; parse() is the inverse."""
    tag = ("--tag-host",) if settings.has_host else ("--tag",)
    folder = (f"--log-dir={settings.folder}",) if settings.folder is not None else ()
    return ("-m", "dualdist.launch.rank", *(tag if settings.has_tag else ()), *folder, *settings.program)


def parse_arguments(arguments: Sequence[str]) -> RankSettings:
    """The settings of a command line; the program begins with the first word that is none of ours."""
    left, has_tag, has_host, folder = list(arguments), False, False, None
    while left and left[0].startswith("--"):
        option = left.pop(0)
        has_tag = has_tag or option in ("--tag", "--tag-host")
        has_host = has_host or option == "--tag-host"
        if option.startswith("--log-dir="):
            folder = option.partition("=")[2]
    return RankSettings(tuple(left), has_tag, has_host, folder)


class RankProcess:
    """The child and all that is watched for its sake."""

    def __init__(
        self, settings: RankSettings, number: int | None, host: str, log: int | None, line: socket.socket | None
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._line = line
        self._told = False  # to end
        self._is_cut_off = False
        self._deadline: float | None = None
        self._traceback_at = 0.0
        self._parent = os.getppid()
        waker, wakened = socket.socketpair()
        for end in (waker, wakened):
            end.setblocking(False)
        self._sockets = (waker, wakened)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for caught in (*PASSED_ON, signal.SIGCHLD):
            if signal.getsignal(caught) != signal.SIG_IGN or caught == signal.SIGCHLD:  # nohup's stays ignored
                signal.signal(caught, lambda _number, _frame: None)  # the wakeup carries its number
        self._mark, marking = processes.new_job_mark(os.environ)
        processes.adopt_orphans()
        error, error_writer = os.pipe()
        output, output_writer = os.pipe() if settings.has_tag or settings.folder is not None else (None, None)
        self._child = subprocess.Popen(
            [sys.executable, *settings.program],
            env={
                name: value
                for name, value in {**os.environ, **marking}.items()
                if name != control_channel.CONTROL_VARIABLE
            },
            stdout=output_writer,
            stderr=error_writer,
            close_fds=False,  # MPICH's and Slurm's ranks talk to their launcher by a file that they inherit
            preexec_fn=processes.die_with_parent,
        )
        name = _name(number)
        tag = (f"[{name} {host}] " if settings.has_host else f"[{name}] ") if settings.has_tag else ""
        has_console = log is None or settings.has_tag
        os.close(error_writer)
        self._error = self._relay(error, 2 if has_console else None, log, tag, self._on_error_output)
        self._relays = [self._error]
        if output is not None and output_writer is not None:
            os.close(output_writer)
            self._relays.append(self._relay(output, 1 if has_console else None, log, tag, lambda _: None))
        self._selector.register(wakened, selectors.EVENT_READ, self._on_signal)
        if line is not None:
            self._selector.register(line, selectors.EVENT_READ, self._on_line)
        with contextlib.suppress(OSError, AttributeError):
            self._selector.register(os.pidfd_open(self._parent), selectors.EVENT_READ, self._on_orphaned)

    def run(self) -> int:
        """The child's exit code, or minus the number of its signal, when it and what it started have ended."""
        while self._child.poll() is None:
            self._step(PARENT_POLL_S if self._deadline is None else self._deadline - time.monotonic())
        drained = time.monotonic() + DRAIN_S
        while any(relay.is_open for relay in self._relays) and (wait_s := drained - time.monotonic()) > 0:
            self._step(wait_s)
        for relay in self._relays:
            self._forget(relay)
            relay.close()
        self._tell_end()
        if self._members():
            time.sleep(0 if self._told else LEFT_S)
            processes.terminate_and_wait(self._mark, LEFT_S, below=os.getpid())
        if self._is_cut_off:
            _end_daemon(self._parent)
        return self._child.returncode

    def _members(self) -> list[int]:
        """Return the process ids of the child and of all that it started."""
        return processes.find_marked(self._mark, below=os.getpid())

    def _relay(
        self, source: int, console: int | None, log: int | None, tag: str, on_read: Callable[[bytes], object]
    ) -> OutputRelay:
        """A source goes to the console, where each line says whose it is, and to the log, where that is known."""
        targets = [target for target in (console, log) if target is not None]
        relay = OutputRelay(source, targets, tag=tag, keep=TAIL, on_read=on_read)
        self._selector.register(relay.source, selectors.EVENT_READ, relay)
        return relay

    def _step(self, wait_s: float) -> None:
        for key, _ in self._selector.select(max(0.0, wait_s)):
            if isinstance(key.data, OutputRelay):
                self._pump(key.data)
            else:
                key.data()
        processes.reap_orphans(self._child.pid)
        if os.getppid() != self._parent:
            self._on_orphaned()
        if self._deadline is not None and time.monotonic() >= self._deadline and self._child.poll() is None:
            processes.send_signal([self._child.pid, *self._members()], signal.SIGKILL)
            self._deadline = time.monotonic() + GRACE_S

    def _pump(self, relay: OutputRelay) -> None:
        source = relay.source
        relay.pump()
        if not relay.is_open:
            self._selector.unregister(source)

    def _on_error_output(self, output: bytes) -> None:
        """Send a traceback at once, before it is shown: MPI_Abort may leave this process no time afterwards."""
        now = time.monotonic()
        if b"Traceback" in output:
            self._traceback_at = now
        if now < self._traceback_at + FAILING_S:
            _tell(self._line, control_channel.RankFailing(self._reason()))

    def _forget(self, relay: OutputRelay) -> None:
        if relay.is_open:
            self._selector.unregister(relay.source)

    def _on_signal(self) -> None:
        self._pass_on(self._sockets[1].recv(64))

    def _pass_on(self, numbers: bytes) -> None:
        """Each byte is a signal's number."""
        for number in numbers:
            if number in PASSED_ON:
                self._told = self._told or number in ENDING
                processes.send_signal([self._child.pid], signal.Signals(number))

    def _on_line(self) -> None:
        """Pass on the signals that `dualdist run` sends; end the child when it closes the connection."""
        assert self._line is not None
        try:
            if numbers := self._line.recv(64):
                self._pass_on(numbers)
                return
        except BlockingIOError:
            return
        except OSError:  # nobody has closed it: the other host is silent
            self._is_cut_off = True
        self._selector.unregister(self._line)
        self._stop()

    def _on_orphaned(self) -> None:
        """The launcher has gone."""
        for key in list(self._selector.get_map().values()):
            if key.data == self._on_orphaned:
                self._selector.unregister(key.fileobj)
        self._parent = os.getppid()
        self._stop()

    def _stop(self) -> None:
        if self._deadline is None:
            self._told = True
            self._deadline = time.monotonic() + GRACE_S
            processes.send_signal([self._child.pid], signal.SIGTERM)

    def _tell_end(self) -> None:
        text = self._reason() if self._child.returncode else ""
        age_s = time.monotonic() - self._traceback_at if self._traceback_at else 0.0
        _tell(self._line, control_channel.RankEnded(self._child.returncode, age_s, self._told, text))

    def _reason(self) -> str:
        return failure.extract_traceback(self._error.tail.decode(errors="replace"))


def main() -> int:
    settings = parse_arguments(sys.argv[1:])
    host = os.environ.get(SLURM_NODE) or socket.gethostname().split(".")[0]
    number: int | None = None
    with contextlib.suppress(TopologyError):  # which the program will tell
        number = detect(os.environ).rank
    line = None
    if control_channel.CONTROL_VARIABLE in os.environ:
        try:
            address = control_channel.ControlAddress.loads(os.environ[control_channel.CONTROL_VARIABLE])
            line = control_channel.connect(address, control_channel.RankHello(address.token, number, host, _round()))
        except ValueError:
            print(
                f"{control_channel.CONTROL_VARIABLE} is not what dualdist run writes: unset what is left over",
                file=sys.stderr,
            )
            return 1
        except control_channel.ControlChannelError as error:
            print(f"dualdist run: rank {number} on {host} cannot reach dualdist run ({error})", file=sys.stderr)
            if error.is_gone:
                return 1
    try:
        log = None if settings.folder is None else _opened(Path(settings.folder), _name(number))
    except OSError as error:
        why = f"rank {_name(number)} cannot write its log ({error}): name another folder by --log-dir"
        print(why, file=sys.stderr)
        _tell(line, control_channel.RankEnded(1, 0.0, False, why))
        return 1
    return _ended_like(RankProcess(settings, number, host, log, line).run())


def _end_daemon(pid: int) -> None:
    """MPI's daemon, if that is the parent, ends: it would wait for its mpirun until TCP gives up, for minutes."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() in DAEMONS:
            os.kill(pid, signal.SIGKILL)


def _tell(line: socket.socket | None, message: control_channel.RankEnded | control_channel.RankFailing) -> None:
    """`dualdist run` knows, where it listens."""
    if line is not None:
        with contextlib.suppress(OSError):
            line.setblocking(True)
            line.sendall(control_channel.dumps(message))
            line.setblocking(False)


def _name(number: int | None) -> str:
    return "?" if number is None else str(number)


def _round() -> int:
    counts = [os.environ.get(name, "") for name in ROUNDS]
    return sum(int(count) for count in counts if count.isdecimal())


def _opened(folder: Path, name: str) -> int:
    """The log of a rank, new in the first round and continued in later ones."""
    folder.mkdir(parents=True, exist_ok=True)
    mode = os.O_TRUNC if _round() == 0 else 0
    return os.open(folder / f"rank-{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | mode, 0o666)


def _ended_like(code: int) -> int:
    """The exit code of the child; where a signal ended it, the same one ends this process."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        return 128 - code
    return code


if __name__ == "__main__":
    sys.exit(main())
