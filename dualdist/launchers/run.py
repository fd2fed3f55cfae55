"""The edge to the machine: looks at what it offers, and runs a Command so that nothing outlives it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from dualdist.errors import LaunchError
from dualdist.launchers.base import INSTALL, Command, Mpi, Site

# Marks every process of a job, by inheritance: launchers put ranks into sessions and process groups of their own.
MARK = "DUALDIST_JOB"
# Seconds in which ranks must be gone after their launcher, and the launcher after it was asked to end.
GRACE_S = 5.0


@dataclass(frozen=True)
class Result:
    """How a command ended. `output` is stdout and stderr together, "" where it was not captured."""

    code: int
    output: str
    seconds: float


def look() -> Site:
    """What this machine offers, as if the environment of the running interpreter were activated."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    tools = {name: found for name in INSTALL if (found := shutil.which(name, path=path))}
    mpi: Mpi = "unknown"
    if "mpirun" in tools:
        mpi = mpi_of(run(Command((tools["mpirun"], "--version")), timeout_s=30, what="mpirun --version").output)
    return Site(sys.executable, tools, path, mpi, is_root=os.geteuid() == 0)


def mpi_of(version: str) -> Mpi:
    """Whose mpirun printed this version."""
    if "(Open MPI)" in version or "(OpenRTE)" in version:
        words = version.partition(")")[2].split()
        return "openmpi5" if words and words[0].partition(".")[0] not in ("1", "2", "3", "4") else "openmpi4"
    return "mpich" if any(name in version for name in ("HYDRA", "MPICH", "Intel(R) MPI")) else "unknown"


def run(command: Command, *, timeout_s: float | None, what: str, capture: bool = True) -> Result:
    """Run the command to its end, and return when it and all processes that it started are gone.

    `what` names the job in errors. Without `capture` the output goes where ours goes. LaunchError where the command
    cannot be started, is not done after `timeout_s`, or leaves processes behind. Ctrl-C and SIGTERM end the job, too.
    """
    mark = uuid.uuid4().hex
    marks = ":".join(filter(None, [os.environ.get(MARK), mark]))
    started = time.monotonic()
    with tempfile.TemporaryFile() if capture else contextlib.nullcontext() as output, _termination_raises():
        try:
            process = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.env, MARK: marks},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if capture else None,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{what} could not be started ({error}): {shlex.join(command.argv)}") from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            alive = _describe(_members(mark))
            _end(process, mark)
            raise LaunchError(
                f"{what} was not done after {timeout_s:g} s and was ended; {alive}\n"
                f"command: {shlex.join(command.argv)}\n{_read(output)}"
            ) from error
        finally:
            left = _end(process, mark)
        if left and code == 0:
            raise LaunchError(f"{what} ended, but left processes behind, which were ended; {left}\n{_read(output)}")
        return Result(code, _read(output), time.monotonic() - started)


def _read(output: IO[bytes] | None) -> str:
    if output is None:
        return ""
    output.seek(0)
    return output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes], mark: str) -> str:
    """End what is left of the job, first the launcher, and return when it is gone; say what the launcher had left."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        _signal(_members(mark), signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while (left := _members(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    described = _describe(left) if left else ""
    while left or process.poll() is None:
        _signal([process.pid, *left] if process.poll() is None else left, signal.SIGKILL)
        time.sleep(0.05)
        left = _members(mark)  # what they started in the meantime
    return described


def _signal(members: list[int], number: signal.Signals) -> None:
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _members(mark: str) -> list[int]:
    """The living processes that carry the mark, as far as the system tells: on Linux, all that are ours to read."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                members.append(int(folder.name))
    return members


def _describe(members: list[int]) -> str:
    commands = []
    for pid in members:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            commands.append(f"{pid} ({b' '.join(words).decode(errors='replace').strip()[:120]})")
    return "still running: " + (", ".join(commands) or "nothing that could be seen")


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that it can clean up; only the main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
