"""The laws of how ranks meet: by name, in groups, after some have joined; and of errors where they differ."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from contract.oracle import assert_close, assert_same_everywhere, gradients, law, law_alone, loss_of, net, raises, ranks
from torch import nn

import dualdist as dd
from dualdist.errors import MismatchError, NotInitializedError, UsageError

LEAVE_S = 0.3
"""What leaving may take where other programs keep the cores busy."""


@law
def operations_meet_by_name_in_whatever_order_they_begin() -> None:
    names = [f"part {number}" for number in range(6)]
    order = names if dd.rank() % 2 else names[::-1]
    handles = {
        name: dd.allreduce(torch.full((2,), float(names.index(name) + dd.rank())), "sum", name=name, async_op=True)
        for name in order
    }
    for number, name in enumerate(names):
        assert handles[name].wait().tolist() == [float(sum(number + rank for rank in ranks()))] * 2
        assert handles[name].done()


@law
def a_barrier_does_not_wait_behind_what_is_under_way() -> None:
    """The first rank begins what the others begin only after two barriers; a name under way is taken."""
    handle = None
    for turn in range(2):
        if turn == (dd.rank() > 0):
            handle = dd.allreduce(torch.ones(2), "sum", name="turn by turn", async_op=True)
            if dd.rank() == 0 and dd.size() > 1:
                raises(UsageError, lambda: dd.allreduce(torch.ones(2), name="turn by turn"), "still under way")
        dd.barrier()
    assert handle is not None
    assert handle.wait().tolist() == [float(dd.size())] * 2
    assert dd.allreduce(torch.ones(1), "sum", name="turn by turn").item() == dd.size(), "its name is free again"


def mismatches() -> list[tuple[Callable[[], object], tuple[str, ...]]]:
    """Calls in which the last rank differs from the others, and what their errors say."""
    odd = dd.rank() == dd.size() - 1
    double = torch.float64 if odd else torch.float32
    last = f"rank {dd.size() - 1}"
    op = "max" if odd else "sum"
    return [
        (lambda: dd.allreduce(torch.ones(2 + odd), "sum"), ("allreduce", "(2,)", "(3,)", last)),
        (lambda: dd.allreduce(torch.ones((4, 1) if odd else (2, 2)), "sum"), ("(2, 2)", "(4, 1)")),
        (lambda: dd.allreduce(torch.ones(2, dtype=double), "sum"), ("float32(2,)", "float64(2,)")),
        (lambda: dd.allreduce(torch.ones(2), op), ("op max", "op sum")),  # type: ignore[call-overload]
        (lambda: dd.allreduce(torch.ones(2), prescale=1.0 + odd), ("prescale 2.0",)),
        (lambda: dd.allreduce(torch.ones(2), name=f"sum {odd}"), ("'sum False'", "'sum True'")),
        (lambda: dd.broadcast(torch.ones(2), int(odd)), ("root 0", "root 1")),
        (lambda: dd.broadcast(torch.ones(2 + odd)), ("(2,)", "(3,)")),
        (lambda: dd.broadcast(torch.ones(2)) if odd else dd.allreduce(torch.ones(2)), ("broadcast", "allreduce")),
        (lambda: dd.barrier() if odd else dd.allreduce(torch.ones(2)), ("barrier", "allreduce")),
        (lambda: dd.allgather(torch.ones(2, 2 + odd)), ("(*, 2)", "(*, 3)")),
        (lambda: dd.allgather(torch.ones(2, 2) if odd else torch.ones(2)), ("(*, 2)", "(*)")),
        (lambda: dd.alltoall(torch.ones(dd.size(), 2 + odd)), ("(*, 2)", "(*, 3)")),
        (lambda: dd.reducescatter(torch.ones(2 + odd)), ("(2,)", "(3,)")),
        (lambda: dd.grouped_allreduce([torch.ones(2)] * (1 + odd)), ("float32(2,), float32(2,)",)),
        (lambda: dd.broadcast_object(1, int(odd)), ("root 0", "root 1")),
        (lambda: dd.broadcast_parameters(net(), int(odd)), ("root 0", "root 1")),
        (lambda: dd.new_group([0] if odd else [0, 1]), ("[0]", "[0, 1]")),
    ]


@law
def ranks_that_differ_are_an_error_by_name_on_every_rank_and_nothing_is_lost() -> None:
    if dd.size() == 1:
        return
    for call, words in mismatches():
        raises(MismatchError, call, *words)
        assert dd.allreduce(torch.ones(2), "sum").tolist() == [float(dd.size())] * 2


@law
def the_plan_of_gradients_is_compared_once() -> None:
    if dd.size() == 1:
        return
    odd = dd.rank() == 1
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    raises(MismatchError, lambda: dd.wrap_optimizer(optimizer, op="sum" if odd else "mean"), "op=sum", "op=mean")
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    raises(MismatchError, lambda: dd.wrap_optimizer(optimizer, accumulate=1 + odd), "accumulate=1", "accumulate=2")
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    raises(MismatchError, lambda: dd.wrap_optimizer(optimizer, compression="fp16" if odd else None), "float16", "None")


@law
def groups_overlap_and_come_and_go() -> None:
    everybody = dd.new_group(ranks())
    first = dd.new_group([0])
    again = dd.new_group([0])
    evens = dd.new_group(range(0, dd.size(), 2))
    assert evens.ranks == tuple(range(0, dd.size(), 2))
    assert evens.is_member == (dd.rank() % 2 == 0)
    for group in (everybody, first, again, evens):
        if not group.is_member:
            raises(UsageError, lambda group=group: dd.allreduce(torch.ones(1), group=group), "no member")
            raises(UsageError, lambda group=group: dd.join(group=group), "no member")
            continue
        assert group.rank == group.ranks.index(dd.rank())
        assert dd.allreduce(torch.tensor([dd.rank()]), "sum", group=group).item() == sum(group.ranks)
        assert dd.allreduce(torch.tensor([float(dd.rank())]), group=group).item() == sum(group.ranks) / group.size
        assert dd.allgather(torch.full((dd.rank() + 1,), dd.rank()), group=group).tolist() == [
            rank for rank in group.ranks for _ in range(rank + 1)
        ]
        assert dd.broadcast(torch.tensor(dd.rank()), group.ranks[-1], group=group).item() == group.ranks[-1]
        assert dd.alltoall(torch.full((group.size,), dd.rank()), group=group).tolist() == list(group.ranks)
        assert dd.broadcast_object(dd.rank(), group.ranks[-1], group=group) == group.ranks[-1]
        assert dd.allgather_object(dd.rank(), group=group) == list(group.ranks)
        dd.barrier(group=group)
    if dd.rank() != 0:
        raises(UsageError, lambda: dd.broadcast(torch.ones(1), dd.size(), group=everybody), "root")
    for group in (first, everybody, evens, again):
        dd.remove_group(group)
        raises(NotInitializedError, lambda group=group: dd.allreduce(torch.ones(1), group=group), "closed")
        raises(NotInitializedError, lambda group=group: dd.join(group=group), "closed")
        raises(UsageError, lambda group=group: dd.remove_group(group), "once")
    raises(UsageError, lambda: dd.new_group([]), "ranks")
    raises(UsageError, lambda: dd.new_group([0, dd.size()]), "ranks")
    raises(UsageError, lambda: dd.new_group([0, 0]), "ranks")


@law
def a_group_trains_by_itself() -> None:
    """The first rank alone, the others together: each like one process on that group's batches."""
    sides = [dd.new_group([0]), *([dd.new_group(range(1, dd.size()))] if dd.size() > 1 else [])]
    group = sides[dd.rank() > 0]
    model = net()
    dd.broadcast_parameters(model, group.ranks[0], group=group)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), group=group)
    alone = net()
    (sum(loss_of(alone, rank) for rank in group.ranks) / group.size).backward()
    loss_of(model, dd.rank()).backward()
    assert_close(gradients(model), gradients(alone))
    optimizer.step()
    for side in sides:
        dd.remove_group(side)


@law
def those_who_join_add_zeros() -> None:
    """Rank r has r + 1 batches; the mean still divides by all ranks; the last one to join is told to everybody."""
    for number in range(dd.rank() + 1):
        here = [rank for rank in ranks() if rank >= number]
        assert dd.allreduce(torch.ones(2), "sum").tolist() == [float(len(here))] * 2
        assert torch.equal(dd.allreduce(torch.ones(2)), torch.full((2,), len(here) / dd.size()))
        found = dd.grouped_allreduce([torch.tensor(dd.rank()), torch.ones(1, dtype=torch.bfloat16)], "sum")
        assert [tensor.item() for tensor in found] == [sum(here), len(here)]
        if number > 0:
            raises(MismatchError, lambda: dd.allgather(torch.ones(2)), "called join")
    assert dd.join() == dd.size() - 1
    assert dd.allreduce(torch.ones(1), "sum").item() == dd.size(), "afterwards everybody is back"


@law
def those_who_join_finish_first_what_they_have_begun() -> None:
    """With their own data; whoever has not begun it has joined, or is an error to those who have."""
    handle = dd.allreduce(torch.tensor(dd.rank() + 1.0), "sum", name="begun", async_op=True)
    lone = dd.allreduce(torch.ones(1), "sum", name="lone", async_op=True) if dd.rank() == 0 else None
    if dd.rank() == dd.size() - 1:
        handle.wait()
        dd.allreduce(torch.ones(1), "sum", name="lone") if dd.rank() else None
    last = dd.join()
    assert 0 <= last < dd.size()
    assert handle.done()
    assert handle.wait().item() == sum(rank + 1 for rank in ranks())
    if lone is not None:
        assert lone.wait().item() == min(2, dd.size())


@law
def those_who_join_let_the_others_train() -> None:
    """Rank 0 has the most batches; a step is that of one process whose missing batches have no loss."""
    torch.manual_seed(0)
    for several in (False, True):
        model = net()
        dd.broadcast_parameters(model)
        other = dd.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)) if several else None
        optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        alone = net()
        plain_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(dd.size() - dd.rank() + 1):
            optimizer.zero_grad()
            loss_of(model, dd.rank(), step).backward()
            plain_optimizer.zero_grad()
            here = [rank for rank in ranks() if step < dd.size() - rank + 1]
            (sum(loss_of(alone, rank, step) for rank in here) / dd.size()).backward()
            assert_close(gradients(model), gradients(alone))
            optimizer.step()
            plain_optimizer.step()
        assert dd.join() == 0
        dd.broadcast_parameters(model, 0)
        assert_same_everywhere(model)
        del other


@law_alone
def a_session_is_left_without_a_wait() -> None:
    """As a search over hyperparameters leaves one after the other; a server that is asked to end looks up at once."""
    backend, took = dd.backend(), []
    for _ in range(3):
        dd.barrier()
        began = time.monotonic()
        dd.shutdown()
        took.append(time.monotonic() - began)
        dd.init(None if backend == "single" else backend, timeout_s=40)
    assert min(took) < LEAVE_S, took
