"""Batch normalization over all ranks, by Horovod's name and signature."""

import torch

from dualdist.collectives.group import Group
from dualdist.ddp import sync_batch_norm
from dualdist.hvd.common import horovods_errors
from dualdist.hvd.process_sets import current


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """dualdist.SyncBatchNorm over all ranks; unlike Horovod's it takes tensors on any device, and empty ones."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with horovods_errors():
            return super().forward(input)

    def _everybody(self) -> Group:
        return current().base
