"""Process state: what another rank's process on this host is doing, from the kernel, and its Python stack.

Note [dumps]: a process whose GIL is held by C code answers nothing. But a signal handler in C runs: faulthandler
writes the stacks of all threads to a memfd, which other processes of the same user read under /proc. A stopped process
runs no handler, so its stack is unavailable.
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
    return [] if frame is None else trim_stack(_lines(frame), is_in_operation=is_in_operation)


def _lines(frame: FrameType) -> list[Line]:
    """Return the lines of a stack without reading the source: see READ_S."""
    calls = list(traceback.walk_stack(frame))[::-1]
    return [(called.f_code.co_filename, number, called.f_code.co_name) for called, number in calls]


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


# Real-time signals have no default meaning; if the program handles this one, it is left alone.
DUMP_OFFSET = 11  # from SIGRTMIN
NO_DUMP = -1
# Seconds in which a dump begins, and without further output after which it is complete.
BEGIN_S = 0.5
QUIET_S = 0.05
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
BUSY = "is running but does not answer, as when C code holds the GIL"
THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*:$")
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a rank's process to other processes of its host."""

    pid: int
    started: int  # in the kernel's ticks; differs for a later process with the same pid
    namespace: str  # of the pid
    main_thread: int
    dump: int  # its file descriptor to which it dumps stacks, or NO_DUMP

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

    def stack(self) -> list[Line]:
        """Return its main thread's stack, [] if unavailable: Note [dumps]."""
        if self.dump == NO_DUMP or self.state() != BUSY:
            return []
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/fd/{self.dump}", "rb") as file:
            start = file.seek(0, os.SEEK_END)
            handle = os.pidfd_open(self.pid)
            try:
                if self.state() == BUSY:  # the process of the handle
                    signal.pidfd_send_signal(handle, _dump_signal())
            finally:
                os.close(handle)
            return parse_dump(_read_new(file.fileno(), start), self.main_thread)
        return []


def current_process() -> ProcessIdentity:
    """Return this process's identity, and have it write dumps on request from now on."""
    return _identify(os.getpid())  # cached, but a forked child differs


@functools.cache
def _identify(pid: int) -> ProcessIdentity:
    stat, main = _read_stat(pid), threading.main_thread().ident
    return ProcessIdentity(pid, stat[1] if stat else 0, _namespace("self"), main or 0, _register_dump())


def _register_dump() -> int:
    """Return a new file descriptor to which stacks are dumped, or NO_DUMP."""
    if signal.getsignal(_dump_signal()) is not signal.SIG_DFL:
        return NO_DUMP
    try:
        file = os.memfd_create("dualdist-stacks")
        faulthandler.register(_dump_signal(), file=file, all_threads=True, chain=False)
    except (OSError, RuntimeError):
        return NO_DUMP
    return file


def _dump_signal() -> int:
    return int(signal.SIGRTMIN) + DUMP_OFFSET


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


def _read_new(file: int, start: int) -> str:
    """Return what is written to the file from `start` on, until nothing follows."""
    size, until = start, time.monotonic() + BEGIN_S
    while time.monotonic() < until:
        time.sleep(QUIET_S / 5)
        now = os.fstat(file).st_size
        if now != size:
            size, until = now, time.monotonic() + QUIET_S
    return os.pread(file, size - start, start).decode(errors="replace")


def parse_dump(dump: str, thread: int) -> list[Line]:
    """Return a thread's stack from faulthandler's output, the most recent call last."""
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
