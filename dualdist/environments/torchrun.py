"""torchrun's RANK and WORLD_SIZE, also set without torchrun; the user's DUALDIST_RANK and DUALDIST_SIZE; one rank."""

from collections.abc import Mapping

from dualdist.environments.env_values import MASTER, LauncherVariables, find_present, get_value, read_topology
from dualdist.topology import Rendezvous, Topology
from dualdist.utils.variables import PLACE, SPAWN_RENDEZVOUS

RUN_ID = "TORCHELASTIC_RUN_ID"
VARIABLES = LauncherVariables(
    "torchrun",
    "torchrun --nproc-per-node N script.py",
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
)
NEEDED = (RUN_ID, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *MASTER)
ENV_NEEDED = (VARIABLES.rank, VARIABLES.size)
# Set by torchrun only, not by hand or by Kubernetes' PyTorchJob.
TORCHRUN_ONLY = ("LOCAL_WORLD_SIZE", "GROUP_RANK")
OVERRIDE_VARIABLES = LauncherVariables(
    "the override",
    "DUALDIST_RANK=0 DUALDIST_SIZE=2 python script.py",
    *("DUALDIST_RANK", "DUALDIST_SIZE", "DUALDIST_LOCAL_RANK", "DUALDIST_LOCAL_SIZE"),
    *("DUALDIST_NODE_RANK", "DUALDIST_NUM_NODES"),
)
OVERRIDE_NEEDED = (OVERRIDE_VARIABLES.rank, OVERRIDE_VARIABLES.size)
OVERRIDE_ADDRESS = ("DUALDIST_ADDRESS", "DUALDIST_PORT")
OVERRIDE_LAUNCHER = "DUALDIST_LAUNCHER"
SPAWN = "spawn"


def detect_torchrun(environ: Mapping[str, str]) -> Topology | None:
    """Read torchrun's variables; the agent serves a store at MASTER_ADDR if TORCHELASTIC_USE_AGENT_STORE is True."""
    return None if get_value(environ, RUN_ID) is None else read_topology(environ, VARIABLES, needed=NEEDED)


def detect_env(environ: Mapping[str, str]) -> Topology | None:
    """Read RANK and WORLD_SIZE as torch.distributed's env:// does; LOCAL_RANK or MASTER_ADDR alone are ignored."""
    if not find_present(environ, ENV_NEEDED):
        return None
    launcher = "torchrun" if find_present(environ, TORCHRUN_ONLY) else "env"
    note = " (set without a launcher's mark)"
    return read_topology(environ, VARIABLES, launcher=launcher, needed=ENV_NEEDED, note=note)


def detect_override(environ: Mapping[str, str]) -> Topology | None:
    """Read DUALDIST_RANK etc., set by the user or dd.spawn; MASTER_ADDR and MASTER_PORT may give the address.

    `dualdist run --min-ranks` tells the ranks where rank 0 listens. The ranks of a torchrun that a rank of dd.spawn
    started are torchrun's: dd.spawn removes an outer torchrun's mark.
    """
    launcher = get_value(environ, OVERRIDE_LAUNCHER)
    is_outer = launcher == SPAWN and get_value(environ, RUN_ID) is not None
    if is_outer or not find_present(environ, OVERRIDE_NEEDED):
        return None
    rendezvous: Rendezvous = "none"
    if get_value(environ, PLACE) is not None:
        rendezvous = "run"
    elif get_value(environ, SPAWN_RENDEZVOUS) is not None:
        rendezvous = "spawn"
    uses_master = find_present(environ, MASTER) and not find_present(environ, OVERRIDE_ADDRESS)
    return read_topology(
        environ,
        OVERRIDE_VARIABLES,
        launcher=launcher or "override",
        needed=OVERRIDE_NEEDED,
        note="",
        address=None if rendezvous != "none" else MASTER if uses_master else OVERRIDE_ADDRESS,
        rendezvous=rendezvous,
    )


def detect_single(environ: Mapping[str, str]) -> Topology:
    return Topology(0, 1, 0, 1, 0, 1, launcher="none", source="no launcher's variables")
