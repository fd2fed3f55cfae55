"""The buffer of a backend that reduces every tensor alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dualdist.backends.base import ReduceOp, Work


class PlainBuffer:
    """Values in this rank's own memory, reduced in place."""

    def __init__(self, values: torch.Tensor, allreduce_: Callable[[torch.Tensor, ReduceOp, str], Work]) -> None:
        self.values = values
        self._allreduce_ = allreduce_

    def allreduce(self, op: ReduceOp, name: str) -> Work:
        return self._allreduce_(self.values, op, name)

    def drop(self) -> None:
        """Nobody else knows of it."""
