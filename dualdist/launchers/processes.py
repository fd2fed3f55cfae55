"""The processes of a job on this host, found by a mark that each inherits in its environment, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dualdist.redaction import hidden_in

# Marks every process of a job, by inheritance: launchers put ranks into sessions and process groups of their own.
MARK = "DUALDIST_JOB"
POLL_S = 0.05
PR_SET_PDEATHSIG = 1


def marked(environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """A new mark, and the variable by which processes carry it beside those that are in `environ`."""
    mark = uuid.uuid4().hex
    return mark, {MARK: ":".join(filter(None, [environ.get(MARK), mark]))}


def members(mark: str) -> list[int]:
    """The living processes that carry the mark, as far as the system tells: on Linux, all that are ours to read."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def send(processes: Iterable[int], number: signal.Signals) -> None:
    """Signal those that are still there."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end(mark: str, grace_s: float) -> list[int]:
    """End all that carry the mark: what does not go within `grace_s` is killed. Returns what had to be killed."""
    send(members(mark), signal.SIGTERM)
    return killed(mark, grace_s)


def killed(mark: str, grace_s: float, more: Callable[[], list[int]] = list) -> list[int]:
    """Wait until nothing carries the mark; after `grace_s` kill what does, and `more`. Returns whom it had to kill."""
    deadline = time.monotonic() + grace_s
    while (left := members(mark)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    found = left
    while left or more():
        send([*more(), *left], signal.SIGKILL)
        time.sleep(POLL_S)
        left = members(mark)  # what they started in the meantime
    return found


def describe(processes: Iterable[int]) -> str:
    """Their numbers and command lines."""
    commands = []
    for pid in processes:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            line = " ".join(hidden_in(word.decode(errors="replace") for word in words))
            commands.append(f"{pid} ({line.strip()[:120]})")
    return "still running: " + (", ".join(commands) or "nothing that could be seen")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever ends it. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
