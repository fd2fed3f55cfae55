"""Who else looks at a tensor: what only we hold may change its place in memory, and what a program keeps may not."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Sequence

import torch


def referred_to(tensors: Sequence[torch.Tensor]) -> list[int]:
    """references() of many tensors, which are counted at this place and no other."""
    # Without a frame of Python's for each.
    return list(map(operator.add, map(sys.getrefcount, tensors), map(torch.Tensor._use_count, tensors)))  # type: ignore[attr-defined]


def references(tensor: torch.Tensor) -> int:
    """How often a tensor is referred to, by Python and by torch; compare it with an earlier count at the same place."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor) + count


def uses(tensor: torch.Tensor) -> int:
    """How many tensors lie in the same memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def is_kept(grad: torch.Tensor) -> bool:
    """Whether anybody refers to a gradient, or to its memory, but its parameter and one variable of the caller's."""
    alone = _alone()
    return references(grad) > alone[0] or uses(grad) > alone[1]


@functools.cache
def _alone() -> tuple[int, int]:
    """The counts of a gradient that nobody keeps, taken as is_kept() takes them."""
    param = torch.zeros(1, requires_grad=True, device="cpu")
    param.grad = torch.zeros(1, device="cpu")
    grad = param.grad
    return _counts(grad)


def _counts(grad: torch.Tensor) -> tuple[int, int]:
    return references(grad), uses(grad)
