"""Run one PyTorch training script on several communication backends, under any launcher.

import dualdist as dd

dd.init()
dd.broadcast_parameters(model)
optimizer = dd.wrap_optimizer(optimizer)
"""

from typing import TYPE_CHECKING

from dualdist.api import (
    backend,
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
    transport,
    wrap_optimizer,
)
from dualdist.errors import (
    AlreadyInitializedError,
    BackendError,
    BackendUnavailableError,
    BuildError,
    CheckpointError,
    CollectiveError,
    CollectiveTimeoutError,
    DriftError,
    DualdistError,
    LaunchError,
    MismatchError,
    NonFiniteError,
    NotInitializedError,
    RankLostError,
    RendezvousError,
    TopologyError,
    TorchvisionError,
    TrainingError,
    UnsupportedError,
    UsageError,
)
from dualdist.version import __version__

if TYPE_CHECKING:
    from dualdist import elastic
    from dualdist.data.loader import loader
    from dualdist.data.sampler import Sampler
    from dualdist.ddp.compression import Compression
    from dualdist.ddp.metric import Metric
    from dualdist.ddp.sync_batch_norm import SyncBatchNorm
    from dualdist.launch.spawn import run, spawn
    from dualdist.logging import info, print, progress, setup_logging
    from dualdist.operations.objects import (
        allgather_object,
        barrier,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        check_consistency,
        clip_grad_norm_,
        join,
        slow_ranks,
    )
    from dualdist.operations.tensors import (
        allgather,
        allreduce,
        allreduce_,
        alltoall,
        broadcast,
        broadcast_,
        gather,
        grouped_allgather,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_reducescatter,
        reducescatter,
        scatter,
    )


# The modules of names that are imported on first use: they need torch, or few programs use them. The other names of
# __all__ that are not imported above are of operations.tensors. For type checkers and editors all stand above.
_LAZY = {
    "Compression": "ddp.compression",
    "Metric": "ddp.metric",
    "Sampler": "data.sampler",
    "SyncBatchNorm": "ddp.sync_batch_norm",
    "elastic": "elastic",
    "loader": "data.loader",
    **dict.fromkeys(("allgather_object", "barrier", "broadcast_object"), "operations.objects"),
    **dict.fromkeys(("broadcast_optimizer_state", "broadcast_parameters", "check_consistency"), "operations.objects"),
    **dict.fromkeys(("clip_grad_norm_", "join", "slow_ranks"), "operations.objects"),
    **dict.fromkeys(("run", "spawn"), "launch.spawn"),
    **dict.fromkeys(("info", "print", "progress", "setup_logging"), "logging"),
}

__all__ = [
    "AlreadyInitializedError",
    "BackendError",
    "BackendUnavailableError",
    "BuildError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Compression",
    "DriftError",
    "DualdistError",
    "LaunchError",
    "Metric",
    "MismatchError",
    "NonFiniteError",
    "NotInitializedError",
    "RankLostError",
    "RendezvousError",
    "Sampler",
    "SyncBatchNorm",
    "TopologyError",
    "TorchvisionError",
    "TrainingError",
    "UnsupportedError",
    "UsageError",
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
    "clip_grad_norm_",
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


if not TYPE_CHECKING:  # else a type checker would take any name for one that there is

    def __getattr__(name):
        """Import a public name on first use."""
        import importlib

        if name not in __all__:
            from dualdist.utils.suggest import OUR_NAMES

            hint = f"; call dd.{OUR_NAMES[name]}" if name in OUR_NAMES else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        module = importlib.import_module(f"dualdist.{_LAZY.get(name, 'operations.tensors')}")
        globals()[name] = module if name == "elastic" else getattr(module, name)
        return globals()[name]


def __dir__() -> list[str]:
    return __all__
