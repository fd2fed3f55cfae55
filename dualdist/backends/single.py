"""The backend of a job of one rank: nothing moves, no network is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dualdist.backends.base import Names, ReduceOp

if TYPE_CHECKING:
    import torch


class Finished:
    """Work that was done when it began."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._result


class SingleBackend:
    """A world of one rank, in which every reduction over all ranks is the rank's own tensor."""

    name = "single"
    transport = "none"
    rank = 0
    size = 1

    def __init__(self) -> None:
        self.names = Names()
        self.reducers: list[Any] = []
        self.is_open = True

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Finished:
        return Finished(buffer)

    def allgather(self, tensor: torch.Tensor, name: str) -> Finished:
        return Finished(tensor.clone())

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Finished:
        return Finished(buffer)

    def close(self) -> None:
        self.is_open = False
