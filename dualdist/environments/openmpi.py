"""Open MPI's mpirun, also where horovodrun --mpi runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dualdist.environments.env_values import LauncherVariables, get_value
from dualdist.environments.mpi import rank_of_mpirun
from dualdist.topology import Topology

# OMPI_COMM_WORLD_NODE_RANK is not the node's index.
VARIABLES = LauncherVariables(
    launcher="Open MPI",
    command="mpirun -np N python script.py",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Note [horovodrun --mpi]: Horovod 0.28.1 (runner/mpi_run.py) passes three options to every Open MPI, which shows them
# to its ranks as these variables. People copy the first two from Horovod's manual, but hardly --tag-output with them.
HOROVODRUN = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib", "OMPI_MCA_orte_tag_output": "1"}


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place; the launcher is horovodrun where that called mpirun."""
    found = rank_of_mpirun(environ, VARIABLES)
    if found is not None and all(get_value(environ, name) == value for name, value in HOROVODRUN.items()):
        return replace(found, launcher="horovodrun")
    return found
