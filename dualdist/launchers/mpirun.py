"""mpirun of Open MPI 4 and 5, and of MPICH and its kin (Intel MPI, MVAPICH), which start ranks by Hydra."""

from __future__ import annotations

from dualdist.errors import LaunchError
from dualdist.launchers.base import Command, Job, Site

# Left alone, Open MPI refuses more ranks than cores, and binds each rank with all its threads to one core.
OPENMPI = {
    "openmpi4": ("--oversubscribe", "--bind-to", "none"),
    "openmpi5": ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
}


def command(job: Job, site: Site) -> Command:
    variables = job.variables()
    mpirun, ranks = site.tool("mpirun"), ("-np", str(job.ranks))
    if site.mpi in OPENMPI:
        root = ("--allow-run-as-root",) if site.is_root else ()
        forwarded = tuple(word for name in variables for word in ("-x", name))
        flags = (*root, *OPENMPI[site.mpi], *ranks, *forwarded)
    elif site.mpi == "mpich":
        flags = (*ranks, *(word for name, value in variables.items() for word in ("-genv", name, value)))
    else:
        raise LaunchError(
            f"{mpirun} belongs to neither Open MPI nor MPICH nor Intel MPI: put one of theirs first on PATH"
        )
    return Command((mpirun, *flags, site.python, *job.program), variables)
