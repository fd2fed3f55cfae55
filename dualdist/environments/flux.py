"""Flux: flux run and flux submit."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import LauncherVariables, find_set, require_all
from dualdist.environments.mpi import rank_of_mpi
from dualdist.topology import Topology

VARIABLES = LauncherVariables(
    launcher="Flux",
    command="flux run -n N python script.py",
    rank="FLUX_TASK_RANK",
    size="FLUX_JOB_SIZE",
    local_rank="FLUX_TASK_LOCAL_ID",
    num_nodes="FLUX_JOB_NNODES",
)


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether Flux started this process as a task; it unsets these variables in its batch scripts and shells."""
    return bool(find_set(environ, (VARIABLES.rank, VARIABLES.size)))


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The task's place in its job; how many tasks share its node, and which node that is, no variable tells."""
    if not is_task(environ):
        return None
    require_all(environ, VARIABLES)
    return rank_of_mpi(environ, VARIABLES, "flux")
