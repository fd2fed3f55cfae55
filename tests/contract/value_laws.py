"""The laws of what operations give, against exact arithmetic: every dtype, scale, shape and split."""

from __future__ import annotations

import math

import torch
from contract.oracle import law, raises, ranks

import dualdist as dd
from dualdist.errors import MismatchError, UsageError

INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


def of(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which every dtype holds exactly."""
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def plain(tensor: torch.Tensor) -> list[float]:
    return tensor.to(torch.float64).tolist()


@law
def every_dtype_is_reduced_by_every_operation() -> None:
    everybody = [[rank + 1.0, 2.0, 1.0] for rank in ranks()]
    mine = everybody[dd.rank()]
    columns = list(zip(*everybody, strict=True))
    oracle = {
        "sum": [sum(column) for column in columns],
        "min": [min(column) for column in columns],
        "max": [max(column) for column in columns],
        "product": [math.prod(column) for column in columns],
    }
    for dtype in (*INTEGERS, *FLOATS):
        for op, expected in oracle.items():
            found = dd.allreduce(of(mine, dtype), op)  # type: ignore[call-overload]
            assert found.dtype == dtype
            assert plain(found) == plain(of(expected, dtype)), (dtype, op)
    for dtype in FLOATS:
        mean = [total / dd.size() for total in oracle["sum"]]
        assert plain(dd.allreduce(of(mine, dtype))) == plain(of(mean, dtype)), dtype


@law
def booleans_are_reduced_as_logic() -> None:
    mine = torch.tensor([dd.rank() == 0, True, False])
    only_first = dd.size() == 1
    assert dd.allreduce(mine, "sum").tolist() == [True, True, False]
    assert dd.allreduce(mine, "max").tolist() == [True, True, False]
    assert dd.allreduce(mine, "min").tolist() == [only_first, True, False]
    assert dd.allreduce(mine, "product").tolist() == [only_first, True, False]
    for scales in ({"prescale": 2.0}, {"postscale": 0.5}):
        raises(UsageError, lambda scales=scales: dd.allreduce(mine, "sum", **scales), "booleans")
        raises(UsageError, lambda scales=scales: dd.reducescatter(mine, "sum", **scales), "booleans")


@law
def the_least_and_the_greatest_of_numbers_and_nan_is_nan() -> None:
    """On whichever rank it is, with either sign; as torch.maximum, and in every way that the values take."""
    inf, nan = math.inf, math.nan
    everybody = torch.tensor([[-1.5, 0.0, -inf, inf, 2.0, -3.0, -7.0, 1e-40]]).repeat(dd.size(), 1)
    everybody += torch.arange(dd.size()).view(-1, 1)
    everybody[0, 4], everybody[-1, 5], everybody[0, 6] = nan, nan, -torch.tensor(nan)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2):
        given = everybody.to(dtype)
        wide = given.double()
        for op, expected in (("max", wide.amax(0)), ("min", wide.amin(0))):
            expected[4:7] = nan
            mine = given[dd.rank()]
            for found in (
                dd.allreduce(mine, op),  # type: ignore[call-overload]
                dd.grouped_allreduce([mine, mine.float()], op)[0],  # type: ignore[call-overload]
                dd.allreduce(mine.repeat(2000), op)[-8:],  # type: ignore[call-overload]
                dd.allgather(dd.reducescatter(mine, op)),  # type: ignore[call-overload]
            ):
                assert torch.equal(found.double().nan_to_num(1e9), expected.nan_to_num(1e9)), (dtype, op, found)


@law
def complex_numbers_are_added_and_multiplied() -> None:
    for dtype in (torch.complex64, torch.complex128):
        mine = torch.tensor([complex(1, dd.rank()), 2j], dtype=dtype)
        size = dd.size()
        total = [complex(size, sum(ranks())), 2j * size]
        assert dd.allreduce(mine, "sum").tolist() == total
        assert dd.allreduce(mine).tolist() == [number / size for number in total]
        assert dd.allreduce(mine, "product").tolist() == [
            math.prod([complex(1, rank) for rank in ranks()], start=1),
            math.prod([2j] * size, start=1),
        ]
    raises(UsageError, lambda: dd.allreduce(torch.ones(1, dtype=torch.complex64), "max"), "no order")


@law
def unsigned_numbers_keep_their_order_and_wrap_round() -> None:
    top = torch.tensor([2**64 - 1 - dd.rank(), dd.rank()], dtype=torch.uint64)
    last = dd.size() - 1
    assert dd.allreduce(top, "max").tolist() == [2**64 - 1, last]
    assert dd.allreduce(top, "min").tolist() == [2**64 - 1 - last, 0]
    assert dd.allreduce(top, "sum").tolist()[0] == sum(2**64 - 1 - rank for rank in ranks()) % 2**64
    shared = dd.reducescatter(top.repeat(dd.size()), "max")
    assert shared.tolist() == [2**64 - 1, last]
    full = torch.tensor([200], dtype=torch.uint8)
    assert dd.allreduce(full, "sum").tolist() == [200 * dd.size() % 256]


@law
def scales_multiply_before_and_after() -> None:
    mine = torch.tensor([1.0, 3.0]) * (dd.rank() + 1)
    total = torch.tensor([1.0, 3.0]) * sum(rank + 1 for rank in ranks())
    assert torch.equal(dd.allreduce(mine, "sum", prescale=0.5, postscale=4.0), total * 2)
    assert torch.equal(dd.grouped_allreduce([mine], "sum", postscale=0.25)[0], total * 0.25)
    assert mine.tolist() == [1.0 * (dd.rank() + 1), 3.0 * (dd.rank() + 1)], "the argument is left alone"
    counts = torch.tensor([3, -3])
    assert dd.allreduce(counts, "sum", prescale=0.5).tolist() == [dd.size(), -dd.size()], "cut off towards zero"
    assert dd.allreduce(counts, "sum", postscale=0.5).tolist() == [int(1.5 * dd.size()), -int(1.5 * dd.size())]
    shared = dd.reducescatter(torch.ones(dd.size(), 2), "sum", prescale=3.0, postscale=0.5)
    assert shared.tolist() == [[1.5 * dd.size()] * 2]


@law
def strange_shapes_and_strides_survive_every_operation() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for tensor in (
        torch.tensor(2.0),
        torch.empty(0, 3),
        torch.empty(3, 0),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(1).expand(4),
        torch.arange(10.0)[::3],
        image,
    ):
        dd.broadcast_(same := tensor.clone(), 0)
        assert torch.equal(dd.allreduce(same, "sum"), same * dd.size())
        assert torch.equal(dd.grouped_allreduce([same, same], "max")[1], same)
        assert torch.equal(dd.broadcast(same, dd.size() - 1), same)
        rows = same.reshape(1) if same.dim() == 0 else same
        assert torch.equal(dd.allgather(same), torch.cat([rows] * dd.size()))
        if same.dim():
            splits = [same.shape[0]] + [0] * (dd.size() - 1)
            found, received = dd.alltoall(same, splits)
            assert torch.equal(found, torch.cat([same] * dd.size()) if dd.rank() == 0 else same[:0])
            assert received.tolist() == [same.shape[0] if dd.rank() == 0 else 0] * dd.size()
    dd.broadcast_(image, 0)
    assert dd.allreduce(image).is_contiguous(memory_format=torch.channels_last)


@law
def alltoall_sends_rows_where_they_shall_go() -> None:
    size, mine = dd.size(), dd.rank()
    for dtype in (torch.float32, torch.int16, torch.bool, torch.bfloat16):
        equal = dd.alltoall(of([mine] * size * 2, dtype))
        assert plain(equal) == plain(of([rank for rank in ranks() for _ in range(2)], dtype))
    # Rank r sends i + 2 r rows to rank i.
    splits = [rank + 2 * mine for rank in ranks()]
    rows = torch.full((sum(splits), 2), float(mine))
    found, received = dd.alltoall(rows, torch.tensor(splits))
    assert received.tolist() == [mine + 2 * rank for rank in ranks()]
    assert received.dtype == torch.int64
    assert torch.equal(found, torch.cat([torch.full((mine + 2 * rank, 2), float(rank)) for rank in ranks()]))
    raises(UsageError, lambda: dd.alltoall(torch.ones(3), [3] * (size + 1)), "splits")
    raises(UsageError, lambda: dd.alltoall(torch.ones(3), [5] + [0] * (size - 1)), "splits")
    raises(UsageError, lambda: dd.alltoall(torch.ones(3), [-1] + [0] * (size - 1)), "splits")
    raises(UsageError, lambda: dd.alltoall(torch.tensor(1.0)), "dimension")


@law
def reducescatter_gives_the_first_ranks_the_remainder() -> None:
    for count in (0, 1, dd.size(), 2 * dd.size() + 1):
        mine = torch.arange(count * 2).view(count, 2) * (dd.rank() + 1)
        everybody = torch.stack([torch.arange(count * 2).view(count, 2) * (rank + 1) for rank in ranks()])
        each, more = divmod(count, dd.size())
        start = dd.rank() * each + min(dd.rank(), more)
        share = slice(start, start + each + (dd.rank() < more))
        oracle = {"sum": everybody.sum(0), "max": everybody.amax(0), "min": everybody.amin(0)}
        for op, expected in oracle.items():
            assert torch.equal(dd.reducescatter(mine, op), expected[share]), (count, op)  # type: ignore[call-overload]
        assert torch.equal(dd.reducescatter(mine.double()), everybody.double().mean(0)[share])
        grouped = dd.grouped_reducescatter([mine.int(), mine.to(torch.uint8)], "sum")
        assert torch.equal(grouped[0], everybody.sum(0).int()[share])
        assert torch.equal(grouped[1], everybody.sum(0).to(torch.uint8)[share])


@law
def grouped_operations_do_each_of_their_tensors() -> None:
    mine = [torch.full((3,), float(dd.rank())), torch.tensor(dd.rank()), torch.ones(2, 2, dtype=torch.bfloat16)]
    found = dd.grouped_allreduce(mine, "sum")
    assert found[0].tolist() == [float(sum(ranks()))] * 3
    assert found[1].item() == sum(ranks())
    assert found[2].dtype == torch.bfloat16
    assert found[2].tolist() == [[float(dd.size())] * 2] * 2
    in_place = [torch.ones(2), torch.ones(3)]
    assert dd.grouped_allreduce_(in_place, "sum")[1] is in_place[1]
    assert in_place[1].tolist() == [float(dd.size())] * 3
    gathered = dd.grouped_allgather([torch.full((dd.rank(), 2), True), torch.tensor([dd.rank()], dtype=torch.int16)])
    assert gathered[0].shape == (sum(ranks()), 2)
    assert gathered[1].tolist() == list(ranks())
    raises(UsageError, lambda: dd.grouped_allreduce([]), "at least one")
    if dd.size() > 1:
        parts = [torch.ones(2), torch.ones(2 + dd.rank())]
        raises(MismatchError, lambda: dd.grouped_allreduce_(parts), "float32(2,)", "float32(3,)")
        assert parts[0].tolist() == [1.0, 1.0], "all of them or none"


@law
def adasum_follows_the_pairwise_rule() -> None:
    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dot = (a * b).sum()
        return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b

    def tree(gradients: list[torch.Tensor]) -> torch.Tensor:
        half = len(gradients) // 2
        return gradients[0] if half == 0 else pair(tree(gradients[:half]), tree(gradients[half:]))

    if dd.size() == 3:
        raises(UsageError, lambda: dd.allreduce(torch.ones(2), "adasum"), "power of two")
        return
    everybody = [
        torch.randn(50, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in ranks()
    ]
    expected = tree(everybody)
    mine = everybody[dd.rank()]
    torch.testing.assert_close(dd.allreduce(mine, "adasum"), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dd.allreduce(mine.float(), "adasum"), expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dd.allreduce(mine.half(), "adasum"), expected.half(), rtol=1e-2, atol=1e-2)
    parts = dd.grouped_allreduce([mine, 2 * mine], "adasum")
    torch.testing.assert_close(parts[1], 2 * expected, rtol=1e-12, atol=1e-12)
    same = torch.tensor([3.0, 4.0])
    assert torch.allclose(dd.allreduce(same, "adasum"), same), "parallel gradients: their mean"
    apart = torch.zeros(dd.size())
    apart[dd.rank()] = 1.0
    assert torch.equal(dd.allreduce(apart, "adasum"), torch.ones(dd.size())), "orthogonal gradients: their sum"
    assert torch.equal(dd.allreduce(torch.zeros(3), "adasum"), torch.zeros(3))


@law
def sparse_tensors_are_added_where_they_are() -> None:
    rank, size = dd.rank(), dd.size()
    indices = torch.tensor([[0, rank + 1], [1, 0]])
    mine = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (size + 1, 2), check_invariants=True)
    dense = sum(
        torch.zeros(size + 1, 2).index_put((torch.tensor([0, r + 1]), torch.tensor([1, 0])), torch.tensor([1.0, 2.0]))
        for r in ranks()
    )
    total = dd.allreduce(mine, "sum")
    assert total.is_sparse
    assert torch.equal(total.to_dense(), dense)
    assert torch.equal(dd.allreduce(mine).to_dense(), dense / size)
    assert torch.equal(dd.allreduce(mine, "sum", prescale=0.5, postscale=8.0).to_dense(), dense * 4)
    assert torch.equal(dd.allreduce(mine, prescale=2.0).to_dense(), dense / size * 2)
    assert mine.coalesce().values().tolist() == [1.0, 2.0], "the argument is left alone"
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1, 2]), (1,), check_invariants=True)
    assert dd.allreduce(twice, "sum", prescale=0.5).to_dense().tolist() == [size], "added up, then cut off"
    if size > 1:
        raises(MismatchError, lambda: dd.allreduce(mine, prescale=1.0 + rank % 2), "prescale 2.0")
    empty = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3), (4, 3), check_invariants=True
    )
    assert torch.equal(dd.allreduce(empty, "sum").to_dense(), torch.zeros(4, 3))
