"""HPE's PALS: mpiexec or aprun on Cray systems under PBS."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import flux, slurm
from dualdist.environments.master import read_master
from dualdist.environments.place import topology
from dualdist.environments.variables import Names, present, read, require
from dualdist.topology import Topology

RANK = "PALS_RANKID"
SIZE = "PMI_SIZE"
NODE = "PALS_NODEID"
LOCAL_RANKS = ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
LOCAL_SIZES = ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
OWN = (RANK, LOCAL_RANKS[0], NODE)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place. PALS itself names no size: that is PMI's, which `mpiexec --pmi=pmix` leaves out."""
    if not present(environ, OWN) or slurm.is_step(environ) or flux.is_task(environ):
        return None  # Slurm's cray_shasta plugin and Flux's cray-pals plugin set these variables too
    require(environ, (RANK, SIZE), "PALS", "mpiexec -n N python script.py")
    names = Names(
        rank=RANK,
        size=SIZE,
        local_rank=next(iter(present(environ, LOCAL_RANKS)), None),
        local_size=next(iter(present(environ, LOCAL_SIZES)), None),
        node=NODE,
    )
    return topology(
        read(environ, names),
        launcher="mpiexec",
        source=f"{', '.join(present(environ, names.given()))} (PALS)",
        master=read_master(environ),
        meeting="mpi",
        mpi=True,
    )
