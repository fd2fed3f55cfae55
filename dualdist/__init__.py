"""Run one PyTorch training script on several communication backends, under any launcher.

import dualdist as dd

dd.init()
dd.broadcast_parameters(model)
optimizer = dd.wrap_optimizer(optimizer)
"""

from typing import TYPE_CHECKING, Any

from dualdist.api import (
    backend,
    check_consistency,
    device,
    init,
    is_initialized,
    launcher,
    load_checkpoint,
    local_rank,
    local_size,
    new_group,
    node_rank,
    num_nodes,
    rank,
    remove_group,
    save_checkpoint,
    shutdown,
    size,
    slow_ranks,
    transport,
    wrap_optimizer,
)
from dualdist.errors import CheckpointError, DualdistError, TrainingError
from dualdist.version import __version__

if TYPE_CHECKING:
    from dualdist import elastic
    from dualdist.data.loader import loader
    from dualdist.data.sampler import Sampler
    from dualdist.ddp.metric import Metric
    from dualdist.ddp.sync_batch_norm import SyncBatchNorm
    from dualdist.launch.spawn import run, spawn
    from dualdist.logging import info, print, progress, setup_logging
    from dualdist.operations import (
        allgather,
        allgather_object,
        allreduce,
        allreduce_,
        alltoall,
        barrier,
        broadcast,
        broadcast_,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        gather,
        grouped_allgather,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_reducescatter,
        join,
        reducescatter,
        scatter,
    )

# Modules of names that are imported on first use, since they need torch, or few programs use them; those of `__all__`
# that are neither here nor imported above are in `operations`.
LAZY = {
    "Metric": "ddp.metric",
    "Sampler": "data.sampler",
    "SyncBatchNorm": "ddp.sync_batch_norm",
    "info": "logging",
    "loader": "data.loader",
    "print": "logging",
    "progress": "logging",
    "run": "launch.spawn",
    "setup_logging": "logging",
    "spawn": "launch.spawn",
}

__all__ = [
    "CheckpointError",
    "DualdistError",
    "Metric",
    "Sampler",
    "SyncBatchNorm",
    "TrainingError",
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
    "check_consistency",
    "device",
    "elastic",
    "gather",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "info",
    "init",
    "is_initialized",
    "join",
    "launcher",
    "load_checkpoint",
    "loader",
    "local_rank",
    "local_size",
    "new_group",
    "node_rank",
    "num_nodes",
    "print",
    "progress",
    "rank",
    "reducescatter",
    "remove_group",
    "run",
    "save_checkpoint",
    "scatter",
    "setup_logging",
    "shutdown",
    "size",
    "slow_ranks",
    "spawn",
    "transport",
    "wrap_optimizer",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "elastic":
        return importlib.import_module("dualdist.elastic")
    module = importlib.import_module(f"dualdist.{LAZY.get(name, 'operations')}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
