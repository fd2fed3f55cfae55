"""The assignment of gradients to buckets, and the flags that a bucket carries."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.operation import Completed
from dualdist.backends.single import SingleBackend
from dualdist.ddp.bucket import Bucket
from dualdist.ddp.compression import CASTS, GradientCompressor
from dualdist.ddp.config import BUCKET_BYTES, FIRST_BUCKET_BYTES, ReducerConfig
from dualdist.ddp.layout import CONTRIBUTES, DISCARDS, HAS_JOINED, BucketLayout, plan_buckets
from dualdist.engine.channel import Channel
from dualdist.engine.monitor import Monitor

DTYPES = (torch.float32, torch.float16, torch.float64)
SIZES = st.integers(min_value=1, max_value=3 * FIRST_BUCKET_BYTES)
PARAMETERS = st.lists(st.tuples(SIZES, st.sampled_from(DTYPES)), min_size=0, max_size=30)


def parameters(specs: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    return [torch.empty(count, dtype=dtype, device="meta") for count, dtype in specs]


def planned(params: Sequence[torch.Tensor], config: ReducerConfig = ReducerConfig()) -> list[tuple[int, ...]]:  # noqa: B008
    return plan_buckets(params, range(len(params) - 1, -1, -1), config)


def nbytes(params: Sequence[torch.Tensor], bucket: Sequence[int]) -> int:
    return sum(params[number].nbytes for number in bucket)


@given(PARAMETERS)
def test_every_parameter_is_in_one_bucket_of_its_dtype_that_the_last_one_fills(
    specs: list[tuple[int, torch.dtype]],
) -> None:
    params = parameters(specs)
    buckets = planned(params)
    assert sorted(number for bucket in buckets for number in bucket) == list(range(len(params)))
    for bucket in buckets:
        assert len({params[number].dtype for number in bucket}) == 1
        assert list(bucket) == sorted(bucket, reverse=True), "autograd finishes the last ones first"
        assert nbytes(params, bucket[:-1]) < BUCKET_BYTES


def test_the_first_bucket_is_small_and_sizes_are_configurable() -> None:
    params = parameters([(FIRST_BUCKET_BYTES // 8, torch.float32)] * 200)
    first, *others = planned(params)
    assert nbytes(params, first) == FIRST_BUCKET_BYTES
    assert [nbytes(params, bucket) for bucket in others[:-1]] == [BUCKET_BYTES] * (len(others) - 1)
    for count, buckets in ((15, 1), (16, 2)):
        assert len(planned(parameters([(FIRST_BUCKET_BYTES // 8 // 4, torch.float32)] * count))) == buckets
    config = ReducerConfig(bucket_bytes=3 << 20, first_bucket_bytes=2 << 20)
    assert [len(bucket) for bucket in planned(parameters([(1 << 18, torch.float32)] * 8), config)] == [2, 3, 3]


def test_a_bucket_holds_one_device_and_follows_the_order_of_gradients() -> None:
    assert planned([torch.empty(4), torch.empty(4, device="meta")]) == [(1,), (0,)]
    params = parameters([(FIRST_BUCKET_BYTES // 8, torch.float32)] * 6)
    first, second = plan_buckets(params, [3, 1, 0, 2, 5, 4], ReducerConfig())
    assert (first, second) == ((3, 1), (0, 2, 5, 4))


class Signs:
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

    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> Completed[torch.Tensor]:
        assert op == "sum"
        sent = buffer.clone()
        for _ in range(self.size - 1):
            buffer += sent
        return Completed(buffer)


@pytest.mark.parametrize("size", [1, 256, 3000])
@pytest.mark.parametrize(
    "compressor", [None, CASTS["bf16"], Signs(torch.int8), Signs(torch.uint8)], ids=["float32", "bf16", "int8", "uint8"]
)
@pytest.mark.parametrize("flag", [CONTRIBUTES, HAS_JOINED, DISCARDS])
def test_flags_survive_the_sum_over_any_number_of_ranks(
    size: int, compressor: GradientCompressor | None, flag: int
) -> None:
    shapes = (torch.Size([3]), torch.Size([2]), torch.Size([]))
    plan = BucketLayout("b", shapes, ((1,), (1,), ()), torch.float32, torch.device("cpu"))
    bucket = Bucket(
        plan, ReducerConfig("sum", compressor), Channel(IdenticalRanks(size), Monitor(None, [0]), 5.0), set()
    )
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=False)
    bucket.values.zero_()
    bucket.launch([torch.zeros(3), sparse, None], flag)
    bucket.wait()
    bucket.unpack()
    assert bucket.read_flags() == [(True, False), (False, True), (False, False)]
    assert {each for each in (CONTRIBUTES, HAS_JOINED, DISCARDS) if bucket.any_rank_set(each)} == {flag}
