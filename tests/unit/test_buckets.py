"""The assignment of gradients to buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from dualdist.ddp.bucket_plan import BUCKET_BYTES, FIRST_BUCKET_BYTES, ReducerConfig, plan_buckets

DTYPES = (torch.float32, torch.float16, torch.float64)
SIZES = st.integers(min_value=1, max_value=3 * FIRST_BUCKET_BYTES)
PARAMETERS = st.lists(st.tuples(SIZES, st.sampled_from(DTYPES)), min_size=0, max_size=30)


def parameters(specs: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    return [torch.empty(count, dtype=dtype, device="meta") for count, dtype in specs]


def backwards(params: Sequence[torch.Tensor]) -> range:
    return range(len(params) - 1, -1, -1)


def nbytes(params: Sequence[torch.Tensor], bucket: Sequence[int]) -> int:
    return sum(params[number].nbytes for number in bucket)


@given(PARAMETERS)
def test_every_parameter_is_in_one_bucket_of_its_dtype(specs: list[tuple[int, torch.dtype]]) -> None:
    params = parameters(specs)
    buckets = plan_buckets(params, backwards(params), ReducerConfig())
    assert sorted(number for bucket in buckets for number in bucket) == list(range(len(params)))
    for bucket in buckets:
        assert len({params[number].dtype for number in bucket}) == 1
        assert list(bucket) == sorted(bucket, reverse=True), "autograd finishes the last ones first"


@given(PARAMETERS)
def test_a_bucket_is_closed_by_the_parameter_that_fills_it(specs: list[tuple[int, torch.dtype]]) -> None:
    params = parameters(specs)
    for bucket in plan_buckets(params, backwards(params), ReducerConfig()):
        assert nbytes(params, bucket[:-1]) < BUCKET_BYTES


def test_the_first_bucket_is_small() -> None:
    params = parameters([(FIRST_BUCKET_BYTES // 8, torch.float32)] * 200)
    first, *others = plan_buckets(params, backwards(params), ReducerConfig())
    assert nbytes(params, first) == FIRST_BUCKET_BYTES
    assert [nbytes(params, bucket) for bucket in others[:-1]] == [BUCKET_BYTES] * (len(others) - 1)


def test_less_than_two_first_buckets_is_one_bucket() -> None:
    eighth = (FIRST_BUCKET_BYTES // 8 // 4, torch.float32)
    for count, buckets in ((15, 1), (16, 2)):
        params = parameters([eighth] * count)
        assert len(plan_buckets(params, backwards(params), ReducerConfig())) == buckets


def test_a_bucket_holds_one_device() -> None:
    params = [torch.empty(4), torch.empty(4, device="meta")]
    assert plan_buckets(params, backwards(params), ReducerConfig()) == [(1,), (0,)]


def test_buckets_follow_the_order_of_gradients() -> None:
    params = parameters([(FIRST_BUCKET_BYTES // 8, torch.float32)] * 6)
    first, second = plan_buckets(params, [3, 1, 0, 2, 5, 4], ReducerConfig())
    assert (first, second) == ((3, 1), (0, 2, 5, 4))


def test_bucket_sizes_are_configurable() -> None:
    params = parameters([(1 << 18, torch.float32)] * 8)
    config = ReducerConfig(bucket_bytes=3 << 20, first_bucket_bytes=2 << 20)
    assert [len(bucket) for bucket in plan_buckets(params, backwards(params), config)] == [2, 3, 3]
