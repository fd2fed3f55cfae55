"""Processes of a job on this host, found by a mark in their environment or by an ancestor; signal handlers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType

from dualdist.utils.redaction import redact_command

# Inherited by every process of a job: launchers put ranks into sessions and process groups of their own.
JOB_MARK = "DUALDIST_JOB"
POLL_S = 0.05
# SIGKILL ends a process within so many seconds, unless it is in uninterruptible sleep.
KILL_TIMEOUT_S = 10.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


# Returns the ids of some living processes.
Finder = Callable[[], list[int]]


def mark_job(environ: Mapping[str, str]) -> tuple[Finder, dict[str, str]]:
    """Return a function that finds processes with a new mark, and the variable that gives them the mark.

    The variable keeps the marks in `environ`. On a system without /proc the function finds nothing.
    """
    mark = uuid.uuid4().hex
    return partial(_find_marked, mark), {JOB_MARK: ":".join(filter(None, [environ.get(JOB_MARK), mark]))}


def _find_marked(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def descendants(pid: int) -> list[int]:
    """Return the living descendants of a process; orphans among them only if it adopts orphans."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent ...": the name may contain anything.
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found


def adopt_orphans() -> None:
    """Make this process the parent of descendants that lose theirs."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(child: int) -> None:
    """Reap exited adopted children; not `child`, for which the caller waits."""
    options = os.WEXITED | os.WNOHANG
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, options | os.WNOWAIT)) is not None and ended.si_pid != child:
            os.waitid(os.P_PID, ended.si_pid, options)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def send_signal(processes: Iterable[int], number: signal.Signals) -> None:
    """Signal the processes that still exist."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has changed its user
            os.kill(pid, number)


def terminate_and_wait(find: Finder, grace_s: float) -> list[int]:
    """Send SIGTERM to the processes, and wait_or_kill() them."""
    send_signal(find(), signal.SIGTERM)
    return wait_or_kill(find, grace_s)


def wait_or_kill(find: Finder, grace_s: float, more: Finder = list) -> list[int]:
    """Wait until `find` finds no process; after `grace_s` kill those that are left, and those that `more` returns.

    Returns the processes that were left after `grace_s`. Those that SIGKILL does not end are reported on stderr.
    """
    deadline = time.monotonic() + grace_s
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    found, deadline = left, time.monotonic() + KILL_TIMEOUT_S
    while (alive := [*more(), *left]) and time.monotonic() < deadline:
        send_signal(alive, signal.SIGKILL)
        time.sleep(POLL_S)
        left = find()  # those that they started in the meantime
    if alive:
        message = f"SIGKILL did not end every process within {KILL_TIMEOUT_S:g} s; {describe_processes(alive)}"
        print(f"dualdist run: {message}", file=sys.stderr)
    return found


def describe_processes(processes: Iterable[int]) -> str:
    """Return "still running: ", and the ids and command lines of the processes."""
    commands = []
    for pid in processes:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            line = " ".join(redact_command(word.decode(errors="replace") for word in words))
            commands.append(f"{pid} ({line.strip()[:120]})")
    return "still running: " + (", ".join(commands) or "no visible process")


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit in the block, as Ctrl-C raises KeyboardInterrupt. Main thread only.

    An ignored SIGHUP, as under nohup, stays ignored.
    """

    def raise_exit(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with signals_handled(_not_ignored(TERMINATION_SIGNALS), raise_exit):
        yield


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer signals that end the program to the end of the block, when the process that it starts can be ended, too."""
    received: list[int] = []
    try:
        with signals_handled(
            _not_ignored((signal.SIGINT, *TERMINATION_SIGNALS)), lambda number, frame: received.append(number)
        ):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


@contextlib.contextmanager
def signals_handled(numbers: Iterable[signal.Signals], handler: signal._HANDLER) -> Iterator[None]:
    """Handle signals so in the block; main thread only, elsewhere nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in dict.fromkeys(numbers)]
    try:
        yield
    finally:
        for number, previous in before:
            signal.signal(number, previous)


def _not_ignored(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
