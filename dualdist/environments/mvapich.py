"""MVAPICH2's mpirun_rsh and mpiexec."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import LauncherVariables
from dualdist.environments.mpi import rank_of_mpirun
from dualdist.topology import Topology

VARIABLES = LauncherVariables(
    launcher="MVAPICH2",
    command="mpirun_rsh -np N -hostfile hosts python script.py",
    rank="MV2_COMM_WORLD_RANK",
    size="MV2_COMM_WORLD_SIZE",
    local_rank="MV2_COMM_WORLD_LOCAL_RANK",
    local_size="MV2_COMM_WORLD_LOCAL_SIZE",
)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place."""
    return rank_of_mpirun(environ, VARIABLES)
