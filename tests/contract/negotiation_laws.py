"""Negotiation: collectives are matched by name, mismatches are errors, groups, joined ranks, and sessions."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contract.oracle import assert_close, gradients, law, law_alone, loss_of, net, raises, ranks, reopen, total_loss
from torch import nn

import dualdist as dd
from dualdist.errors import CollectiveError, MismatchError, NotInitializedError, UsageError

PAUSE_S = 0.3
"""By which one of two threads begins later than the other."""
SHUTDOWN_S = 0.3
"""Limit of the fastest of three shutdowns, on busy cores."""


@law
def named_collectives_match_in_any_order() -> None:
    names = [f"part {number}" for number in range(6)]
    order = names if dd.rank() % 2 else names[::-1]
    handles = {
        name: dd.allreduce(torch.full((2,), float(names.index(name) + dd.rank())), "sum", name=name, async_op=True)
        for name in order
    }
    for number, name in enumerate(names):
        for _ in range(2):
            assert handles[name].wait().tolist() == [float(sum(number + rank for rank in ranks()))] * 2
        assert handles[name].done()


@law
def barrier_does_not_wait_for_pending_collectives() -> None:
    """Rank 0 starts a collective that the others start two barriers later; the pending name is taken."""
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


@law
def mismatched_calls_are_errors_on_every_rank_and_lose_nothing() -> None:
    if dd.size() == 1:
        return
    odd = dd.rank() == dd.size() - 1
    two, three = torch.ones(2), torch.ones(2 + odd)
    double = torch.ones(2, dtype=torch.float64 if odd else torch.float32)
    op, order = "max" if odd else "sum", "ordered" if odd else "unordered"
    mismatches: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (lambda: dd.allreduce(three, "sum"), ("allreduce", "(2,)", "(3,)", f"rank {dd.size() - 1}")),
        (lambda: dd.allreduce(torch.ones((4, 1) if odd else (2, 2)), "sum"), ("(2, 2)", "(4, 1)")),
        (lambda: dd.allreduce(torch.ones(40 if odd else 2), "sum"), ("(2,)", "(40,)")),  # one inline, one not
        (lambda: dd.allreduce(double, "sum"), ("float32(2,)", "float64(2,)")),
        (lambda: dd.allreduce(two, op), ("op max", "op sum")),  # type: ignore[call-overload]
        (lambda: dd.allreduce(two, prescale=1.0 + odd), ("prescale 2.0",)),
        (lambda: dd.allreduce(two, reduction=order), ("reduction ordered", "reduction unordered")),  # type: ignore[call-overload]
        (lambda: dd.allreduce(two, "sum", name=f"sum {odd}"), ("'sum False'", "'sum True'")),
        (lambda: dd.broadcast(two, int(odd)), ("root 0", "root 1")),
        (lambda: dd.broadcast(three), ("(2,)", "(3,)")),
        (lambda: dd.broadcast(two) if odd else dd.allreduce(two), ("broadcast", "allreduce")),
        (lambda: dd.barrier() if odd else dd.allreduce(two), ("barrier", "allreduce")),
        (lambda: dd.allgather(torch.ones(2, 2 + odd)), ("(*, 2)", "(*, 3)")),
        (lambda: dd.allgather(torch.ones(2, 2) if odd else two), ("(*, 2)", "(*)")),
        (lambda: dd.allgather(double), ("float32(*)", "float64(*)")),
        (lambda: dd.alltoall(torch.ones(dd.size(), 2 + odd)), ("(*, 2)", "(*, 3)")),
        (lambda: dd.reducescatter(three), ("(2,)", "(3,)")),
        (lambda: dd.grouped_allreduce([two] * (1 + odd)), ("float32(2,), float32(2,)",)),
        (lambda: dd.broadcast_object(1, int(odd)), ("root 0", "root 1")),
        (lambda: dd.broadcast_parameters(net(), int(odd)), ("root 0", "root 1")),
        (lambda: dd.new_group([0] if odd else [0, 1]), ("[0]", "[0, 1]")),
        (lambda: dd.gather(two, int(odd)), ("root 0", "root 1")),
        (lambda: dd.scatter(two, int(odd)), ("root 0", "root 1")),
        (lambda: dd.gather(torch.ones(2, 2 + odd)), ("(*, 2)", "(*, 3)")),
        (lambda: dd.gather(double), ("float32", "float64")),
        (lambda: dd.gather(two) if odd else dd.scatter(two), ("gather", "scatter")),
    ]
    options: list[tuple[dict[str, object], tuple[str, ...]]] = [
        ({"op": "sum" if odd else "mean"}, ("op=sum", "op=mean")),
        ({"accumulate": 1 + odd}, ("accumulate=1", "accumulate=2")),
        ({"compression": "fp16" if odd else None}, ("float16", "None")),
        ({"gradient_predivide_factor": 1.0 + odd}, ("gradient_predivide_factor",)),
        ({"check_every": 1 + odd}, ("check_every=2",)),
        ({"reduction": order}, ("reduction=ordered", "reduction=unordered")),
    ]
    for chosen, words in options:
        optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
        mismatches.append((lambda o=optimizer, chosen=chosen: dd.wrap_optimizer(o, **chosen), words))  # type: ignore[misc]
    for call, words in mismatches:
        raises(MismatchError, call, *words)
        assert dd.allreduce(torch.ones(2), "sum").tolist() == [float(dd.size())] * 2


@law
def groups_overlap_and_are_removed() -> None:
    all_ranks = dd.new_group(ranks())
    first = dd.new_group([0])
    again = dd.new_group([0])
    evens = dd.new_group(range(0, dd.size(), 2))
    assert evens.ranks == tuple(range(0, dd.size(), 2))
    assert evens.is_member == (dd.rank() % 2 == 0)
    for group in (all_ranks, first, again, evens):
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
    raises(UsageError, lambda: dd.broadcast(torch.ones(1), dd.size(), group=all_ranks), "root")
    for group in (first, all_ranks, evens, again):
        dd.remove_group(group)
        raises(NotInitializedError, lambda group=group: dd.allreduce(torch.ones(1), group=group), "closed")
        raises(NotInitializedError, lambda group=group: dd.join(group=group), "closed")
        raises(UsageError, lambda group=group: dd.remove_group(group), "once")
    for wrong in ([], [0, dd.size()], [0, 0]):
        raises(UsageError, lambda wrong=wrong: dd.new_group(wrong), "ranks")


@law
def removed_groups_free_their_memory() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/dev/shm/")

    gc.collect()  # what other laws have left
    before = mapped()
    for _ in range(3):
        group = dd.new_group(ranks())
        dd.allreduce(torch.ones(1), group=group)
        dd.remove_group(group)
        del group
        gc.collect()
    assert mapped() == before


@law
def groups_train_independently() -> None:
    """The first rank alone, the others together: each like one process on that group's batches."""
    sides = [dd.new_group([0]), *([dd.new_group(range(1, dd.size()))] if dd.size() > 1 else [])]
    group = sides[dd.rank() > 0]
    model, alone = net(), net()
    dd.broadcast_parameters(model, group.ranks[0], group=group)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), group=group)
    (total_loss(alone, members=group.ranks) / group.size).backward()
    loss_of(model, dd.rank()).backward()
    assert_close(gradients(model), gradients(alone))
    optimizer.step()
    for side in sides:
        dd.remove_group(side)


@law
def joined_ranks_contribute_zeros() -> None:
    """Rank r has r + 1 batches; the mean still divides by all ranks; every rank learns the last one that joined."""
    for number in range(dd.rank() + 1):
        here = [rank for rank in ranks() if rank >= number]
        assert dd.allreduce(torch.ones(2), "sum").tolist() == [float(len(here))] * 2
        assert torch.equal(dd.allreduce(torch.ones(2)), torch.full((2,), len(here) / dd.size()))
        found = dd.grouped_allreduce([torch.tensor(dd.rank()), torch.ones(1, dtype=torch.bfloat16)], "sum")
        assert [tensor.item() for tensor in found] == [sum(here), len(here)]
        if number > 0:
            raises(MismatchError, lambda: dd.allgather(torch.ones(2)), "called join")
    assert dd.join() == dd.size() - 1
    assert dd.allreduce(torch.ones(1), "sum").item() == dd.size(), "all ranks take part again"


@law
def join_completes_the_ranks_pending_collectives() -> None:
    """With their own data; a rank that never started one counts as joined."""
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


def in_threads(*calls: Callable[[], object], pause_s: float = 0.0) -> list[str]:
    """Run each call in a thread of its own, begun one after the other; return the errors."""
    errors = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except CollectiveError as error:
            errors.append(f"{error}")

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
        time.sleep(pause_s)
    for thread in threads:
        thread.join()
    return errors


@law_alone
def calls_of_two_threads_are_paired_by_name_or_group() -> None:
    groups = [dd.new_group([*ranks()]) for _ in range(2)]

    def check(thread: int, **options: Any) -> None:
        for _ in range(100):
            assert dd.allreduce(torch.tensor(thread + 1.0), "sum", **options).item() == (thread + 1) * dd.size()

    of_names = in_threads(*[partial(check, thread, name=f"of thread {thread}") for thread in range(2)])
    of_groups = in_threads(*[partial(check, thread, group=groups[thread]) for thread in range(2)])
    assert (of_names, of_groups) == ([], [])


@law_alone
def calls_without_names_and_backwards_of_two_threads_are_refused_on_every_rank() -> None:
    if dd.size() == 1:
        return
    backend, is_last = dd.backend(), dd.rank() == dd.size() - 1
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]
    reduce: Callable[[], object] = lambda: dd.allreduce(torch.ones(2))  # noqa: E731

    def require(words: str, *calls: Callable[[], object]) -> None:
        """Let all ranks but the last one make both calls at the same time: the first one waits for the last rank."""
        time.sleep(is_last)
        errors = in_threads(*(calls[:1] if is_last else calls), pause_s=PAUSE_S)
        after = in_threads(reduce)
        assert after
        assert all(words in error for error in [*errors, *after]), (errors, after)
        dd.shutdown()
        reopen(backend)  # or the process would end with an error

    require("another thread waits for", reduce, reduce)
    for model in models:
        dd.broadcast_parameters(model)
    wrapped = [dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.0)) for model in models]
    backwards = [lambda model=model: model(torch.ones(8, 3)).sum().backward() for model in models]
    require("two threads run backward()", *backwards)
    assert len(wrapped) == len(models)  # kept until here


@law_alone
def an_abandoned_operation_meets_none_of_the_next_session() -> None:
    """A signal interrupts the first rank in a call that the others never make."""
    backend = dd.backend()
    for number in range(3):
        if dd.rank() == 0 and dd.size() > 1:
            former = signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, PAUSE_S)
            raises(KeyboardInterrupt, lambda: dd.allreduce(torch.full((1,), 1000.0)))
            signal.signal(signal.SIGALRM, former)
        dd.shutdown()
        reopen(backend)
        assert dd.allreduce(torch.full((1,), float(number)), "sum").item() == number * dd.size()
        assert dd.allgather_object((number, dd.rank())) == [(number, rank) for rank in ranks()]


@law_alone
def a_session_may_follow_another() -> None:
    """An optimizer is wrapped in one session, and again in the next one."""
    backend, rank, weight = dd.backend(), dd.rank(), nn.Parameter(torch.ones(1))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    dd.shutdown()
    raises(NotInitializedError, dd.size, "after dd.shutdown()")
    raises(NotInitializedError, (weight * rank).sum().backward, "dd.wrap_optimizer again")
    reopen(backend)
    dd.wrap_optimizer(optimizer)
    optimizer.zero_grad()
    (weight * rank).sum().backward()
    optimizer.step()
    assert weight.item() == 1 - sum(ranks()) / dd.size()
    assert dd.allreduce(torch.tensor(rank), "sum").item() == sum(ranks())


@law_alone
def shutdown_is_quick_and_restores_the_excepthook() -> None:
    """The store's server polls for its end at once. torch's default group prefixes errors by "[rank0]: "."""
    backend, hook, took = dd.backend(), None, []
    for _ in range(3):
        dd.barrier()
        began = time.monotonic()
        dd.shutdown()
        took.append(time.monotonic() - began)
        hook = hook or sys.excepthook
        assert sys.excepthook is hook
        reopen(backend)
    assert min(took) < SHUTDOWN_S, took
