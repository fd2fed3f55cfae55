"""IBM's Job Step Manager: jsrun on LSF clusters."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import openmpi
from dualdist.environments.env_values import LauncherVariables, find_set, require_agreement, require_all
from dualdist.environments.mpi import rank_of_mpi
from dualdist.topology import Topology

VARIABLES = LauncherVariables(
    launcher="jsrun",
    command="jsrun -n N python script.py",
    rank="JSM_NAMESPACE_RANK",
    size="JSM_NAMESPACE_SIZE",
    local_rank="JSM_NAMESPACE_LOCAL_RANK",
    local_size="JSM_NAMESPACE_LOCAL_SIZE",
)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The task's place in its job step; Spectrum MPI says it in Open MPI's variables too, and must say the same."""
    if not find_set(environ, (VARIABLES.rank, VARIABLES.size)):
        return None
    require_all(environ, VARIABLES)
    found = rank_of_mpi(environ, VARIABLES, "jsrun")
    require_agreement(environ, found, openmpi.VARIABLES)
    return found
