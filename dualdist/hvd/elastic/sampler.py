"""A sampler that remembers how much of an epoch is done, and shares out the rest after a reset."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch.utils.data

from dualdist.hvd.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Every rank's share of the indices of `dataset` that are left in this epoch, as many for each rank.

    All ranks pass the same `seed`, call record_batch() after each batch, and set_epoch() at the end of an epoch. In a
    TorchState the sampler starts, after a reset, with what no rank has processed by then.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, of which nothing is processed; shuffled in an order of its own."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed so many samples more."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken, on the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its samples are processed on all ranks together."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Share out what is left of the epoch to the ranks that there are now."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # The first indices fill up what does not divide evenly, over and over where fewer are left than ranks.
        everybody = list(islice(cycle(self.remaining_indices), self.total_size))
        self.indices = everybody[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
