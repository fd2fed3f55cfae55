"""pbsdsh of PBS Pro and Torque: its tasks know their node's index, but not how many tasks there are."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import OVERRIDE, find_present, format_present, get_integer
from dualdist.errors import TopologyError
from dualdist.topology import Topology

# The node's index in the job, and Torque's index of the slot; both are 0 in the batch script too.
RANK_VARIABLES = ("PBS_NODENUM", "PBS_VNODENUM")


def refuse_pbsdsh(environ: Mapping[str, str]) -> Topology | None:
    """Raise TopologyError on other nodes than the batch script's, where only pbsdsh starts processes; else None.

    Such a process is one of several, and each would silently become a job of one rank.
    """
    if any(get_integer(environ, name) for name in RANK_VARIABLES):
        raise TopologyError(
            f"{format_present(environ, find_present(environ, RANK_VARIABLES))}: pbsdsh started this process, and no "
            "variable gives the number of ranks: let pbsdsh start torchrun, one per node (dualdist run "
            f"--scheduler pbs writes that), or use mpirun, or set {OVERRIDE}"
        )
    return None
