"""Where a thread of the program stands: the lines of its stack, without those of launchers and of dualdist itself."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from collections.abc import Sequence
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


def stack_of(thread: int, *, is_in_operation: bool) -> list[Line]:
    """The calls in which the thread is now, the last SHOWN of them; of an operation, up to where it was called."""
    frame = sys._current_frames().get(thread)
    return [] if frame is None else trimmed(_lines(frame), is_in_operation=is_in_operation)


def _lines(frame: FrameType) -> list[Line]:
    """Without reading the source: a disk that hangs may be the reason for the question."""
    calls = list(traceback.walk_stack(frame))[::-1]
    return [(called.f_code.co_filename, number, called.f_code.co_name) for called, number in calls]


def trimmed(lines: Sequence[Line], *, is_in_operation: bool) -> list[Line]:
    """The program's own lines, which begin behind those of what started it."""
    first = next((n for n, (file, _, _) in enumerate(lines) if not file.startswith(STARTERS)), 0)
    own = list(lines[first:])
    if is_in_operation:
        own = own[: next((n for n, (file, _, _) in enumerate(own) if file.startswith(OUR_FOLDER)), None)]
    return own[-SHOWN:]


def shown(lines: Sequence[Line]) -> str:
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
