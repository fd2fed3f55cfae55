"""The laws of moving tensors and objects; each function runs on every rank. The oracle is exact integer arithmetic."""

from __future__ import annotations

import numpy as np
import torch
from contract.oracle import (
    law,
    net,
    raises,
    ranks,
)

import dualdist as dd
from dualdist import session
from dualdist.errors import AlreadyInitializedError, MismatchError, UsageError


@law
def allreduce_reduces_every_element_exactly() -> None:
    mine = torch.arange(5) + 10 * (dd.rank() + 1)
    everybody = torch.stack([torch.arange(5) + 10 * (rank + 1) for rank in ranks()])
    oracle = {"sum": everybody.sum(0), "min": everybody.amin(0), "max": everybody.amax(0), "product": everybody.prod(0)}
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        for op, expected in oracle.items():
            given = mine.to(dtype)
            result = dd.allreduce(given, op)
            assert result.dtype == dtype
            assert torch.equal(result, expected.to(dtype)), (dtype, op, result)
            assert torch.equal(given, mine.to(dtype)), "the argument is left alone"
    for dtype in (torch.float16, torch.uint8, torch.int8):
        ones = torch.ones(3, dtype=dtype)
        assert torch.equal(dd.allreduce(ones, "sum"), ones * dd.size()), dtype
    assert torch.equal(dd.allreduce(mine.double()), everybody.double().mean(0))


@law
def allreduce_keeps_shapes_and_strides() -> None:
    scalar = dd.allreduce(torch.tensor(3.0), "sum")
    assert scalar.shape == ()
    assert scalar.item() == 3 * dd.size()
    assert dd.allreduce(torch.empty(0, 4), "sum").shape == (0, 4)
    crossed = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(dd.allreduce(crossed, "sum"), crossed * dd.size())
    in_place = torch.arange(6.0).reshape(2, 3).t()
    returned = dd.allreduce_(in_place, "sum")
    assert returned is in_place
    assert torch.equal(in_place, crossed * dd.size())
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert torch.equal(dd.allreduce(image, "sum"), torch.full((2, 3, 4, 4), float(dd.size())))


@law
def a_handle_finishes_once_and_keeps_its_result() -> None:
    handles = [dd.allreduce(torch.full((3,), float(i + dd.rank())), "sum", async_op=True) for i in range(4)]
    for i, handle in enumerate(handles):
        expected = float(sum(i + rank for rank in ranks()))
        assert handle.wait().tolist() == [expected] * 3
        assert handle.wait().tolist() == [expected] * 3
        assert handle.done()


@law
def allgather_keeps_rank_order_and_takes_uneven_rows() -> None:
    even = dd.allgather(torch.full((2, 3), dd.rank()))
    assert torch.equal(even, torch.cat([torch.full((2, 3), rank) for rank in ranks()]))
    uneven = dd.allgather(torch.full((dd.rank(), 2), float(dd.rank())))
    assert torch.equal(uneven, torch.cat([torch.full((rank, 2), float(rank)) for rank in ranks()]))
    assert dd.allgather(torch.tensor(dd.rank())).tolist() == list(ranks())
    assert dd.allgather(torch.empty(0, 5)).shape == (0, 5)
    assert dd.allgather(torch.empty(dd.rank() + 1, 0)).shape == (sum(rank + 1 for rank in ranks()), 0)
    assert dd.allgather(torch.empty(2 * dd.rank(), 0)).shape == (sum(2 * rank for rank in ranks()), 0)


@law
def what_is_only_moved_may_have_any_dtype() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.complex64, torch.float64):
        mine = torch.tensor([[dd.rank(), 1]]).to(dtype)
        everybody = torch.tensor([[rank, 1] for rank in ranks()]).to(dtype)
        assert torch.equal(dd.allgather(mine), everybody), dtype
        assert torch.equal(dd.broadcast(mine, dd.size() - 1), everybody[-1:]), dtype
    scalar = torch.tensor(dd.rank() == 0)
    assert dd.broadcast_(scalar, 0).item() is True


@law
def bfloat16_is_reduced() -> None:
    assert dd.allreduce(torch.ones(3, dtype=torch.bfloat16), "sum").tolist() == [float(dd.size())] * 3


@law
def broadcast_gives_roots_values() -> None:
    for root in ranks():
        mine = torch.full((4,), float(dd.rank()))
        assert dd.broadcast(mine, root).tolist() == [float(root)] * 4
        assert mine.tolist() == [float(dd.rank())] * 4
        crossed = torch.full((2, 3), float(dd.rank())).t()
        assert dd.broadcast_(crossed, root) is crossed
        assert crossed.tolist() == [[float(root)] * 2] * 3


@law
def objects_travel_whole() -> None:
    mine = {"rank": dd.rank(), "text": "x" * (dd.rank() * 1000), "tensor": torch.arange(dd.rank())}
    for rank, other in enumerate(dd.allgather_object(mine)):
        assert (other["rank"], len(other["text"]), len(other["tensor"])) == (rank, rank * 1000, rank)
    for root in ranks():
        assert dd.broadcast_object((dd.rank(), None), root) == (root, None)


@law
def a_barrier_waits_for_everybody() -> None:
    for _ in range(3):
        dd.barrier()


@law
def wrong_arguments_are_refused_by_name() -> None:
    raises(UsageError, lambda: dd.allreduce(torch.ones(2), "average"), "average", "mean, sum")  # type: ignore[call-overload]
    raises(UsageError, lambda: dd.allreduce(torch.ones(2, dtype=torch.int64)), "int64", "op='sum'")
    raises(UsageError, lambda: dd.broadcast(torch.ones(2), dd.size()), f"root={dd.size()}")
    raises(UsageError, lambda: dd.broadcast_parameters(net().parameters()), "named_parameters")  # type: ignore[arg-type]
    raises(UsageError, lambda: dd.wrap_optimizer(net()), "Sequential")  # type: ignore[type-var]
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    raises(UsageError, lambda: dd.wrap_optimizer(optimizer, accumulate=0), "accumulate=0")
    raises(UsageError, lambda: dd.wrap_optimizer(optimizer, op="max"), "max")  # type: ignore[arg-type]
    raises(UsageError, lambda: dd.wrap_optimizer(optimizer, net().named_parameters()), "lacks")
    raises(AlreadyInitializedError, dd.init, "shutdown")
    raises(UsageError, lambda: dd.allreduce_(torch.ones(1).expand(3)), "contiguous")
    raises(UsageError, lambda: dd.broadcast_object(lambda: None), "pickle")
    raises(UsageError, lambda: dd.allgather_object(lambda: None if dd.rank() == 0 else 1), "pickle")


@law
def arguments_of_numpy_are_as_good_as_those_of_python() -> None:
    last = np.int64(dd.size() - 1)
    assert dd.broadcast(torch.tensor(dd.rank()), last).item() == last
    assert dd.broadcast_(torch.tensor(dd.rank()), torch.tensor(last)).item() == last
    assert dd.broadcast_object(dd.rank(), last) == last
    half, two = np.float32(0.5), torch.tensor(2.0)
    assert dd.allreduce(torch.ones(1), "sum", prescale=half).item() == dd.size() / 2
    assert dd.grouped_allreduce([torch.ones(1)], "sum", postscale=half)[0].item() == dd.size() / 2
    assert dd.reducescatter(torch.ones(dd.size()), "sum", prescale=two).item() == dd.size() * 2
    rows, _ = dd.alltoall(torch.full((dd.size(),), dd.rank()), np.ones(dd.size(), dtype=np.int8))
    assert rows.tolist() == list(ranks())
    group = dd.new_group(np.arange(dd.size()))
    assert group.ranks == tuple(ranks())
    dd.remove_group(group)
    for call, word in (
        (lambda: dd.allreduce(torch.ones(1), name=b"bytes"), "name=b'bytes'"),
        (lambda: dd.allgather(torch.ones(1), name=1), "name=1"),
        (lambda: dd.broadcast(torch.ones(1), 0.5), "root"),
        (lambda: dd.broadcast_object(1, "0"), "root"),
        (lambda: dd.allreduce(torch.ones(1), prescale="twice"), "twice"),
        (lambda: dd.allreduce(torch.ones(1), postscale=1j), "1j"),
        (lambda: dd.alltoall(torch.ones(dd.size()), [1.0] * dd.size()), "splits"),
        (lambda: dd.new_group([0.0]), "ranks"),
    ):
        raises(UsageError, call, word)
    dd.barrier()


@law
def rows_that_do_not_fit_are_an_error_on_every_rank() -> None:
    if dd.size() > 1:
        raises(MismatchError, lambda: dd.allgather(torch.ones(2, 3 + dd.rank() % 2)), "(*, 3)", "(*, 4)")
        raises(
            MismatchError, lambda: dd.allgather(torch.ones(2, dtype=(torch.int8, torch.float64)[dd.rank() % 2])), "int8"
        )


@law
def an_alltoall_in_which_a_rank_keeps_everything_leaves_nothing_behind() -> None:
    mine = torch.full((3,), float(dd.rank()))
    counts = [3 * (rank == dd.rank()) for rank in ranks()]
    assert dd.alltoall(mine, counts)[0].tolist() == mine.tolist()
    assert not getattr(session.current().backend, "under_way", None)
