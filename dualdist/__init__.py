"""One PyTorch training script on two communication backends, under any launcher.

import dualdist as dd

dd.init()
dd.broadcast_parameters(model)
optimizer = dd.wrap_optimizer(optimizer)
"""

from dualdist.api import (
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    alltoall,
    backend,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    device,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
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
    reducescatter,
    remove_group,
    shutdown,
    size,
    transport,
    wrap_optimizer,
)
from dualdist.errors import DualdistError
from dualdist.spawning import spawn
from dualdist.version import __version__

__all__ = [
    "DualdistError",
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
    "shutdown",
    "size",
    "spawn",
    "transport",
    "wrap_optimizer",
]
