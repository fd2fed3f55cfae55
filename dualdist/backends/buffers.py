"""The buffer of a backend that reduces every tensor alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualdist.holders import uses

if TYPE_CHECKING:
    import torch

    from dualdist.backends.base import ReduceOp, Settling, Work


class PlainBuffer:
    """Values in this rank's own memory, reduced in place."""

    def __init__(self, values: torch.Tensor, allreduce_: Callable[[torch.Tensor, ReduceOp, str], Work]) -> None:
        self.values = values
        self.settles = False
        self.rows: weakref.WeakSet[Any] = weakref.WeakSet()
        self.uses_without_rows = uses(values) - 1
        self._allreduce_ = allreduce_

    def allreduce(self, op: ReduceOp, name: str, settling: Settling) -> Work:
        return self._allreduce_(self.values, op, name)

    def drop(self) -> None:
        """Nobody else knows of it."""
