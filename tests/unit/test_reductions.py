"""What a reduction over many ranks makes of the values, without the ranks."""

from __future__ import annotations

import pytest
import torch

from dualdist.backends.base import ReduceOp
from dualdist.backends.single import SingleBackend
from dualdist.collectives.reductions import allreduce_, reduce_rows


class Crowd(SingleBackend):
    """So many ranks of equal values, whose transport knows no dtype but bytes and numbers of 32 bits."""

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
def test_booleans_stay_what_they_are_however_many_agree(op: ReduceOp, size: int) -> None:
    mine = torch.tensor([True, False])
    assert reduce_rows(mine.repeat(size, 1), op).tolist() == [True, False]
    assert allreduce_(Crowd(size), mine, op, "test").wait().tolist() == [True, False]
