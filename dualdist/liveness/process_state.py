"""Process state: what another rank's process on this host is doing, from the kernel, and the stack of a thread here."""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from dualdist.errors import RankLostError
from dualdist.utils.deadline import call_within

# File, line number and function, as in a traceback; the most recent call last.
Line = tuple[str, int, str]

# Prefix of the names of dualdist's threads.
OUR_THREADS = "dualdist-"
OUR_FOLDER = f"{Path(__file__).parents[1]}/"
# Frames between the interpreter and the program, where a launcher starts it.
STARTERS = ("<frozen ", f"{Path(threading.__file__).parent}/multiprocessing/", OUR_FOLDER)
SHOWN = 12
# Seconds in which the source must be read: a hanging disk may be why a rank is late.
READ_S = 1.0


def program_thread(preferred: int | None = None) -> int:
    """Return the preferred thread's ident if it is the program's and still runs, else the main thread's."""
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(OUR_THREADS)}
    if preferred is not None and preferred not in ours and preferred in sys._current_frames():
        return preferred
    main = threading.main_thread().ident
    assert main is not None, "the main thread is running"
    return main


def thread_stack(thread: int, *, is_in_operation: bool) -> list[Line]:
    """Return the thread's stack, its last SHOWN lines; in an operation, down to the call of the operation."""
    frame = sys._current_frames().get(thread)
    calls = [] if frame is None else list(traceback.walk_stack(frame))[::-1]  # reads no source: see READ_S
    lines = [(called.f_code.co_filename, number, called.f_code.co_name) for called, number in calls]
    return trim_stack(lines, is_in_operation=is_in_operation)


def trim_stack(lines: Sequence[Line], *, is_in_operation: bool) -> list[Line]:
    """Return the program's lines, without those of the launcher that started it."""
    first = next((n for n, (file, _, _) in enumerate(lines) if not file.startswith(STARTERS)), 0)
    kept = list(lines[first:])
    if is_in_operation:
        kept = kept[: next((n for n, (file, _, _) in enumerate(kept) if file.startswith(OUR_FOLDER)), None)]
    return kept[-SHOWN:]


def format_stack(lines: Sequence[Line]) -> str:
    """Return the lines as in a traceback, with the source if this host has the files."""

    def read() -> list[str]:
        return [linecache.getline(file, number).strip() for file, number, _ in lines]

    try:
        sources = call_within(READ_S, read, lambda: RankLostError("the disk does not answer"))
    except RankLostError:
        sources = [""] * len(lines)
    return "".join(
        f'\n    File "{file}", line {number}, in {name}' + (f"\n      {source}" if source else "")
        for (file, number, name), source in zip(lines, sources, strict=True)
    )


ENDED = "has exited"
STATES = {
    "T": "is stopped by a signal, so its stack is unavailable",
    "t": "is held by a debugger",
    "D": "waits for a disk or another device",
    "Z": ENDED,
    "X": ENDED,
}
# States in which a process makes no progress.
NOT_RUNNING = (STATES["T"], STATES["t"], ENDED)
BUSY = "is running but does not answer, as when C code holds the GIL (py-spy dump --pid shows its stack)"


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a rank's process to other processes of its host."""

    pid: int
    started: int  # in the kernel's ticks; differs for a later process with the same pid
    namespace: str  # the pid namespace

    def dumps(self) -> str:
        return json.dumps(astuple(self))

    @staticmethod
    def loads(text: str) -> ProcessIdentity:
        return ProcessIdentity(*json.loads(text))

    def state(self) -> str:
        """Describe what the process is doing; "" if this process cannot see it."""
        if not self.namespace or self.namespace != _namespace("self"):
            return ""
        stat = _read_stat(self.pid)
        if stat is None or stat[1] != self.started:
            return ENDED
        return STATES.get(stat[0], BUSY)


def current_process() -> ProcessIdentity:
    return identify(os.getpid())


def identify(pid: int) -> ProcessIdentity:
    """Return the process of this pid namespace that has the pid now."""
    stat = _read_stat(pid)
    return ProcessIdentity(pid, stat[1] if stat else 0, _namespace("self"))


def is_main_thread_asleep() -> bool:
    """Return True unless this process's main thread runs, or is ready to."""
    stat = _read_stat(os.getpid())
    return stat is not None and stat[0] == "S"


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Return state and start time of a process (proc(5): fields 3 and 22 of stat), None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def _namespace(process: str) -> str:
    try:
        return os.readlink(f"/proc/{process}/ns/pid")
    except OSError:
        return ""
