"""Flux: flux run and flux submit."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.master import read_master
from dualdist.environments.place import topology
from dualdist.environments.variables import Names, present, read, require
from dualdist.topology import Topology

NAMES = Names(rank="FLUX_TASK_RANK", size="FLUX_JOB_SIZE", local_rank="FLUX_TASK_LOCAL_ID", nodes="FLUX_JOB_NNODES")


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether Flux started this process as a task; it unsets these variables in batch scripts and shells."""
    return bool(present(environ, (NAMES.rank, NAMES.size)))


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The task's place in its job. How many tasks share a node, and which node this is, no variable tells."""
    if not is_task(environ):
        return None
    require(environ, NAMES.given(), "flux run", "flux run -n N python script.py")
    return topology(
        read(environ, NAMES),
        launcher="flux",
        source=f"{', '.join(NAMES.given())} (Flux)",
        master=read_master(environ),
        meeting="mpi",
        mpi=True,
    )
