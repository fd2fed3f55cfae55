"""Collectives that move tensors and objects, work handles, and arguments that are accepted or refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from contract.oracle import law, net, raises, ranks

import dualdist as dd
from dualdist.errors import AlreadyInitializedError, UsageError


@law
def allgather_keeps_rank_order_and_accepts_uneven_rows() -> None:
    even = dd.allgather(torch.full((2, 3), dd.rank()))
    assert torch.equal(even, torch.cat([torch.full((2, 3), rank) for rank in ranks()]))
    uneven = dd.allgather(torch.full((dd.rank(), 2), float(dd.rank())))
    assert torch.equal(uneven, torch.cat([torch.full((rank, 2), float(rank)) for rank in ranks()]))
    assert dd.allgather(torch.tensor(dd.rank())).tolist() == list(ranks())
    assert dd.allgather(torch.empty(0, 5)).shape == (0, 5)
    assert dd.allgather(torch.empty(dd.rank() + 1, 0)).shape == (sum(rank + 1 for rank in ranks()), 0)
    assert dd.allgather(torch.empty(2 * dd.rank(), 0)).shape == (sum(2 * rank for rank in ranks()), 0)


@law
def allgather_and_broadcast_move_any_dtype() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.complex64, torch.float64):
        mine = torch.tensor([[dd.rank(), 1]]).to(dtype)
        all_ranks = torch.tensor([[rank, 1] for rank in ranks()]).to(dtype)
        assert torch.equal(dd.allgather(mine), all_ranks), dtype
        assert torch.equal(dd.broadcast(mine, dd.size() - 1), all_ranks[-1:]), dtype
    scalar = torch.tensor(dd.rank() == 0)
    assert dd.broadcast_(scalar, 0).item() is True


@law
def broadcast_copies_the_roots_values() -> None:
    for root in ranks():
        mine = torch.full((4,), float(dd.rank()))
        assert dd.broadcast(mine, root).tolist() == [float(root)] * 4
        assert mine.tolist() == [float(dd.rank())] * 4
        crossed = torch.full((2, 3), float(dd.rank())).t()
        assert dd.broadcast_(crossed, root) is crossed
        assert crossed.tolist() == [[float(root)] * 2] * 3


@law
def objects_are_gathered_and_broadcast() -> None:
    mine = {"rank": dd.rank(), "text": "x" * (dd.rank() * 1000), "tensor": torch.arange(dd.rank())}
    for rank, other in enumerate(dd.allgather_object(mine)):
        assert (other["rank"], len(other["text"]), len(other["tensor"])) == (rank, rank * 1000, rank)
    for root in ranks():
        assert dd.broadcast_object((dd.rank(), None), root) == (root, None)


@law
def invalid_arguments_are_refused_with_their_value() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    wrapped = dd.wrap_optimizer(torch.optim.SGD(net().parameters(), lr=0.1))
    ones, size = torch.ones(2), dd.size()
    wrong: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (lambda: dd.allreduce(ones, "average"), ("average", "mean, sum")),  # type: ignore[call-overload]
        (lambda: dd.allreduce(torch.ones(2, dtype=torch.int64)), ("int64", "op='sum'")),
        (lambda: dd.broadcast(ones, size), (f"root={size}",)),
        (lambda: dd.broadcast_parameters(net().parameters()), ("named_parameters",)),  # type: ignore[arg-type]
        (lambda: dd.wrap_optimizer(net()), ("Sequential",)),  # type: ignore[type-var]
        (lambda: dd.wrap_optimizer(optimizer, accumulate=0), ("accumulate=0",)),
        (lambda: dd.wrap_optimizer(optimizer, op="max"), ("max",)),  # type: ignore[arg-type]
        (lambda: dd.wrap_optimizer(optimizer, gradient_predivide_factor=0.0), ("gradient_predivide_factor=0.0",)),
        (lambda: dd.wrap_optimizer(optimizer, net().named_parameters()), ("lacks",)),
        (lambda: dd.wrap_optimizer(wrapped), ("already",)),
        (lambda: dd.allreduce_(torch.ones(1).expand(3)), ("contiguous",)),
        (lambda: dd.broadcast_object(lambda: None), ("pickle",)),
        (lambda: dd.allgather_object(lambda: None if dd.rank() == 0 else 1), ("pickle",)),
        (lambda: dd.allreduce(ones, name=b"bytes"), ("name=b'bytes'",)),
        (lambda: dd.allgather(ones, name=1), ("name=1",)),
        (lambda: dd.broadcast(ones, 0.5), ("root",)),
        (lambda: dd.broadcast_object(1, "0"), ("root",)),
        (lambda: dd.allreduce(ones, prescale="twice"), ("twice",)),
        (lambda: dd.allreduce(ones, postscale=1j), ("1j",)),
        (lambda: dd.alltoall(torch.ones(size), [1.0] * size), ("splits",)),
        (lambda: dd.new_group([0.0]), ("ranks",)),
    ]
    for call, words in wrong:
        raises(UsageError, call, *words)
    raises(AlreadyInitializedError, dd.init, "shutdown")
    dd.barrier()


@law
def numbers_of_numpy_and_torch_are_accepted_as_arguments() -> None:
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
