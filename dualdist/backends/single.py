"""Backend of a job of one rank: nothing moves and no network is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import ALL_DTYPES, Backend, filled, gathered
from dualdist.backends.operation import Completed
from dualdist.backends.registry import SINGLE, BackendSpec


class SingleBackend(Backend):
    """A backend of one rank: the reduction over all ranks is the rank's own tensor."""

    name = SINGLE
    transport = "none"
    ranks: tuple[int, ...] = (0,)
    rank = 0
    size = 1
    timeout_s = 0.0
    supported_reduce_dtypes = ALL_DTYPES
    traceable = True

    def __init__(self) -> None:
        self.is_open = True

    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> Completed[torch.Tensor]:
        return Completed(filled(buffer, source))

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Completed[torch.Tensor]:
        return Completed(gathered(tensor, 1, output).copy_(tensor))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Completed[torch.Tensor]:
        return Completed(buffer)

    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str
    ) -> Completed[torch.Tensor]:
        return Completed(tensor.clone())

    def duplicate(self, key: str) -> Backend:
        return self

    def subgroup(self, ranks: Sequence[int], key: str) -> Backend:
        return SingleBackend()

    def close(self) -> None:
        self.is_open = False


SPEC = BackendSpec(SINGLE, lambda context: SingleBackend(), transports=("none",))
