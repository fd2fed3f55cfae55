"""Collective libraries that torch.distributed has for accelerators, from torch itself or another package."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dualdist.errors import UnsupportedError

ProcessGroup = Any  # a dist.ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL and so on


def library_of(kind: str) -> str:
    """Return torch.distributed's name of the collective library for an accelerator, or "" if this torch has none."""
    if not dist.is_available():
        return ""
    found: str = dist.Backend.default_device_backend_map.get(kind, "")
    has_one = kind != "cpu" and found not in ("", "gloo") and dist.is_backend_available(found)
    return found if has_one else ""


def both(kind: str) -> str:
    """Return torch.distributed's name of a group that moves tensors of the CPU and of an accelerator."""
    library = library_of(kind)
    return f"cpu:gloo,{kind}:{library}" if library else "gloo"


def create_group(library: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Connect all ranks by a device's collective library, which another package may have registered with torch."""
    if library in ("nccl", "xccl"):
        group: Any = dist.ProcessGroupNCCL if library == "nccl" else dist.ProcessGroupXCCL
        options = group.Options()
        options._timeout = timeout
        return group(store, rank, size, options)
    plugin = dist.Backend._plugins[library.upper()]  # private to torch: tests/unit/test_torch_private_names.py
    if plugin.extended_api:
        raise UnsupportedError(f"torch.distributed's {library} takes options that dualdist does not know")
    return plugin.creator_fn(store, rank, size, timeout)


def library_of_group(group: ProcessGroup, kind: str) -> ProcessGroup:
    """Return what moves tensors of a kind of device: torch's own group has a part for each kind."""
    return group._get_backend(torch.device(kind)) if type(group) is dist.ProcessGroup else group
