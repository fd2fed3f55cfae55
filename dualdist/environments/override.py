"""DUALDIST_RANK and its kin: the user, or dd.spawn, says it outright, and nothing contradicts it."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import LauncherVariables, find_set, get_value, read_values, require_all
from dualdist.environments.infer_topology import MASTER, infer_topology, require_main_address
from dualdist.topology import Topology

VARIABLES = LauncherVariables(
    launcher="an explicit place",
    command="DUALDIST_RANK=0 DUALDIST_SIZE=2 python script.py",
    rank="DUALDIST_RANK",
    size="DUALDIST_SIZE",
    local_rank="DUALDIST_LOCAL_RANK",
    local_size="DUALDIST_LOCAL_SIZE",
    node_rank="DUALDIST_NODE_RANK",
    num_nodes="DUALDIST_NUM_NODES",
)
ADDRESS = "DUALDIST_ADDRESS"
PORT = "DUALDIST_PORT"
MEETING = (ADDRESS, PORT)
LAUNCHER = "DUALDIST_LAUNCHER"
NEEDED = (VARIABLES.rank, VARIABLES.size)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The place as set by hand; rank 0's address may also stand in MASTER_ADDR and MASTER_PORT."""
    if not find_set(environ, NEEDED):
        return None
    require_all(environ, VARIABLES, NEEDED)
    told = read_values(environ, VARIABLES)
    names = MASTER if find_set(environ, MASTER) and not find_set(environ, MEETING) else MEETING
    return infer_topology(
        told,
        launcher=get_value(environ, LAUNCHER) or "override",
        names=VARIABLES,
        source=", ".join(find_set(environ, VARIABLES.given())),
        master=require_main_address(environ, told.size, VARIABLES.size, names),
    )
