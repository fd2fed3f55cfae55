"""Effects on this machine: find what is installed, and run a Command so that none of its processes outlives it."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

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


def find_site() -> Site:
    """Return what this machine offers, as if the environment of the running interpreter were activated."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    tools = {name: found for name in PROGRAMS if (found := shutil.which(name, path=path))}
    mpi: Mpi = "unknown"
    if "mpirun" in tools:
        _, version = run_command(Command((tools["mpirun"], "--version")), timeout_s=30, what="mpirun --version")
        mpi = parse_mpi_version(version)
    has_ssh = RSH_AGENT_VARIABLE in os.environ or any(shutil.which(name, path=path) for name in ("ssh", "rsh"))
    is_root, folder = os.geteuid() == 0, str(Path.cwd())
    return Site(sys.executable, tools, path, mpi, is_root=is_root, folder=folder, has_ssh=has_ssh)


def parse_mpi_version(text: str) -> Mpi:
    """Return the MPI implementation of a version that mpirun or MPI_Get_library_version() printed."""
    if found := OPEN_MPI.search(text):
        return "openmpi4" if found[1] in ("", "1", "2", "3", "4") else "openmpi5"
    return "mpich" if any(name in text for name in MPICH_AND_DERIVATIVES) else "unknown"


def run_command(command: Command, *, timeout_s: float | None, what: str) -> tuple[int, str]:
    """Run a command and all processes that it starts to their end; return its exit code, and its stdout with stderr.

    Ctrl-C and SIGTERM end them, too. LaunchError, in which `what` names the job, says that it cannot be started, times
    out, or leaves processes behind.
    """
    find, mark_variables = processes.mark_job(os.environ)
    line = shlex.join(redact_command(command.argv))
    with tempfile.TemporaryFile() as output, termination_raises():

        def read_output() -> str:
            output.seek(0)
            return output.read().decode(errors="replace")

        process = None
        try:
            with signals_deferred():
                process = subprocess.Popen(
                    command.argv,
                    env={**command.environment(os.environ), **mark_variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            code = process.wait(timeout_s)
        except OSError as error:
            raise LaunchError(f"{what} could not be started ({error}): {line}") from error
        except subprocess.TimeoutExpired as error:
            alive = processes.describe_processes(find())
            _end(process, find)
            timeout = f"{what} was not done after {timeout_s:g} s and was ended; {alive}"
            raise LaunchError(f"{timeout}\ncommand: {line}\n{read_output()}") from error
        finally:
            left = _end(process, find)
        if left and code == 0:
            raise LaunchError(f"{what} ended, but left processes behind, which were ended; {left}\n{read_output()}")
        return code, read_output()


def _end(process: subprocess.Popen[bytes] | None, find: processes.Finder) -> str:
    """End the launcher first, then all that is left of the job; return a description of what was left."""
    if process is None:
        return ""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        processes.send_signal(find(), signal.SIGTERM)
    left = processes.wait_or_kill(find, GRACE_S, lambda: [process.pid] if process.poll() is None else [])
    return processes.describe_processes(left) if left else ""
