"""reduction="ordered": the bits of one process that adds the values of all ranks one after the other, in rank order."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from contract.oracle import gradients, law, law_alone, loss_of, net, raises, ranks
from torch import nn

import dualdist as dd
import dualdist.hvd as hvd
from dualdist import session
from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import Backend
from dualdist.backends.operation import Operation
from dualdist.collectives.reductions import allreduce_
from dualdist.engine.channel import Channel, Work
from dualdist.errors import UsageError

# One element, fewer than ranks, no multiple of the ranks, and more than all ways to send small tensors take.
COUNTS = (1, 3, 1001, 100_001)
SMALL = (torch.float16, torch.bfloat16)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of many magnitudes, whose sum is another one in almost every other order."""
    return doubles(rank, count).to(dtype)


@functools.cache
def doubles(rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * count + rank)
    spread = torch.randn(count, generator=generator, dtype=torch.float64).mul(2).exp()
    return torch.randn(count, generator=generator, dtype=torch.float64) * spread


def in_rank_order(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce in this process; small numbers in float32, rounded once."""
    dtype = parts[0].dtype
    total, *others = [part.float() if dtype in SMALL else part for part in parts]
    for other in others:
        total = total * other if op == "product" else total + other
    return (total / len(parts) if op == "mean" else total).to(dtype)


def assert_same_bits(found: torch.Tensor | None, expected: torch.Tensor, what: object) -> None:
    assert found is not None, what
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    different = ((found != expected) & ~(found.isnan() & expected.isnan())).sum().item()
    assert not different, f"{what}: {different} of {len(found)} numbers have other bits"


def is_in_one_memory() -> bool:
    """Return True where every sum is made in rank order."""
    return dd.transport() == "shm" and dd.num_nodes() == 1


@law
def every_number_of_16_bits_is_reduced_in_float32_and_rounded_once() -> None:
    if not is_in_one_memory():
        return
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    factors = torch.linspace(-3, 3, 1 << 16)
    for dtype in SMALL:
        parts = [every.view(dtype), *(factors.roll(rank).to(dtype) for rank in ranks()[1:])]
        for op, combine in (("sum", torch.add), ("product", torch.mul), ("min", torch.minimum), ("max", torch.maximum)):
            expected = functools.reduce(combine, [part.float() for part in parts]).to(dtype)
            for count in (1 << 16, 1000, 37):  # shared by the ranks, alone, and not by whole vectors
                found = dd.allreduce(parts[dd.rank()][:count], op)  # type: ignore[call-overload]
                assert_same_bits(found, expected[:count], (op, dtype, count))


@law
def ordered_reductions_have_the_bits_of_rank_order() -> None:
    for op in ("mean", "sum", "product"):
        for dtype in (torch.float32, torch.float64, *SMALL, torch.complex64):
            for count in COUNTS:
                if dtype.is_complex and op == "product":
                    continue  # in rank order by default, too
                expected = in_rank_order(op, [values(rank, count, dtype) for rank in ranks()])
                is_alike = is_in_one_memory() and not (op == "mean" and dtype in SMALL)  # whose sum is rounded, too
                for reduction in ("ordered", "unordered") if is_alike else ("ordered",):
                    found = dd.allreduce(values(dd.rank(), count, dtype), op, reduction=reduction)
                    assert_same_bits(found, expected, (op, dtype, count, reduction))


@law
def every_way_to_reduce_can_be_ordered() -> None:
    count, order = 5003, "ordered"
    for dtype in (torch.float32, torch.bfloat16):
        mine, all_ranks = values(dd.rank(), count, dtype), [values(rank, count, dtype) for rank in ranks()]
        mean, total = in_rank_order("mean", all_ranks), in_rank_order("sum", all_ranks)
        assert_same_bits(dd.allreduce(mine, reduction=order, async_op=True).wait(), mean, "async")
        assert_same_bits(dd.allreduce_(mine.clone(), "sum", reduction=order), total, "in place")
        assert_same_bits(dd.allreduce_(mine.clone(), reduction=order, async_op=True).wait(), mean, "async in place")
        wholes = torch.arange(4)
        found = dd.grouped_allreduce([mine, wholes, mine.double(), 2 * mine], "sum", reduction=order)
        assert_same_bits(found[0], total, "grouped")
        assert_same_bits(found[3], 2 * total, "grouped")
        assert torch.equal(found[1], wholes * dd.size())
        share = dd.reducescatter(mine, reduction=order)
        begin = sum(count // dd.size() + (rank < count % dd.size()) for rank in range(dd.rank()))
        assert_same_bits(share, mean[begin : begin + len(share)], "reducescatter")
        twice = dd.allreduce(mine, "sum", prescale=2.0, postscale=0.5, reduction=order)
        assert_same_bits(twice, total, "scaled by powers of two")
        largest = dd.allreduce(mine, "max", reduction=order)
        assert_same_bits(largest, torch.stack(all_ranks).amax(0), "max")
        given = torch.ones(count, dtype=dtype, requires_grad=True)
        (dd.allreduce(given, reduction=order) * mine).sum().backward()
        assert_same_bits(given.grad, mean, "gradient")
        strided = mine[: count - 1].view(-1, 2).t()
        assert_same_bits(dd.allreduce(strided, "sum", reduction=order).t().reshape(-1), total[: count - 1], "strided")
        group = dd.new_group(ranks())
        assert_same_bits(dd.allreduce(mine, group=group, reduction=order), mean, "group")
        dd.remove_group(group)


@law
def three_ranks_divide_a_mean_once_and_round_it_once() -> None:
    """In a group, where there are three: a third of a small number is rounded, a half or a quarter is not."""
    members = range(min(3, dd.size()))
    group = dd.new_group(members)
    if group.is_member:
        for dtype in (torch.float32, *SMALL):
            parts = [values(rank, 5003, dtype) for rank in members]
            mine, mean = parts[dd.rank()], in_rank_order("mean", parts)
            assert_same_bits(dd.allreduce(mine, group=group, reduction="ordered"), mean, dtype)
            share = dd.reducescatter(mine, group=group, reduction="ordered")
            assert_same_bits(dd.allgather(share, group=group), mean, ("reducescatter", dtype))
            weight = nn.Parameter(torch.ones(5003, dtype=dtype))
            optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), group=group, reduction="ordered")
            (weight * mine).sum().backward()
            assert_same_bits(weight.grad, mean, ("gradient", dtype))
            optimizer.step()
    dd.remove_group(group)


@law
def a_session_whose_default_is_ordered_orders_every_reduction() -> None:
    """As by DUALDIST_REDUCTION: gradients of collectives, the optimizer's, and those of Horovod's face."""
    world, count = session.current().world, 5003
    mine, all_ranks = values(dd.rank(), count, torch.float32), [values(rank, count, torch.float32) for rank in ranks()]
    mean = in_rank_order("mean", all_ranks)
    world.reduction = "ordered"
    try:
        assert_same_bits(dd.allreduce(mine), mean, "allreduce")
        hvd.init()
        assert_same_bits(hvd.allreduce(mine), mean, "hvd")
        given = torch.ones(count, requires_grad=True)
        (dd.broadcast(given) * mine).sum().backward()
        assert_same_bits(given.grad, mean if dd.rank() == 0 else torch.zeros(count), "gradient of broadcast")
        weight = nn.Parameter(torch.ones(count))
        optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
        (weight * mine).sum().backward()
        assert_same_bits(weight.grad, mean, "gradient of a parameter")
        optimizer.step()
        raises(UsageError, lambda: dd.allreduce(mine, "adasum"), "'ordered'")
        dd.allreduce(mine, reduction="unordered")
    finally:
        world.reduction = "unordered"


@law
def what_has_no_order_is_refused_with_the_reason() -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ones, order = torch.ones(2), "ordered"
    refusals: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (lambda: dd.allreduce(ones, "adasum", reduction=order), ("adasum", "pairs of ranks")),
        (lambda: dd.allreduce(ones, reduction="order"), ("'order'", "ordered, unordered")),  # type: ignore[call-overload]
        (lambda: dd.wrap_optimizer(sgd, op="adasum", reduction=order), ("adasum", "pairs of ranks")),
        (lambda: dd.wrap_optimizer(sgd, compression="bf16", reduction=order), ("compression", "choose one")),
        (lambda: dd.wrap_optimizer(sgd, reduction="rank"), ("'rank'", "ordered, unordered")),  # type: ignore[arg-type]
    ]
    for call, words in refusals:
        raises(UsageError, call, *words)


def ordered_gradients(model: nn.Module, step: int) -> list[torch.Tensor | None]:
    """Return the mean of all ranks' gradients, each computed in this process, added in rank order."""
    parts = []
    for rank in ranks():
        model.zero_grad()
        loss_of(model, rank, step).backward()
        parts.append(gradients(model))
    model.zero_grad()
    return [None if mine[0] is None else in_rank_order("mean", mine) for mine in zip(*parts, strict=True)]


@law_alone
def ordered_gradients_do_not_depend_on_the_buckets() -> None:
    """In one session, where buckets leave early; small ones hold a tensor each."""
    for dtype in (torch.float32, torch.bfloat16):
        for megabytes in (25.0, 0.0001):
            model = net().to(dtype)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            options = {"bucket_cap_mb": megabytes, "first_bucket_mb": megabytes}
            optimizer = dd.wrap_optimizer(sgd, reduction="ordered", **options)
            for step in range(3):
                expected = ordered_gradients(net_like(model), step)
                optimizer.zero_grad()
                loss_of(model, dd.rank(), step).backward()
                for mine, right in zip(gradients(model), expected, strict=True):
                    assert (mine is None) == (right is None)
                    if mine is not None and right is not None:
                        assert_same_bits(mine.reshape(-1), right.reshape(-1), (dtype, megabytes, step))
                optimizer.step()
            del optimizer, sgd


def net_like(model: nn.Module) -> nn.Module:
    """Return another model of the same values and dtype."""
    other = net().to(next(model.parameters()).dtype)
    other.load_state_dict(model.state_dict())
    return other


@law_alone
def joined_ranks_take_part_in_ordered_gradients() -> None:
    """Rank r has r + 1 batches; there are several buckets, of which the second ones are sent while others wait."""
    weights = [nn.Parameter(torch.ones(40_000)) for _ in range(4)]
    options = {"bucket_cap_mb": 0.1, "first_bucket_mb": 0.01}
    optimizer = dd.wrap_optimizer(torch.optim.SGD(weights, lr=0.1), reduction="ordered", **options)
    for number in range(dd.rank() + 1):
        here = [rank for rank in ranks() if rank >= number]
        optimizer.zero_grad()
        sum((weight * (dd.rank() + 1)).sum() for weight in weights).backward()
        mean = sum(rank + 1 for rank in here) / dd.size()
        assert all(torch.equal(weight.grad, torch.full_like(weight, mean)) for weight in weights)
        assert torch.equal(dd.allreduce(torch.ones(3000), "sum", reduction="ordered"), torch.full((3000,), len(here)))
    assert dd.join() == dd.size() - 1
    optimizer.zero_grad()
    sum(weight.sum() for weight in weights).backward()
    assert all(torch.equal(weight.grad, torch.ones_like(weight)) for weight in weights)


@law
def ordered_sparse_gradients_have_the_bits_of_rank_order() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        table = nn.Embedding(3, 200, sparse=True, dtype=dtype)
        dd.broadcast_parameters(table)
        optimizer = dd.wrap_optimizer(torch.optim.SGD(table.parameters(), lr=0.1), reduction="ordered")
        factors = [values(rank, 200, dtype) for rank in ranks()]
        (table(torch.tensor([1])) * factors[dd.rank()]).sum().backward()
        assert table.weight.grad.is_sparse
        found = table.weight.grad.to_dense()
        assert_same_bits(found[1], in_rank_order("mean", factors), dtype)
        assert not found[::2].any()
        optimizer.step()


@law
def ranks_of_several_hosts_reduce_their_slices() -> None:
    """In this one host, whose ranks are told that they are on two, evenly or not; also in rank order."""
    if dd.transport() != "shm" or dd.size() < 4:
        return
    world = session.current().world
    parent = world._parent
    one_host = parent.hosts
    for hosts in ([0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1]):
        parent.hosts = hosts
        channel = Channel(parent.duplicate(f"{hosts}"), world.monitor, 30.0)

        def start(op: ReduceOp, tensor: torch.Tensor, channel: Channel = channel, **options: Any) -> Work[torch.Tensor]:
            def begin(backend: Backend) -> Operation[torch.Tensor]:
                return allreduce_(backend, tensor, op, f"{op} {tensor.numel()}", **options)

            return channel.start(op, begin)

        for count in (3, 5_000, 300_000, 3_000_017):
            mine = torch.full((count,), float(dd.rank()))
            lowest = start("min", mine.clone())
            total = start("sum", torch.empty(count), source=mine)
            mean = start("mean", mine.clone())
            assert mean.wait().unique().tolist() == [sum(ranks()) / dd.size()], "it was begun last"
            assert total.wait().unique().tolist() == [sum(ranks())]
            assert lowest.wait().unique().tolist() == [0.0]
        for dtype in (torch.float64, torch.int32, torch.uint8):
            mine = (torch.arange(100_003) % 7 + dd.rank()).to(dtype)
            expected = torch.stack([(torch.arange(100_003) % 7 + rank).to(dtype) for rank in ranks()]).sum(0).to(dtype)
            assert torch.equal(start("sum", mine).wait(), expected)
        gathered = channel.run("gather", lambda backend: backend.allgather(torch.tensor([dd.rank()]), "gather"))
        assert gathered.tolist() == list(ranks())
        parts = {count: [values(rank, count, torch.float32) for rank in ranks()] for count in COUNTS}
        works = {count: start("mean", parts[count][dd.rank()].clone(), is_ordered=True) for count in COUNTS}
        if dd.rank() % 2:
            while not all(work.done() for work in works.values()):
                pass  # these ranks begin the second messages before they wait
        for count in reversed(COUNTS):
            assert_same_bits(works[count].wait(), in_rank_order("mean", parts[count]), count)
        channel.backend.close()
    parent.hosts = one_host
