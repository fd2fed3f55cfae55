"""HPE's PALS: mpiexec on Cray systems under PBS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dualdist.environments import flux, slurm
from dualdist.environments.env_values import LauncherVariables, find_set, require_all
from dualdist.environments.mpi import rank_of_mpi
from dualdist.topology import Topology

# PALS itself names no size: that is PMI's, which `mpiexec --pmi=pmix` leaves out.
VARIABLES = LauncherVariables(
    launcher="PALS",
    command="mpiexec -n N python script.py",
    rank="PALS_RANKID",
    size="PMI_SIZE",
    node_rank="PALS_NODEID",
)
LOCAL_RANKS = ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
LOCAL_SIZES = ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
OWN = (VARIABLES.rank, LOCAL_RANKS[0], "PALS_NODEID")


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place; how many nodes there are, no variable tells."""
    own = find_set(environ, OWN)
    if not own or slurm.is_step(environ) or flux.is_task(environ):
        return None  # Slurm's cray_shasta plugin and Flux's cray-pals plugin set these variables too
    require_all(environ, VARIABLES, (*own, *(name for name in (VARIABLES.rank, VARIABLES.size) if name not in own)))
    names = replace(
        VARIABLES,
        local_rank=next(iter(find_set(environ, LOCAL_RANKS)), None),
        local_size=next(iter(find_set(environ, LOCAL_SIZES)), None),
    )
    return rank_of_mpi(environ, names, "mpiexec")
