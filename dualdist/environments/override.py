"""DUALDIST_RANK and its kin: the user, or dd.spawn, says it outright. Nothing else is looked at."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.master import read_master, require_master
from dualdist.environments.place import topology
from dualdist.environments.variables import Names, present, read, require, text
from dualdist.topology import Topology

NAMES = Names(
    rank="DUALDIST_RANK",
    size="DUALDIST_SIZE",
    local_rank="DUALDIST_LOCAL_RANK",
    local_size="DUALDIST_LOCAL_SIZE",
    node="DUALDIST_NODE",
    nodes="DUALDIST_NODES",
)
ADDRESS = "DUALDIST_ADDRESS"
PORT = "DUALDIST_PORT"
LAUNCHER = "DUALDIST_LAUNCHER"
NEEDED = (NAMES.rank, NAMES.size)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The place that was set by hand; the address may also stand in MASTER_ADDR and MASTER_PORT."""
    if not present(environ, NEEDED):
        return None
    require(environ, NEEDED, "an explicit place", "DUALDIST_RANK=0 DUALDIST_SIZE=2 python ...")
    told = read(environ, NAMES)
    if present(environ, (ADDRESS, PORT)) or read_master(environ) is None:
        master = require_master(environ, told.size, ADDRESS, PORT)
    else:
        master = read_master(environ)
    return topology(
        told,
        launcher=text(environ, LAUNCHER) or "override",
        source=", ".join(present(environ, NAMES.given())),
        master=master,
    )
