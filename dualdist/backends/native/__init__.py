"""Backend over torch.distributed: Gloo, NCCL, and shared memory between the ranks of a host."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dualdist.backends.registry import NATIVE, BackendSpec

if TYPE_CHECKING:
    from dualdist.backends.base import AdoptedGroup, Backend, InitContext


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


SPEC = BackendSpec(
    NATIVE, start, adopt=adopt, transports=("shm", "gloo", "nccl"), library="torch.distributed", uses_nccl_on_gpus=True
)
