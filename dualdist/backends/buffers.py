"""The buffers of a backend that reduces every tensor alike."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dualdist.backends.holders import uses

if TYPE_CHECKING:
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


class PlainBuffers:
    """The part of a backend that knows nothing but these: no rank shares memory with another."""

    @abstractmethod
    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        """See Backend.allreduce_."""

    def reserve(self, nbytes: int, device: torch.device) -> int:
        return 0

    def buffer(self, place: int, number: int, count: int, dtype: torch.dtype, device: torch.device) -> PlainBuffer:
        return PlainBuffer(torch.empty(count, dtype=dtype, device=device), self.allreduce_)

    def drop(self, place: int) -> None:
        """Nobody else knows of it."""
