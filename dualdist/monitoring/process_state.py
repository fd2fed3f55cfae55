"""What the process of another rank of this host does, where it does not answer: by the kernel, and its Python stack.

Note [dumps]: whose interpreter is locked, by C code that never lets go of it, answers nothing. But a signal handler
in C runs: faulthandler writes the stacks of all threads to a file in memory, which other processes of the same user
read under /proc. A process that is stopped runs no handler, so that its stack cannot be had.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from types import FrameType

from dualdist.errors import RankLostError
from dualdist.utils.deadline import call_within

# A file, a line's number and the function in which it is, as in a traceback, the most recent call last.
Line = tuple[str, int, str]

# Threads of ours have names that begin so.
OUR_THREADS = "dualdist-"
OUR_FOLDER = f"{Path(__file__).parents[1]}/"
# What stands between the interpreter and the program where a launcher starts it.
STARTERS = ("<frozen ", f"{Path(threading.__file__).parent}/multiprocessing/", OUR_FOLDER)
SHOWN = 12
# Seconds that the source may take to read: where a disk hangs, ranks are late.
READ_S = 1.0


def program_thread(preferred: int | None = None) -> int:
    """The number of the preferred thread, if it is one of the program's and still runs, or else of the main one."""
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(OUR_THREADS)}
    if preferred is not None and preferred not in ours and preferred in sys._current_frames():
        return preferred
    main = threading.main_thread().ident
    assert main is not None, "it has been started"
    return main


def thread_stack(thread: int, *, is_in_operation: bool) -> list[Line]:
    """The calls in which the thread is now, the last SHOWN of them; of an operation, up to where it was called."""
    frame = sys._current_frames().get(thread)
    return [] if frame is None else trim_stack(_lines(frame), is_in_operation=is_in_operation)


def _lines(frame: FrameType) -> list[Line]:
    """Without reading the source: a disk that hangs may be the reason for the question."""
    calls = list(traceback.walk_stack(frame))[::-1]
    return [(called.f_code.co_filename, number, called.f_code.co_name) for called, number in calls]


def trim_stack(lines: Sequence[Line], *, is_in_operation: bool) -> list[Line]:
    """The program's own lines, which begin behind those of what started it."""
    first = next((n for n, (file, _, _) in enumerate(lines) if not file.startswith(STARTERS)), 0)
    own = list(lines[first:])
    if is_in_operation:
        own = own[: next((n for n, (file, _, _) in enumerate(own) if file.startswith(OUR_FOLDER)), None)]
    return own[-SHOWN:]


def format_stack(lines: Sequence[Line]) -> str:
    """As in a traceback, with the source where this host has the files."""

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


# Real-time signals have no meaning of their own; where the program has given this one a meaning, it keeps it.
DUMP_BY = "SIGRTMIN"
DUMP_OFFSET = 11
NO_DUMP = -1
# Seconds in which a dump begins, and after whose last byte it is over.
BEGIN_S = 0.5
QUIET_S = 0.05
ENDED = "has ended"
STATES = {
    "T": "is stopped by a signal, so that its stack cannot be had",
    "t": "is held by a debugger",
    "D": "waits for a disk or another device",
    "Z": ENDED,
    "X": ENDED,
}
# Of a process that will not come by itself.
NOT_RUNNING = (STATES["T"], STATES["t"], ENDED)
BUSY = "runs but does not answer, as where C code keeps Python's lock"
THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*:$")
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class ProcessIdentity:
    """A rank's process, as others on its host find it again."""

    pid: int
    started: int  # at which of the kernel's ticks: another process that gets the number later differs
    namespace: str  # in which the number counts
    main_thread: int
    dump: int  # the file there to which it writes its stacks, by its number; NO_DUMP where it does not

    def dumps(self) -> str:
        return json.dumps(astuple(self))

    @staticmethod
    def loads(text: str) -> ProcessIdentity:
        return ProcessIdentity(*json.loads(text))

    def state(self) -> str:
        """What it does, in words; nothing where that cannot be told from here."""
        if not self.namespace or self.namespace != _namespace("self"):
            return ""
        seen = _seen(self.pid)
        if seen is None or seen[1] != self.started:
            return ENDED
        return STATES.get(seen[0], BUSY)

    def stack(self) -> list[Line]:
        """Where its main thread is in the program: Note [dumps]. Nothing where that cannot be had."""
        if self.dump == NO_DUMP or self.state() != BUSY:
            return []
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/fd/{self.dump}", "rb") as file:
            start = file.seek(0, os.SEEK_END)
            handle = os.pidfd_open(self.pid)
            try:
                if self.state() == BUSY:  # of the process that the handle is for
                    signal.pidfd_send_signal(handle, _signal())
            finally:
                os.close(handle)
            return parse_dump(_written(file.fileno(), start), self.main_thread)
        return []


def current_process() -> ProcessIdentity:
    """This process, which writes dumps from now on where it can."""
    return _own(os.getpid())  # a child that was forked is another one


@functools.cache
def _own(pid: int) -> ProcessIdentity:
    seen, main = _seen(pid), threading.main_thread().ident
    return ProcessIdentity(pid, seen[1] if seen else 0, _namespace("self"), main or 0, _dump())


def _dump() -> int:
    """The number of a new file to which the stacks go."""
    if sys.platform != "linux" or signal.getsignal(_signal()) is not signal.SIG_DFL:
        return NO_DUMP
    try:
        file = os.memfd_create("dualdist-stacks")
        faulthandler.register(_signal(), file=file, all_threads=True, chain=False)
    except (OSError, RuntimeError):
        return NO_DUMP
    return file


def _signal() -> int:
    return int(getattr(signal, DUMP_BY)) + DUMP_OFFSET


def _seen(pid: int) -> tuple[str, int] | None:
    """The state of a process, and when it started (proc(5): fields 3 and 22 of stat); None where there is none."""
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


def _written(file: int, start: int) -> str:
    """What is written from there on, until nothing more comes."""
    size, until = start, time.monotonic() + BEGIN_S
    while time.monotonic() < until:
        time.sleep(QUIET_S / 5)
        now = os.fstat(file).st_size
        if now != size:
            size, until = now, time.monotonic() + QUIET_S
    return os.pread(file, size - start, start).decode(errors="replace")


def parse_dump(dump: str, thread: int) -> list[Line]:
    """The stack of a thread in what faulthandler has written, the most recent call last."""
    lines: list[Line] = []
    is_wanted = False
    for line in dump.splitlines():
        if found := THREAD.match(line):
            if is_wanted:
                break
            is_wanted = int(found[1], 16) == thread
        elif is_wanted and (found := FRAME.match(line)):
            lines.append((found[1], int(found[2]), found[3]))
    return lines[::-1]
