"""Process guard: runs one command, and kills all its descendants when it or the parent ends, or on a signal.

    python guard.py PARENT_PID REPORT GRACE_S ARGV...

REPORT receives {"rc": int, "left": [command line, ...]}: processes that were still running GRACE_S after the command
ended, before they were killed. This process is a child subreaper: daemons and orphans of the command stay its
descendants.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CANNOT_START = 127


def prctl(option: int, value: int) -> None:
    """Set a prctl(2) option for this process; raise OSError on failure."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def reap() -> dict[int, int]:
    """Reap exited children; return their exit codes by process id."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def command_lines(processes: Sequence[psutil.Process]) -> list[str]:
    lines = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                lines.append(f"{process.pid} {' '.join(process.cmdline()) or process.name()}")
        except psutil.NoSuchProcess:
            continue
    return lines


def kill_descendants() -> None:
    """Kill all descendants: children of a killed parent become this process's, so the loop ends."""
    me = psutil.Process()
    while children := me.children(recursive=True):
        for child in children:
            child.kill()
        reap()
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)


def run(argv: list[str], grace_s: float) -> tuple[int, list[str]]:
    """Run argv; return its exit code and the command lines of processes that outlived it by grace_s, then killed."""
    watched = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        pid = os.posix_spawnp(argv[0], argv, os.environ, setsid=True, setsigmask=[])
    except OSError as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return CANNOT_START, []
    rc: int | None = None
    is_stopped = False
    while rc is None and not is_stopped:
        is_stopped = signal.sigwait(watched) != signal.SIGCHLD
        rc = reap().get(pid)
    deadline = time.monotonic() + (0 if is_stopped else grace_s)
    me = psutil.Process()
    while (left := me.children(recursive=True)) and (wait_s := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, min(wait_s, 0.2))
        reap()
    lines = [] if is_stopped else command_lines(left)
    kill_descendants()
    return (-signal.SIGKILL if rc is None else rc), lines


def main() -> int:
    parent, report, grace_s, *argv = sys.argv[1:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before PR_SET_PDEATHSIG was set
        return CANNOT_START
    rc, left = run(argv, float(grace_s))
    Path(report).write_text(json.dumps({"rc": rc, "left": left}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
