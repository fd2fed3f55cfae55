"""Values of collectives, compared with exact arithmetic: every dtype, operation, scale, shape and split."""

import math

import torch
from contract.oracle import adasum, law, raises, ranks

import dualdist as dd
from dualdist import session
from dualdist.backends.arithmetic import Op
from dualdist.errors import MismatchError, UsageError

INTEGERS = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8)


def of(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which every dtype holds exactly."""
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def plain(tensor: torch.Tensor) -> list[float]:
    return tensor.to(torch.float64).tolist()


@law
def every_dtype_is_reduced_by_every_op() -> None:
    all_ranks = [[rank + 1.0, 2.0, 1.0] for rank in ranks()]
    mine = all_ranks[dd.rank()]
    columns = list(zip(*all_ranks, strict=True))
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
def booleans_are_reduced_logically() -> None:
    mine = torch.tensor([dd.rank() == 0, True, False])
    only_first = dd.size() == 1
    for op in ("sum", "max"):
        assert dd.allreduce(mine, op).tolist() == [True, True, False]
    for op in ("min", "product"):
        assert dd.allreduce(mine, op).tolist() == [only_first, True, False]
    for scales in ({"prescale": 2.0}, {"postscale": 0.5}):
        for call in (dd.allreduce, dd.reducescatter):
            raises(UsageError, lambda call=call, scales=scales: call(mine, "sum", **scales), "booleans")


@law
def min_and_max_propagate_nan() -> None:
    """As torch.maximum does: on whichever rank it is, with either sign, in every collective that reduces."""
    inf, nan = math.inf, math.nan
    all_ranks = torch.tensor([[-1.5, 0.0, -inf, inf, 2.0, -3.0, -7.0, 1e-40]]).repeat(dd.size(), 1)
    all_ranks += torch.arange(dd.size()).view(-1, 1)
    all_ranks[0, 4], all_ranks[-1, 5], all_ranks[0, 6] = nan, nan, -torch.tensor(nan)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2):
        given = all_ranks.to(dtype)
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
def complex_dtypes_are_summed_and_multiplied() -> None:
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
def unsigned_integers_are_ordered_and_wrap_around() -> None:
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
def prescale_and_postscale_multiply_before_and_after() -> None:
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
def any_shape_and_any_strides_are_accepted_by_every_collective() -> None:
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
def alltoall_sends_equal_or_given_numbers_of_rows() -> None:
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
    for wrong in ([3] * (size + 1), [5] + [0] * (size - 1), [-1] + [0] * (size - 1)):
        raises(UsageError, lambda wrong=wrong: dd.alltoall(torch.ones(3), wrong), "splits")
    raises(UsageError, lambda: dd.alltoall(torch.tensor(1.0)), "dimension")
    own = torch.full((3,), float(mine))  # what stays on its rank
    assert dd.alltoall(own, [3 * (rank == mine) for rank in ranks()])[0].tolist() == own.tolist()
    assert not getattr(session.current().backend, "running", None), "no work is left behind"


@law
def reducescatter_gives_the_remainder_to_the_first_ranks() -> None:
    for count in (0, 1, dd.size(), 2 * dd.size() + 1):
        mine = torch.arange(count * 2).view(count, 2) * (dd.rank() + 1)
        all_ranks = torch.stack([torch.arange(count * 2).view(count, 2) * (rank + 1) for rank in ranks()])
        each, more = divmod(count, dd.size())
        start = dd.rank() * each + min(dd.rank(), more)
        share = slice(start, start + each + (dd.rank() < more))
        oracle = {"sum": all_ranks.sum(0), "max": all_ranks.amax(0), "min": all_ranks.amin(0)}
        for op, expected in oracle.items():
            assert torch.equal(dd.reducescatter(mine, op), expected[share]), (count, op)  # type: ignore[call-overload]
        assert torch.equal(dd.reducescatter(mine.double()), all_ranks.double().mean(0)[share])
        grouped = dd.grouped_reducescatter([mine.int(), mine.to(torch.uint8)], "sum")
        assert torch.equal(grouped[0], all_ranks.sum(0).int()[share])
        assert torch.equal(grouped[1], all_ranks.sum(0).to(torch.uint8)[share])


@law
def grouped_collectives_handle_each_tensor_or_none() -> None:
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
def adasum_of_tensors_combines_ranks_pairwise() -> None:
    if dd.size() == 3:
        raises(UsageError, lambda: dd.allreduce(torch.ones(2), "adasum"), "power of two")
        return
    all_ranks = [
        torch.randn(50, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in ranks()
    ]
    expected = adasum(all_ranks)
    mine = all_ranks[dd.rank()]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2)):
        found = dd.allreduce(mine.to(dtype), "adasum")
        torch.testing.assert_close(found, expected.to(dtype), rtol=tolerance, atol=tolerance)
    parts = dd.grouped_allreduce([mine, 2 * mine], "adasum")
    torch.testing.assert_close(parts[1], 2 * expected, rtol=1e-12, atol=1e-12)
    same = torch.tensor([3.0, 4.0])
    assert torch.allclose(dd.allreduce(same, "adasum"), same), "parallel gradients: their mean"
    apart = torch.zeros(dd.size())
    apart[dd.rank()] = 1.0
    assert torch.equal(dd.allreduce(apart, "adasum"), torch.ones(dd.size())), "orthogonal gradients: their sum"
    assert torch.equal(dd.allreduce(torch.zeros(3), "adasum"), torch.zeros(3))


@law
def sparse_tensors_are_reduced_sparsely() -> None:
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


# One value, what just rides along and what does not any more, one piece of memory, and several with a remainder.
COUNTS = (1, 2, 16, 17, 32, 33, 5000, 300_001)


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(count).remainder(5).add(1 + dd.rank()).to(dtype)


def reduced(count: int, dtype: torch.dtype, op: Op) -> torch.Tensor:
    every = torch.stack([torch.arange(count).remainder(5).add(1 + rank).double() for rank in ranks()])
    found = {
        "sum": every.sum(0),
        "mean": every.mean(0),
        "min": every.amin(0),
        "max": every.amax(0),
        "product": every.prod(0),
    }[op]
    return found.to(dtype)


@law
def allreduce_agrees_blocking_async_and_in_place_at_every_size() -> None:
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        ops: tuple[Op, ...] = ("sum", "min", "max", "product", *(("mean",) if dtype.is_floating_point else ()))
        for count in COUNTS:
            for op in ops if count in (2, 33) else ops[-1:]:
                x, total = numbers(count, dtype), reduced(count, dtype, op)
                torch.testing.assert_close(dd.allreduce(x, op), total, rtol=1e-6, atol=0)
                assert torch.equal(x, numbers(count, dtype)), "the argument is left alone"
                later = dd.allreduce(x, op, async_op=True)
                torch.testing.assert_close(later.wait(), total, rtol=1e-6, atol=0)
                assert dd.allreduce_(x, op) is x
                torch.testing.assert_close(x, total, rtol=1e-6, atol=0)


@law
def allreduce_without_grad_returns_no_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        assert not dd.allreduce(parameter, "sum").requires_grad
        assert dd.allreduce_(parameter, "sum") is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf


@law
def one_rank_may_block_where_others_wait_later() -> None:
    """The blocking rank takes the fast path, the others the usual one."""
    for turn in range(2 * dd.size()):
        for count in (2, 5000):
            x = numbers(count, torch.float32)
            if dd.rank() == turn % dd.size():
                found = dd.allreduce(x, "sum", name="together")
            else:
                found = dd.allreduce(x, "sum", name="together", async_op=True).wait()
            assert torch.equal(found, reduced(count, torch.float32, "sum"))


@law
def long_names_are_exchanged_in_several_messages() -> None:
    for length in (300, 700, 1500, 5000):
        assert dd.allreduce(torch.ones(2), "sum", name="n" * length).tolist() == [dd.size()] * 2
