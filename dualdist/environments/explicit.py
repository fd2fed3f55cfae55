"""Ranks without a known launcher: DUALDIST_RANK, or RANK and WORLD_SIZE, set by the user; or a single rank."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import torchrun
from dualdist.environments.env_values import (
    EnvValues,
    LauncherVariables,
    find_present,
    get_value,
    read_values,
    require_all,
)
from dualdist.environments.infer_topology import MASTER, infer_topology, require_main_address
from dualdist.topology import Topology

VARIABLES = LauncherVariables(
    launcher="the override",
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
MAIN_ADDRESS = (ADDRESS, PORT)
LAUNCHER = "DUALDIST_LAUNCHER"
NEEDED = (VARIABLES.rank, VARIABLES.size)
ENV_NEEDED = (torchrun.VARIABLES.rank, torchrun.VARIABLES.size)
# Set by torchrun only, not by hand or by Kubernetes' PyTorchJob.
TORCHRUN_ONLY = ("LOCAL_WORLD_SIZE", "GROUP_RANK")


def detect_override(environ: Mapping[str, str]) -> Topology | None:
    """Read DUALDIST_RANK etc., set by the user or dd.spawn; MASTER_ADDR and MASTER_PORT may give the address."""
    if not find_present(environ, NEEDED):
        return None
    require_all(environ, VARIABLES, NEEDED)
    values = read_values(environ, VARIABLES)
    uses_master = find_present(environ, MASTER) and not find_present(environ, MAIN_ADDRESS)
    return infer_topology(
        values,
        VARIABLES,
        launcher=get_value(environ, LAUNCHER) or "override",
        source=", ".join(find_present(environ, VARIABLES.given())),
        main=require_main_address(environ, values.size, VARIABLES.size, MASTER if uses_master else MAIN_ADDRESS),
    )


def detect_env(environ: Mapping[str, str]) -> Topology | None:
    """Read RANK and WORLD_SIZE as torch.distributed's env:// does; LOCAL_RANK or MASTER_ADDR alone are ignored."""
    variables = torchrun.VARIABLES
    if not find_present(environ, ENV_NEEDED):
        return None
    require_all(environ, variables, ENV_NEEDED)
    values = read_values(environ, variables)
    return infer_topology(
        values,
        variables,
        launcher="torchrun" if find_present(environ, TORCHRUN_ONLY) else "env",
        source=f"{', '.join(find_present(environ, variables.given()))} (set without a launcher's mark)",
        main=require_main_address(environ, values.size, variables.size),
    )


def detect_single(environ: Mapping[str, str]) -> Topology:
    """Return rank 0 of 1."""
    return infer_topology(EnvValues(rank=0, size=1, local_rank=0), launcher="none", source="no launcher's variables")
