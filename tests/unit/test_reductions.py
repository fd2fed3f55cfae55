"""The arithmetic of reductions over many ranks, in one process."""

from __future__ import annotations

import pytest
import torch

from dualdist.backends.base import ReduceOp
from dualdist.backends.single import SingleBackend
from dualdist.collectives.reductions import allreduce_, reduce_rows


class Crowd(SingleBackend):
    """A backend of many ranks with equal values, whose transport supports only bytes and 32-bit numbers."""

    supported_reduce_dtypes = frozenset((torch.uint8, torch.int32, torch.float32))

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def allreduce_(self, buffer, op, name):  # type: ignore[no-untyped-def]
        if op in ("sum", "product"):
            buffer.copy_(buffer * self.size if op == "sum" else buffer**self.size)
        return super().allreduce_(buffer, op, name)


@pytest.mark.parametrize("size", [2, 255, 256, 512])
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
def test_reductions_of_equal_booleans_do_not_overflow(op: ReduceOp, size: int) -> None:
    mine = torch.tensor([True, False])
    assert reduce_rows(mine.repeat(size, 1), op).tolist() == [True, False]
    assert allreduce_(Crowd(size), mine, op, "test").wait().tolist() == [True, False]
