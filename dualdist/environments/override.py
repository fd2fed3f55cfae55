"""DUALDIST_RANK and its kin: the user, or dd.spawn, says it outright, and nothing contradicts it."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import LauncherVariables, present, read, require, text
from dualdist.environments.infer_topology import MASTER, require_master, topology
from dualdist.topology import Topology

NAMES = LauncherVariables(
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
NEEDED = (NAMES.rank, NAMES.size)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The place as set by hand; rank 0's address may also stand in MASTER_ADDR and MASTER_PORT."""
    if not present(environ, NEEDED):
        return None
    require(environ, NAMES, NEEDED)
    told = read(environ, NAMES)
    names = MASTER if present(environ, MASTER) and not present(environ, MEETING) else MEETING
    return topology(
        told,
        launcher=text(environ, LAUNCHER) or "override",
        names=NAMES,
        source=", ".join(present(environ, NAMES.given())),
        master=require_master(environ, told.size, NAMES.size, names),
    )
