"""Backend over torch.distributed: Gloo, NCCL, and shared memory between the ranks of a host."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dualdist.backends.registry import NATIVE, BackendSpec

if TYPE_CHECKING:
    from dualdist.backends.base import AdoptedGroup, Backend, InitContext

# Shared memory that operations, gradients and a few groups need, per rank of the host.
SHM_BYTES_PER_RANK = 4 << 20
# Gloo connects every pair of ranks several times: for torch, for operations, for gradients, and for a group.
GLOO_MESHES = 4
SPARE_FILES = 512


def start(context: InitContext) -> Backend:
    from dualdist.backends.native import backend

    return backend.start(context)


def adopt(context: InitContext) -> AdoptedGroup | None:
    """Use torch.distributed's default group, if the program has set one up; see backend.adopt."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None  # without importing this backend's modules, which most programs do not need here
    from dualdist.backends.native import backend

    return backend.adopt(context)


def needed_open_files(size: int) -> int:
    """Return how many files a rank may have open at once in a job of `size` ranks."""
    return GLOO_MESHES * size + SPARE_FILES


SPEC = BackendSpec(
    NATIVE, start, adopt=adopt, transports=("shm", "gloo", "nccl"), library="torch.distributed", uses_nccl_on_gpus=True
)
