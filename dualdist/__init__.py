"""One PyTorch training script on three communication backends, under any launcher.

import dualdist as dd

dd.init()
dd.broadcast_parameters(model)
optimizer = dd.wrap_optimizer(optimizer)
"""

from typing import TYPE_CHECKING, Any

from dualdist.api import (
    allgather_object,
    backend,
    barrier,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    device,
    init,
    is_initialized,
    join,
    launcher,
    load_checkpoint,
    local_rank,
    local_size,
    new_group,
    node,
    nodes,
    rank,
    remove_group,
    save_checkpoint,
    shutdown,
    size,
    transport,
    wrap_optimizer,
)
from dualdist.errors import CheckpointError, DualdistError
from dualdist.operations import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from dualdist.version import __version__

if TYPE_CHECKING:
    from dualdist.data import Sampler
    from dualdist.loading import loader
    from dualdist.running import run
    from dualdist.spawning import spawn
    from dualdist.sync_batch_norm import SyncBatchNorm

# What cannot be defined without torch, or what few programs use and takes long to import: the module of each.
LATER = {
    "Sampler": "data",
    "SyncBatchNorm": "sync_batch_norm",
    "loader": "loading",
    "run": "running",
    "spawn": "spawning",
}

__all__ = [
    "CheckpointError",
    "DualdistError",
    "Sampler",
    "SyncBatchNorm",
    "__version__",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "backend",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "device",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_initialized",
    "join",
    "launcher",
    "load_checkpoint",
    "loader",
    "local_rank",
    "local_size",
    "new_group",
    "node",
    "nodes",
    "rank",
    "reducescatter",
    "remove_group",
    "run",
    "save_checkpoint",
    "shutdown",
    "size",
    "spawn",
    "transport",
    "wrap_optimizer",
]


def __getattr__(name: str) -> Any:
    """Of LATER, what is asked for."""
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"dualdist.{LATER[name]}"), name)
