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
    local_rank,
    local_size,
    new_group,
    node,
    nodes,
    rank,
    remove_group,
    shutdown,
    size,
    transport,
    wrap_optimizer,
)
from dualdist.errors import DualdistError
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
from dualdist.running import run
from dualdist.spawning import spawn
from dualdist.version import __version__

if TYPE_CHECKING:
    from dualdist.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DualdistError",
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
    "local_rank",
    "local_size",
    "new_group",
    "node",
    "nodes",
    "rank",
    "reducescatter",
    "remove_group",
    "run",
    "shutdown",
    "size",
    "spawn",
    "transport",
    "wrap_optimizer",
]


def __getattr__(name: str) -> Any:
    """What cannot be defined without torch is imported when it is first asked for."""
    if name == "SyncBatchNorm":
        from dualdist.sync_batch_norm import SyncBatchNorm

        return SyncBatchNorm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
