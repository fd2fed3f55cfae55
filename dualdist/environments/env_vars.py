"""RANK and WORLD_SIZE set by hand or by Kubernetes' PyTorchJob, as torch.distributed's env:// reads them."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import find_set, read_values, require_all
from dualdist.environments.infer_topology import infer_topology, require_main_address
from dualdist.environments.torchrun import VARIABLES
from dualdist.topology import Topology

NEEDED = (VARIABLES.rank, VARIABLES.size)
# Only torchrun's contract knows these two.
TORCHRUNS = ("LOCAL_WORLD_SIZE", "GROUP_RANK")


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place. A LOCAL_RANK or a MASTER_ADDR without RANK and WORLD_SIZE says nothing."""
    if not find_set(environ, NEEDED):
        return None
    require_all(environ, VARIABLES, NEEDED)
    told = read_values(environ, VARIABLES)
    return infer_topology(
        told,
        launcher="torchrun" if find_set(environ, TORCHRUNS) else "env",
        names=VARIABLES,
        source=f"{', '.join(find_set(environ, VARIABLES.given()))} (set without a launcher's mark)",
        master=require_main_address(environ, told.size, VARIABLES.size),
    )
