"""Backend over torch.distributed: Gloo, shared memory between the ranks of a host, and accelerators' libraries."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dualdist.backends.registry import NATIVE, BackendSpec

if TYPE_CHECKING:
    from dualdist.backends.base import AdoptedGroup, Backend, InitContext


def start(context: InitContext) -> Backend:
    from dualdist.backends.native import startup

    return startup.start(context)


def adopt(context: InitContext) -> AdoptedGroup | None:
    """Use torch.distributed's default group, if the program has set one up; see startup.adopt."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None  # without importing this backend's modules, which most programs do not need here
    from dualdist.backends.native import startup

    return startup.adopt(context)


SPEC = BackendSpec(NATIVE, start, adopt=adopt, transports=("shm", "gloo", "nccl"), library="torch.distributed")
