"""torchrun, and whatever else starts ranks through torch's elastic agent."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import LauncherVariables, find_set, get_value, read_values, require_all
from dualdist.environments.infer_topology import MASTER_ADDR, MASTER_PORT, get_main_address, infer_topology
from dualdist.topology import Topology

RUN_ID = "TORCHELASTIC_RUN_ID"
VARIABLES = LauncherVariables(
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
    if get_value(environ, RUN_ID) is None:
        return None
    require_all(environ, VARIABLES, NEEDED)
    return infer_topology(
        read_values(environ, VARIABLES),
        launcher="torchrun",
        names=VARIABLES,
        source=f"{', '.join(find_set(environ, VARIABLES.given()))} (torchrun)",
        master=get_main_address(environ),
    )
