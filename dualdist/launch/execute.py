"""Effects on this machine: find what is installed, and run a Command so that none of its processes outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dualdist.errors import LaunchError
from dualdist.launch import processes
from dualdist.launch.job import Command, Mpi, Site
from dualdist.launch.launchers import PROGRAMS
from dualdist.launch.launchers.mpirun import RSH_AGENT_VARIABLE
from dualdist.launch.processes import signals_deferred, termination_raises
from dualdist.utils.redaction import redact_command

OPEN_MPI = re.compile(r"(?:Open ?MPI|OpenRTE)\)?\s*v?(\d*)")
MPICH_AND_DERIVATIVES = ("MPICH", "HYDRA", "Intel(R) MPI", "Intel MPI", "MVAPICH")
# Seconds for a launcher to end after SIGTERM, and for its ranks to end after it.
GRACE_S = 5.0


@dataclass(frozen=True)
class CommandResult:
    """A command's exit code, its stdout and stderr together ("" if not captured), and how long it ran."""

    code: int
    output: str
    seconds: float


def find_site() -> Site:
    """Return what this machine offers, as if the environment of the running interpreter were activated."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    tools = {name: found for name in PROGRAMS if (found := shutil.which(name, path=path))}
    mpi: Mpi = "unknown"
    if "mpirun" in tools:
        version = run_command(Command((tools["mpirun"], "--version")), timeout_s=30, what="mpirun --version")
        mpi = parse_mpi_version(version.output)
    has_ssh = RSH_AGENT_VARIABLE in os.environ or any(shutil.which(name, path=path) for name in ("ssh", "rsh"))
    is_root, folder = os.geteuid() == 0, str(Path.cwd())
    return Site(sys.executable, tools, path, mpi, is_root=is_root, folder=folder, has_ssh=has_ssh)


def parse_mpi_version(text: str) -> Mpi:
    """Return the MPI implementation of a version that mpirun or MPI_Get_library_version() printed."""
    if found := OPEN_MPI.search(text):
        return "openmpi4" if found[1] in ("", "1", "2", "3", "4") else "openmpi5"
    return "mpich" if any(name in text for name in MPICH_AND_DERIVATIVES) else "unknown"


def run_command(command: Command, *, timeout_s: float | None, what: str, capture: bool = True) -> CommandResult:
    """Run a command to its end, and return when it and all processes that it started have ended.

    Ctrl-C and SIGTERM end them, too.

    Args:
        what: names the job in errors.
        capture: return the output instead of passing it on.

    Raises:
        LaunchError: the command cannot be started, times out, or leaves processes behind.
    """
    mark, mark_variables = processes.new_job_mark(os.environ)
    started = time.monotonic()
    with tempfile.TemporaryFile() if capture else contextlib.nullcontext() as output, termination_raises():
        process = None
        try:
            with signals_deferred():
                process = subprocess.Popen(
                    command.argv,
                    env={**command.environment(os.environ), **mark_variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT if capture else None,
                    start_new_session=True,
                )
            code = process.wait(timeout_s)
        except OSError as error:
            line = shlex.join(redact_command(command.argv))
            raise LaunchError(f"{what} could not be started ({error}): {line}") from error
        except subprocess.TimeoutExpired as error:
            alive = processes.describe_processes(processes.find_marked(mark))
            _end(process, mark)
            raise LaunchError(
                f"{what} was not done after {timeout_s:g} s and was ended; {alive}\n"
                f"command: {shlex.join(redact_command(command.argv))}\n{_read(output)}"
            ) from error
        finally:
            left = _end(process, mark)
        if left and code == 0:
            raise LaunchError(f"{what} ended, but left processes behind, which were ended; {left}\n{_read(output)}")
        return CommandResult(code, _read(output), time.monotonic() - started)


def _read(output: IO[bytes] | None) -> str:
    if output is None:
        return ""
    output.seek(0)
    return output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes] | None, mark: str) -> str:
    """End the launcher first, then all that is left of the job; return a description of what was left."""
    if process is None:
        return ""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        processes.send_signal(processes.find_marked(mark), signal.SIGTERM)
    left = processes.wait_or_kill(mark, GRACE_S, lambda: [process.pid] if process.poll() is None else [])
    return processes.describe_processes(left) if left else ""
