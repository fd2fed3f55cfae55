"""Who else looks at a tensor: what only we hold may change its place in memory, and what a program keeps may not."""

from __future__ import annotations

import functools
import sys

import torch


def references(tensor: torch.Tensor) -> int:
    """How often a tensor is referred to, by Python and by torch; compare it with an earlier count at the same place."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor) + count


def uses(tensor: torch.Tensor) -> int:
    """How many tensors lie in the same memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def is_gradient_kept(param: torch.Tensor) -> bool:
    """Whether anybody but the parameter itself refers to its gradient, or to its memory."""
    held, alone = _gradient(param), _alone()
    return held[0] > alone[0] or held[1] > alone[1]


def _gradient(param: torch.Tensor) -> tuple[int, int]:
    grad = param.grad
    assert grad is not None, "asked of parameters that have a gradient"
    return references(grad), uses(grad)


@functools.cache
def _alone() -> tuple[int, int]:
    """The counts of a gradient that nobody keeps."""
    param = torch.zeros(1, requires_grad=True)
    param.grad = torch.zeros(1)
    return _gradient(param)
