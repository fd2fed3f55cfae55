"""IBM's Job Step Manager: jsrun on LSF clusters, whose Spectrum MPI sets Open MPI's variables as well."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import openmpi
from dualdist.environments.agreement import require_agreement
from dualdist.environments.master import read_master
from dualdist.environments.place import topology
from dualdist.environments.variables import Names, present, read, require
from dualdist.topology import Topology

NAMES = Names(
    rank="JSM_NAMESPACE_RANK",
    size="JSM_NAMESPACE_SIZE",
    local_rank="JSM_NAMESPACE_LOCAL_RANK",
    local_size="JSM_NAMESPACE_LOCAL_SIZE",
)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The task's place in its job step."""
    if not present(environ, (NAMES.rank, NAMES.size)):
        return None
    require(environ, NAMES.given(), "jsrun", "jsrun -n N python script.py")
    found = topology(
        read(environ, NAMES),
        launcher="jsrun",
        source=f"{', '.join(NAMES.given())} (jsrun)",
        master=read_master(environ),
        meeting="mpi",
        mpi=True,
    )
    require_agreement(environ, found, openmpi.NAMES.rank, openmpi.NAMES.size)
    return found
