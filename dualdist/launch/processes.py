"""The processes of a job on this host, found by a mark in their environment or by their ancestor, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from dualdist.utils.exit_codes import SIGNALS
from dualdist.utils.redaction import redact_command

# Marks every process of a job, by inheritance: launchers put ranks into sessions and process groups of their own.
JOB_MARK = "DUALDIST_JOB"
POLL_S = 0.05
# Seconds after which SIGKILL has ended a process, unless the kernel holds it, as where it waits for a disk.
KILL_TIMEOUT_S = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def new_job_mark(environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """A new mark, and the variable by which processes carry it beside those that are in `environ`."""
    mark = uuid.uuid4().hex
    return mark, {JOB_MARK: ":".join(filter(None, [environ.get(JOB_MARK), mark]))}


def find_marked(mark: str, *, below: int | None = None) -> list[int]:
    """The living processes that carry the mark, as far as the system tells: on Linux, all that are ours to read.

    Also those that descend from the process `below`: a program may give its children another environment.
    """
    found = [] if below is None else descendants(below)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return list(dict.fromkeys(found))


def descendants(pid: int) -> list[int]:
    """The living children of a process, and theirs; those that lost their parent only where it adopts orphans."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: the state, and the parent.
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


def adopt_orphans() -> None:
    """Whoever below this process loses its parent becomes its child, and not init's. Linux only; elsewhere nothing."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(child: int) -> None:
    """Adopted orphans that have ended are gone, as nobody else waits for them; `child` is left to who does."""
    if sys.platform == "linux":
        options = os.WEXITED | os.WNOHANG
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, options | os.WNOWAIT)) is not None and ended.si_pid != child:
                os.waitid(os.P_PID, ended.si_pid, options)


def send_signal(processes: Iterable[int], number: signal.Signals) -> None:
    """Signal those that are still there."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has changed its user
            os.kill(pid, number)


def terminate_and_wait(mark: str, grace_s: float, *, below: int | None = None) -> list[int]:
    """End all members of the mark: what does not go within `grace_s` is killed. Returns what had to be killed."""
    send_signal(find_marked(mark, below=below), signal.SIGTERM)
    return wait_or_kill(mark, grace_s, below=below)


def wait_or_kill(
    mark: str, grace_s: float, more: Callable[[], list[int]] = list, *, below: int | None = None
) -> list[int]:
    """Wait until the mark has no members; after `grace_s` kill them, and `more`. Returns whom it had to kill.

    What the kernel does not let go is named on standard error, and stays.
    """
    deadline = time.monotonic() + grace_s
    while (left := find_marked(mark, below=below)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    found, deadline = left, time.monotonic() + KILL_TIMEOUT_S
    while (here := [*more(), *left]) and time.monotonic() < deadline:
        send_signal(here, signal.SIGKILL)
        time.sleep(POLL_S)
        left = find_marked(mark, below=below)  # what they started in the meantime
    if here:
        print(
            f"dualdist run: SIGKILL did not end every process within {KILL_TIMEOUT_S:g} s; {describe_processes(here)}",
            file=sys.stderr,
        )
    return found


def describe_processes(processes: Iterable[int]) -> str:
    """Their numbers and command lines."""
    commands = []
    for pid in processes:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            line = " ".join(redact_command(word.decode(errors="replace") for word in words))
            commands.append(f"{pid} ({line.strip()[:120]})")
    return "still running: " + (", ".join(commands) or "nothing that could be seen")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever ends it. Linux only; elsewhere nothing."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that it can clean up; only the main thread can arrange that.

    A SIGHUP that is ignored, as under nohup, stays so.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled([number for number in TERMINATION_SIGNALS if signal.getsignal(number) != signal.SIG_IGN], end):
        yield


@contextlib.contextmanager
def stop_signals_caught(hear: Callable[[int], None]) -> Iterator[None]:
    """What tells a job to stop does not end the block: hear() is called with the signal's number, wherever that is."""
    with _handled(list(SIGNALS), lambda number, frame: hear(number)):
        yield


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """A signal that would end the block does so at its end: what it was starting is known by then, and can be ended."""
    came: list[int] = []
    numbers = [number for number in (signal.SIGINT, *TERMINATION_SIGNALS) if signal.getsignal(number) != signal.SIG_IGN]
    try:
        with _handled(numbers, lambda number, frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """No signal that asks the program to end interrupts the block: it is ending already."""
    with _handled([*TERMINATION_SIGNALS, *SIGNALS, signal.SIGINT], signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handled(numbers: list[signal.Signals], handler: signal._HANDLER) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in dict.fromkeys(numbers)]
    try:
        yield
    finally:
        for number, previous in before:
            signal.signal(number, previous)
