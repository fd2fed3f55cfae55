"""MVAPICH2's mpirun_rsh and mpiexec."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import slurm
from dualdist.environments.master import read_master
from dualdist.environments.place import topology
from dualdist.environments.variables import Names, present, read, require
from dualdist.topology import Topology

NAMES = Names(
    rank="MV2_COMM_WORLD_RANK",
    size="MV2_COMM_WORLD_SIZE",
    local_rank="MV2_COMM_WORLD_LOCAL_RANK",
    local_size="MV2_COMM_WORLD_LOCAL_SIZE",
)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place in MPI_COMM_WORLD. The local pair alone says nothing: people export it for other tools."""
    if not present(environ, (NAMES.rank, NAMES.size)) or slurm.started_mpi(environ):
        return None
    require(environ, NAMES.given(), "MVAPICH2", "mpirun_rsh -np N -hostfile hosts python script.py")
    told = read(environ, NAMES)
    slurm.refuse_leftover(environ, told, NAMES)
    return topology(
        told,
        launcher="mpirun",
        source=f"{', '.join(NAMES.given())} (MVAPICH2)",
        master=read_master(environ),
        meeting="mpi",
        mpi=True,
    )
