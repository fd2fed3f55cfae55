"""Open MPI's mpirun, also where horovodrun --mpi runs it."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import slurm
from dualdist.environments.master import read_master
from dualdist.environments.place import topology
from dualdist.environments.variables import Names, present, read, require, text
from dualdist.topology import Topology

NAMES = Names(
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Note [horovodrun --mpi]: Horovod 0.28.1 (runner/mpi_run.py) passes these three options to every Open MPI, which shows them to
# its ranks as variables. People copy the first two from Horovod's manual, but hardly `--tag-output` with them.
HOROVODRUN = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib", "OMPI_MCA_orte_tag_output": "1"}


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place in MPI_COMM_WORLD; the node's index is inferred (OMPI_COMM_WORLD_NODE_RANK is not it)."""
    if not present(environ, (NAMES.rank, NAMES.size)) or slurm.started_mpi(environ):
        return None
    require(environ, NAMES.given(), "Open MPI's mpirun", "mpirun -np N python script.py")
    by_horovodrun = all(text(environ, name) == value for name, value in HOROVODRUN.items())
    told = read(environ, NAMES)
    slurm.refuse_leftover(environ, told, NAMES)
    return topology(
        told,
        launcher="horovodrun" if by_horovodrun else "mpirun",
        source=f"{', '.join(NAMES.given())} (Open MPI)",
        master=read_master(environ),
        meeting="mpi",
        mpi=True,
    )
