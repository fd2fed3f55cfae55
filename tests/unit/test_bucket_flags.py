"""Flags of a bucket for any number of ranks and any wire dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualdist.backends.base import UNRESERVED, CompletedWork, ReduceOp
from dualdist.backends.single import SingleBackend
from dualdist.ddp.bucket_plan import CONTRIBUTES, DISCARDS, HAS_JOINED, BucketPlan, ReducerConfig
from dualdist.ddp.buckets import Bucket
from dualdist.ddp.compression import CASTS, GradientCompressor


class Signs:
    """Compress gradients to an integer dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor.to(self._dtype), None

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.float()


class IdenticalRanks(SingleBackend):
    """A backend of `size` ranks that all send the same."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> CompletedWork:
        assert op == "sum"
        sent = buffer.clone()
        for _ in range(self.size - 1):
            buffer += sent
        return CompletedWork(buffer)


@pytest.mark.parametrize("size", [1, 2, 128, 256, 3000])
@pytest.mark.parametrize(
    "compressor",
    [None, CASTS["bf16"], CASTS["fp16"], Signs(torch.int8), Signs(torch.uint8), Signs(torch.int64)],
    ids=["float32", "bf16", "fp16", "int8", "uint8", "int64"],
)
@pytest.mark.parametrize("flag", [CONTRIBUTES, HAS_JOINED, DISCARDS])
def test_flags_survive_the_sum_over_any_number_of_ranks(
    size: int, compressor: GradientCompressor | None, flag: int
) -> None:
    shapes = (torch.Size([3]), torch.Size([2]), torch.Size([]))
    plan = BucketPlan("b", shapes, ((1,), (1,), ()), torch.float32, torch.device("cpu"), UNRESERVED)
    bucket = Bucket(plan, ReducerConfig("sum", compressor), IdenticalRanks(size), set())
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=False)
    bucket.launch([torch.zeros(3), sparse, None], flag)
    bucket.wait()
    bucket.unpack()
    assert bucket.read_flags() == [(True, False), (False, True), (False, False)]
    assert {each for each in (CONTRIBUTES, HAS_JOINED, DISCARDS) if bucket.any_rank_set(each)} == {flag}
