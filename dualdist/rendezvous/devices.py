"""Which device a rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualdist.errors import TopologyError
from dualdist.topology import Topology

if TYPE_CHECKING:
    import torch


def device_of(topology: Topology | None) -> torch.device:
    """This rank's GPU, made the current one, or the CPU; without a topology only the kind of device counts.

    A launcher that shows each rank one GPU of its own makes that GPU number 0 on every rank.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if topology is None:
        return torch.device("cuda")
    count = torch.cuda.device_count()
    index = 0 if count == 1 else topology.local_rank
    if index >= count:
        raise TopologyError(
            f"local rank {topology.local_rank} of {topology.local_size} sees {count} GPUs: start at most one rank "
            "a GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
