"""torchrun, and other launchers built on torch's elastic agent."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import LauncherVariables, find_present, get_value, read_values, require_all
from dualdist.environments.infer_topology import MASTER, get_main_address, infer_topology
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
NEEDED = (RUN_ID, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *MASTER)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """Read torchrun's variables; the agent serves a store at MASTER_ADDR if TORCHELASTIC_USE_AGENT_STORE is True."""
    if get_value(environ, RUN_ID) is None:
        return None
    require_all(environ, VARIABLES, NEEDED)
    return infer_topology(
        read_values(environ, VARIABLES),
        VARIABLES,
        launcher="torchrun",
        source=f"{', '.join(find_present(environ, VARIABLES.given()))} (torchrun)",
        main=get_main_address(environ),
    )
