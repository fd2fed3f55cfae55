"""Batch normalization over all ranks, by Horovod's name and signature."""

import torch

from dualdist.collectives.group import Group
from dualdist.ddp.sync_batch_norm import SyncBatchNorm as DualdistSyncBatchNorm
from dualdist.hvd.common import horovods_errors
from dualdist.hvd.process_sets import current


class HorovodSyncBatchNorm(DualdistSyncBatchNorm):
    """dd.SyncBatchNorm over the ranks of hvd.init(), with Horovod's errors; a program calls it hvd.SyncBatchNorm.

    Unlike Horovod's it takes tensors on any device, and empty ones.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with horovods_errors():
            return super().forward(input)

    def _all_ranks(self) -> Group:
        return current().base

    def _get_name(self) -> str:
        return "SyncBatchNorm"  # in the text of a model


SyncBatchNorm = HorovodSyncBatchNorm
