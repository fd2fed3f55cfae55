"""A launcher that says no more than PMI or PMIx asks of it, such as mpiexec.gforker or prterun."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import slurm
from dualdist.environments.env_values import (
    OVERRIDE,
    LauncherVariables,
    find_set,
    format_set,
    get_value,
    require_all,
)
from dualdist.environments.mpi import rank_of_mpi
from dualdist.errors import TopologyError
from dualdist.topology import Topology

VARIABLES = LauncherVariables(launcher="PMI", command="mpiexec -n N python script.py", rank="PMI_RANK", size="PMI_SIZE")
PMIX = ("PMIX_RANK", "PMIX_NAMESPACE")


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place, all but rank and size inferred."""
    if find_set(environ, VARIABLES.given()):
        require_all(environ, VARIABLES)
        return rank_of_mpi(environ, VARIABLES, "mpirun")
    if all(get_value(environ, name) for name in PMIX) and not slurm.started_with_pmix(environ):
        raise TopologyError(
            f"{format_set(environ, PMIX)}, but no variable says how many ranks there are: "
            f"PMIx tells that to MPI alone; start with `mpirun -np N python script.py`, or set {OVERRIDE}"
        )
    return None
