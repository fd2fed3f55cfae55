"""One rank of `dualdist run`: run the program as a child, relay its output, report its end, leave no process behind.

    python -m dualdist.launch.rank [--tag] [--terminal] [--log-dir=FOLDER] PROGRAM...

PROGRAM is what follows `python`. `dualdist exec` runs it in the child, which inherits the environment, stdin and open
files of this process, so that it finds its launcher as if it were its direct child. This process ends as the child
does, by the same exit code or signal.
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dualdist.environments import detect
from dualdist.errors import TopologyError
from dualdist.launch import failure, processes
from dualdist.launch.relay import PARTIAL_S, OutputRelay
from dualdist.utils import control_channel
from dualdist.utils.control_channel import CONTROL_VARIABLE, RankEnded, RankFailing, RankHello
from dualdist.utils.variables import OUTPUT, PLACE

# How often `dualdist run` has restarted the ranks, if it has.
RESTART = "DUALDIST_RUN_RESTART"
# Set if this launcher writes to the ranks' stderr, so that what a rank writes has to be framed.
FRAMES = "DUALDIST_RUN_FRAMES"
# The options of this program, which stand before the other words.
TAG, TERMINAL, LOG_DIR = "--tag", "--terminal", "--log-dir="
UNBUFFERED = "PYTHONUNBUFFERED"
SLURM_NODE = "SLURMD_NODENAME"
# Forwarded to the child; schedulers send some of them before they end a job.
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TERMINATION_SIGNALS = (*processes.TERMINATION_SIGNALS, signal.SIGINT)
# Seconds for the child to end after the job, and for its descendants to end after the child.
GRACE_S = 3.0
LEFT_S = 1.0
# Seconds after the child's end in which its descendants may still print to its pipes.
DRAIN_S = 0.5
# Output belongs to a traceback for so many seconds after its header.
FAILING_S = 1.0
# In the names of Open MPI's shared memory, the first in hexadecimal.
OPEN_MPI_JOB, OPEN_MPI_LOCAL_RANK = "OMPI_MCA_ess_base_jobid", "OMPI_COMM_WORLD_LOCAL_RANK"
# The daemons of Open MPI 4 and 5, and of MPICH and its derivatives.
MPI_DAEMONS = ("orted", "prted", "hydra_pmi_proxy")
PARENT_POLL_S = 1.0
TAIL = 1 << 16


def rank_argv(program: Sequence[str], has_tag: bool, folder: str | None, has_terminal: bool) -> tuple[str, ...]:
    """Return the arguments of `python` for a rank.

    With `has_tag` each line of its output begins with the rank. The output goes to a log in `folder`, if there is one.
    With `has_terminal` a terminal shows what the rank writes to stderr.
    """
    options = [TAG] if has_tag else []
    if folder is not None:
        options.append(f"{LOG_DIR}{folder}")
    if has_terminal:
        options.append(TERMINAL)
    return ("-m", "dualdist.launch.rank", *options, *program)


class RankProcess:
    """The child process, the relays of its output, and the events that end it."""

    def __init__(
        self, program: Sequence[str], options: Sequence[str], label: str, log: int | None, control: socket.socket | None
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._control = control
        self._was_terminated = False
        self._is_cut_off = False
        self._deadline: float | None = None
        self._traceback_at = 0.0
        self._parent = os.getppid()
        self._wakeup = self._catch_signals()
        processes.adopt_orphans()  # so that all that the program starts stays a descendant of this process
        stderr, stderr_writer = os.pipe()
        # To a terminal Python writes whole lines itself, as it ends them. To a pipe it writes each word of a print() if
        # unbuffered, else nothing until much later, which is lost if the rank is killed.
        is_whole = os.isatty(1) and not os.environ.get(UNBUFFERED)
        has_tag = TAG in options
        is_relayed = has_tag or log is not None or not is_whole
        stdout, stdout_writer = os.pipe() if is_relayed else (None, None)
        environ = {**({UNBUFFERED: "1"} if is_relayed else {}), **os.environ}
        if PLACE not in environ:  # in an elastic job the program asks for its rank there
            environ.pop(CONTROL_VARIABLE, None)
        has_frames = bool(environ.pop(FRAMES, "")) and control is not None
        environ |= {OUTPUT: "tagged"} if has_tag else {OUTPUT: "terminal"} if TERMINAL in options else {}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "dualdist", "exec", *program],
            env=environ,
            stdout=stdout_writer,
            stderr=stderr_writer,
            close_fds=False,  # ranks of MPICH and Slurm talk to their launcher by an inherited file
            preexec_fn=processes.die_with_parent,
        )
        tag = f"[{label}] " if has_tag else ""
        logs, has_console = [] if log is None else [log], log is None or has_tag
        framed = 2 if has_frames else None
        self._stderr = OutputRelay(
            stderr, [2, *logs] if has_console else logs, tag=tag, framed=framed, keep=TAIL, on_read=self._on_stderr
        )
        self._relays = [self._stderr]
        os.close(stderr_writer)
        if stdout is not None and stdout_writer is not None:
            self._relays.append(OutputRelay(stdout, [1, *logs] if has_console else logs, tag=tag))
            os.close(stdout_writer)
        for relay in self._relays:
            self._selector.register(relay.source, selectors.EVENT_READ, relay)
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: self._forward(self._wakeup.recv(64)))
        if control is not None:
            self._selector.register(control, selectors.EVENT_READ, self._on_control)
        with contextlib.suppress(OSError, AttributeError):
            self._selector.register(os.pidfd_open(self._parent), selectors.EVENT_READ, self._on_orphaned)

    def _catch_signals(self) -> socket.socket:
        """Return a socket that gets the number of each caught signal."""
        self._wakeup_writer, reader = socket.socketpair()
        for end in (self._wakeup_writer, reader):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        for caught in (*FORWARDED_SIGNALS, signal.SIGCHLD):
            if signal.getsignal(caught) != signal.SIG_IGN or caught == signal.SIGCHLD:  # nohup's SIGHUP stays ignored
                signal.signal(caught, lambda _number, _frame: None)
        return reader

    def run(self) -> int:
        """Return the child's exit code, or minus the number of its signal, when it and its descendants have ended."""
        while self._child.poll() is None:
            self._step(PARENT_POLL_S if self._deadline is None else self._deadline - time.monotonic())
        drained = time.monotonic() + DRAIN_S
        while any(relay.is_open for relay in self._relays) and (wait_s := drained - time.monotonic()) > 0:
            self._step(wait_s)
        for relay in self._relays:
            if relay.is_open:
                self._selector.unregister(relay.source)
            relay.close()
        code = self._child.returncode
        age_s = time.monotonic() - self._traceback_at if self._traceback_at else 0.0
        _report(self._control, RankEnded(code, age_s, self._was_terminated, self._traceback() if code else ""))
        if self._descendants():
            time.sleep(0 if self._was_terminated else LEFT_S)
            processes.terminate_and_wait(self._descendants, LEFT_S)
        if self._is_cut_off:
            _kill_mpi_daemon(self._parent)
        _remove_mpi_memory(os.environ)
        return code

    def _descendants(self) -> list[int]:
        return processes.descendants(os.getpid())

    def _step(self, wait_s: float) -> None:
        if any(relay.has_partial_line for relay in self._relays):
            wait_s = min(wait_s, PARTIAL_S)
        for key, _ in self._selector.select(max(0.0, wait_s)):
            if isinstance(key.data, OutputRelay):
                key.data.pump_into(self._selector)
            else:
                key.data()
        for relay in self._relays:
            relay.flush_partial_line()
        processes.reap_orphans(self._child.pid)
        if os.getppid() != self._parent:
            self._on_orphaned()
        if self._deadline is not None and time.monotonic() >= self._deadline and self._child.poll() is None:
            processes.send_signal([self._child.pid, *self._descendants()], signal.SIGKILL)
            self._deadline = time.monotonic() + GRACE_S

    def _on_stderr(self, output: bytes) -> None:
        """Report a traceback at once, before it is shown: MPI_Abort may leave this process no time afterwards."""
        now = time.monotonic()
        if b"Traceback" in output:
            self._traceback_at = now
        if now < self._traceback_at + FAILING_S:
            _report(self._control, RankFailing(self._traceback()))

    def _forward(self, numbers: bytes) -> None:
        """Send signals to the child; each byte is a signal's number."""
        for number in numbers:
            if number in FORWARDED_SIGNALS:
                self._was_terminated = self._was_terminated or number in TERMINATION_SIGNALS
                processes.send_signal([self._child.pid], signal.Signals(number))

    def _on_control(self) -> None:
        """Forward the signals that `dualdist run` sends; end the child when it closes the connection."""
        assert self._control is not None
        try:
            if numbers := self._control.recv(64):
                self._forward(numbers)
                return
        except BlockingIOError:
            return
        except OSError:  # not closed, but its host is silent
            self._is_cut_off = True
        self._selector.unregister(self._control)
        self._stop()

    def _on_orphaned(self) -> None:
        """End the child when the launcher is gone."""
        for key in list(self._selector.get_map().values()):
            if key.data == self._on_orphaned:
                self._selector.unregister(key.fileobj)
        self._parent = os.getppid()
        self._stop()

    def _stop(self) -> None:
        if self._deadline is None:
            self._was_terminated = True
            self._deadline = time.monotonic() + GRACE_S
            processes.send_signal([self._child.pid], signal.SIGTERM)

    def _traceback(self) -> str:
        return failure.extract_traceback(self._stderr.tail.decode(errors="replace"))


def main() -> int:
    first = next((n for n, word in enumerate(sys.argv[1:], 1) if not word.startswith("--")), len(sys.argv))
    options, program = sys.argv[1:first], sys.argv[first:]
    folder = next((option.removeprefix(LOG_DIR) for option in options if option.startswith(LOG_DIR)), None)
    for closed in (1, 2):  # by a daemon: a pipe must not get its number
        try:
            os.fstat(closed)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), closed)
    host = os.environ.get(SLURM_NODE) or socket.gethostname().split(".")[0]
    rank, label = None, "?"
    with contextlib.suppress(TopologyError):  # dd.init() will raise it
        topology = detect(os.environ)
        rank = topology.rank
        label = f"{rank} {host}" if topology.num_nodes > 1 else str(rank)
    control = None
    if CONTROL_VARIABLE in os.environ:
        try:
            address = control_channel.ControlAddress.loads(os.environ[CONTROL_VARIABLE])
            control = control_channel.connect(address, RankHello(address.token, rank, host))
        except ValueError:
            print(f"{CONTROL_VARIABLE} was not set by this dualdist run: unset it", file=sys.stderr)
            return 1
        except control_channel.ControlChannelError as error:
            print(f"dualdist run: rank {rank} on {host} cannot reach dualdist run ({error})", file=sys.stderr)
            if error.is_gone:
                return 1
    try:
        log = None if folder is None else _open_log(Path(folder), rank)
    except OSError as error:
        message = f"rank {rank} cannot write its log ({error}): choose another folder by --log-dir"
        print(message, file=sys.stderr)
        _report(control, RankEnded(1, 0.0, False, message))
        return 1
    return _exit_like(RankProcess(program, options, label, log, control).run())


def _kill_mpi_daemon(pid: int) -> None:
    """Kill the parent if it is MPI's daemon, which would wait for its mpirun until TCP gives up, for minutes."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() in MPI_DAEMONS:
            os.kill(pid, signal.SIGKILL)


def _remove_mpi_memory(environ: Mapping[str, str]) -> None:
    """Remove the shared memory of this rank, which has ended; Open MPI leaves that to mpirun, which may be killed."""
    job, local_rank = environ.get(OPEN_MPI_JOB, ""), environ.get(OPEN_MPI_LOCAL_RANK, "")
    if job.isdecimal() and local_rank.isdecimal():
        for path in Path("/dev/shm").glob(f"*_segment.*.{os.geteuid()}.{int(job):x}.{int(local_rank)}"):
            with contextlib.suppress(OSError):
                path.unlink()


def _report(control: socket.socket | None, message: RankEnded | RankFailing) -> None:
    """Send a message to `dualdist run`, if there is one."""
    if control is not None:
        with contextlib.suppress(OSError):
            control.setblocking(True)
            control.sendall(control_channel.dumps(message))
            control.setblocking(False)


def _open_log(folder: Path, rank: int | None) -> int:
    """Open the log of a rank; restarted ranks append to it, as do those of elastic jobs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{'?' if rank is None else rank}.log"
    flags = (
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if os.environ.get(RESTART) or os.environ.get(PLACE) else os.O_TRUNC)
    )
    return os.open(path, flags, 0o666)


def _exit_like(code: int) -> int:
    """Return the child's exit code; if a signal ended the child, end this process by the same one."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        return 128 - code
    return code


if __name__ == "__main__":
    sys.exit(main())
