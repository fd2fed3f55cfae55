"""RANK and WORLD_SIZE set by hand or by Kubernetes' PyTorchJob, as torch.distributed's env:// reads them."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import present, read, require
from dualdist.environments.infer_topology import require_master, topology
from dualdist.environments.torchrun import NAMES
from dualdist.topology import Topology

NEEDED = (NAMES.rank, NAMES.size)
# Only torchrun's contract knows these two.
TORCHRUNS = ("LOCAL_WORLD_SIZE", "GROUP_RANK")


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place. A LOCAL_RANK or a MASTER_ADDR without RANK and WORLD_SIZE says nothing."""
    if not present(environ, NEEDED):
        return None
    require(environ, NAMES, NEEDED)
    told = read(environ, NAMES)
    return topology(
        told,
        launcher="torchrun" if present(environ, TORCHRUNS) else "env",
        names=NAMES,
        source=f"{', '.join(present(environ, NAMES.given()))} (set without a launcher's mark)",
        master=require_master(environ, told.size, NAMES.size),
    )
