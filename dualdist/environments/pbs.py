"""pbsdsh of PBS Pro and Torque: its tasks know on which of the job's nodes they are, but not how many they are."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import OVERRIDE, find_set, format_set, get_integer
from dualdist.errors import TopologyError
from dualdist.topology import Topology

# The node's index in the job, and Torque's of the slot; 0 in the batch script as well, whose tasks are no ranks.
PLACE = ("PBS_NODENUM", "PBS_VNODENUM")


def refuse(environ: Mapping[str, str]) -> Topology | None:
    """None, as no size is named; TopologyError on another node than the batch script's, where only pbsdsh starts.

    There it is one of several for sure, and each would take itself for a job of one.
    """
    if any(get_integer(environ, name) for name in PLACE):
        raise TopologyError(
            f"{format_set(environ, find_set(environ, PLACE))}, "
            "so pbsdsh started this process, and no variable says how many there are: "
            "let pbsdsh start torchrun, one on each node (dualdist run --scheduler pbs writes that), or "
            f"use mpirun, or set {OVERRIDE}"
        )
    return None
