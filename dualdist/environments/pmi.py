"""A launcher that says no more than PMI or PMIx asks of it, such as mpiexec.gforker or prterun."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import slurm
from dualdist.environments.master import read_master
from dualdist.environments.place import topology
from dualdist.environments.variables import OVERRIDE, Names, present, read, require, shown, text
from dualdist.errors import TopologyError
from dualdist.topology import Topology

NAMES = Names(rank="PMI_RANK", size="PMI_SIZE")
PMIX = ("PMIX_RANK", "PMIX_NAMESPACE")


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place in MPI_COMM_WORLD, with the local ranks inferred."""
    if present(environ, NAMES.given()):
        require(environ, NAMES.given(), "mpiexec", "mpiexec -n N python script.py")
        return topology(
            read(environ, NAMES),
            launcher="mpirun",
            source=f"{', '.join(NAMES.given())} (PMI)",
            master=read_master(environ),
            meeting="mpi",
            mpi=True,
        )
    if all(text(environ, name) for name in PMIX) and not slurm.started_mpi(environ):
        raise TopologyError(
            f"{shown(environ, PMIX)}, but no variable says how many ranks there are: PMIx tells that only to MPI; "
            f"start with `mpirun -np N python script.py`, or set {OVERRIDE}"
        )
    return None
