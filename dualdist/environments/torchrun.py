"""torchrun, and whatever else starts ranks through torch's elastic agent."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import LauncherVariables, present, read, require, text
from dualdist.environments.infer_topology import MASTER_ADDR, MASTER_PORT, read_master, topology
from dualdist.topology import Topology

RUN_ID = "TORCHELASTIC_RUN_ID"
NAMES = LauncherVariables(
    launcher="torchrun",
    command="torchrun --nproc-per-node N script.py",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node_rank="GROUP_RANK",
    num_nodes="GROUP_WORLD_SIZE",
)
NEEDED = (RUN_ID, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", MASTER_ADDR, MASTER_PORT)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The worker's place; its agent serves a store at MASTER_ADDR unless TORCHELASTIC_USE_AGENT_STORE denies it."""
    if text(environ, RUN_ID) is None:
        return None
    require(environ, NAMES, NEEDED)
    return topology(
        read(environ, NAMES),
        launcher="torchrun",
        names=NAMES,
        source=f"{', '.join(present(environ, NAMES.given()))} (torchrun)",
        master=read_master(environ),
    )
