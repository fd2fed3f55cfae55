"""The buffers of a backend that reduces every tensor alike."""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dualdist.backends.base import Epilogue, ReduceOp, Work


def reference_counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """reference_count() of many tensors, which are counted at this place and no other."""
    # Without a frame of Python's for each.
    return list(map(operator.add, map(sys.getrefcount, tensors), map(torch.Tensor._use_count, tensors)))  # type: ignore[attr-defined]


def reference_count(tensor: torch.Tensor) -> int:
    """How often a tensor is referred to, by Python and by torch; compare it with an earlier count at the same place."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor) + count


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors lie in the same memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def is_kept(grad: torch.Tensor) -> bool:
    """Whether anybody refers to a gradient, or to its memory, but its parameter and one variable of the caller's."""
    alone = _alone()
    return reference_count(grad) > alone[0] or storage_uses(grad) > alone[1]


@functools.cache
def _alone() -> tuple[int, int]:
    """The counts of a gradient that nobody keeps, taken as is_kept() takes them."""
    param = torch.zeros(1, requires_grad=True, device="cpu")
    param.grad = torch.zeros(1, device="cpu")
    grad = param.grad
    return _counts(grad)


def _counts(grad: torch.Tensor) -> tuple[int, int]:
    return reference_count(grad), storage_uses(grad)


class PlainBuffer:
    """Values in this rank's own memory, reduced in place."""

    def __init__(self, values: torch.Tensor, allreduce_: Callable[[torch.Tensor, ReduceOp, str], Work]) -> None:
        self.values = values
        self.settles = False
        self.rows: weakref.WeakSet[Any] = weakref.WeakSet()
        self.uses_without_rows = storage_uses(values) - 1
        self._allreduce_ = allreduce_

    def allreduce(self, op: ReduceOp, name: str, settling: Epilogue) -> Work:
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
