"""The backend of a job of one rank: nothing moves, no network is touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualdist.backends.base import Backend, ReduceOp
from dualdist.backends.buffers import PlainBuffers

# Nothing is reduced with anything, so that every dtype will do.
EVERY_DTYPE = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))


class CompletedWork:
    """Work that was done when it began."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._result


class SingleBackend(PlainBuffers):
    """A world of one rank, in which every reduction over all ranks is the rank's own tensor."""

    name = "single"
    transport = "none"
    ranks: tuple[int, ...] = (0,)
    rank = 0
    size = 1
    timeout_s = 0.0
    supported_reduce_dtypes = EVERY_DTYPE
    traceable = True
    done_means_all_started = True

    def __init__(self) -> None:
        self.is_open = True

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> CompletedWork:
        return CompletedWork(buffer)

    def allgather(self, tensor: torch.Tensor, name: str) -> CompletedWork:
        return CompletedWork(tensor.clone())

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> CompletedWork:
        return CompletedWork(buffer)

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> CompletedWork:
        return CompletedWork(tensor.clone())

    def channel(self, key: str) -> Backend:
        return self

    def subgroup(self, ranks: Sequence[int], key: str) -> Backend:
        return SingleBackend()

    def built_with(self) -> dict[str, int]:
        return {"gloo": 0, "mpi": 0, "nccl": 0}

    def close(self) -> None:
        self.is_open = False
