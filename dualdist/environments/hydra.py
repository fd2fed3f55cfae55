"""MPICH's and Intel MPI's mpirun, whose process manager is called Hydra."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import LauncherVariables, find_set
from dualdist.environments.mpi import rank_of_mpirun
from dualdist.topology import Topology

LOCAL = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
VARIABLES = LauncherVariables(
    launcher="MPICH or Intel MPI",
    command="mpirun -np N python script.py",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank=LOCAL[0],
    local_size=LOCAL[1],
)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place. PMI_RANK without a local rank is not Hydra's: srun --mpi=pmi2, Flux and PALS set it."""
    return rank_of_mpirun(environ, VARIABLES) if find_set(environ, LOCAL) else None
