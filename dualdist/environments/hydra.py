"""MPICH's and Intel MPI's mpirun, whose process manager is called Hydra."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import slurm
from dualdist.environments.master import read_master
from dualdist.environments.place import topology
from dualdist.environments.variables import Names, present, read, require
from dualdist.topology import Topology

NAMES = Names(rank="PMI_RANK", size="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS")
# PMI_RANK and PMI_SIZE alone are set by many: srun --mpi=pmi2, Flux, PALS. The local pair is Hydra's own.
OWN = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place in MPI_COMM_WORLD; the node's index is inferred."""
    if not present(environ, OWN) or not present(environ, (NAMES.rank, NAMES.size)) or slurm.started_mpi(environ):
        return None
    require(environ, NAMES.given(), "MPICH's or Intel MPI's mpirun", "mpirun -np N python script.py")
    told = read(environ, NAMES)
    slurm.refuse_leftover(environ, told, NAMES)
    return topology(
        told,
        launcher="mpirun",
        source=f"{', '.join(NAMES.given())} (MPICH or Intel MPI)",
        master=read_master(environ),
        meeting="mpi",
        mpi=True,
    )
