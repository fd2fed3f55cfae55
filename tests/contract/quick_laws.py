"""The laws of the quick ways: values that ride along, pieces between two ranks, gradients in shared memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
from contract.oracle import assert_close, gradients, law, law_alone, loss_of, mean_gradients, net, raises, ranks
from torch import nn

import dualdist as dd
from dualdist.collectives.reductions import Op
from dualdist.errors import MismatchError

# One value, what just rides along and what does not any more, one piece of memory, and several with a remainder.
COUNTS = (1, 2, 16, 17, 32, 33, 5000, 300_001)


def mine(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(count).remainder(5).add(1 + dd.rank()).to(dtype)


def expected(count: int, dtype: torch.dtype, op: Op) -> torch.Tensor:
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
def every_way_of_an_allreduce_gives_the_same() -> None:
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        ops: tuple[Op, ...] = ("sum", "min", "max", "product", *(("mean",) if dtype.is_floating_point else ()))
        for count in COUNTS:
            for op in ops if count in (2, 33) else ops[-1:]:
                x, total = mine(count, dtype), expected(count, dtype, op)
                torch.testing.assert_close(dd.allreduce(x, op), total, rtol=1e-6, atol=0)
                assert torch.equal(x, mine(count, dtype)), "the argument is left alone"
                later = dd.allreduce(x, op, async_op=True)
                torch.testing.assert_close(later.wait(), total, rtol=1e-6, atol=0)
                assert dd.allreduce_(x, op) is x
                torch.testing.assert_close(x, total, rtol=1e-6, atol=0)


@law
def results_keep_shape_and_dtype_and_have_no_gradient_of_their_own() -> None:
    for shape in ((), (1,), (2, 1, 3)):
        found = dd.allreduce(torch.ones(shape), "sum")
        assert found.shape == torch.Size(shape)
        assert torch.equal(found, torch.full(shape, float(dd.size())))
    parameter = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        assert not dd.allreduce(parameter, "sum").requires_grad
        assert dd.allreduce_(parameter, "sum") is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf


@law
def ranks_may_wait_at_once_or_later_for_the_same_operation() -> None:
    """One goes the quick way, the others the usual one, and in the next turn it is another's."""
    for turn in range(2 * dd.size()):
        for count in (2, 5000):
            x = mine(count, torch.float32)
            if dd.rank() == turn % dd.size():
                found = dd.allreduce(x, "sum", name="together")
            else:
                found = dd.allreduce(x, "sum", name="together", async_op=True).wait()
            assert torch.equal(found, expected(count, torch.float32, "sum"))


@law
def the_quick_way_refuses_what_ranks_pass_differently_and_goes_on() -> None:
    if dd.size() == 1:
        return
    differing: tuple[Callable[[], object], ...] = (
        lambda: dd.allreduce(torch.ones(2 + dd.rank() % 2), "sum", name="shape"),
        lambda: dd.allreduce(torch.ones(2), "sum" if dd.rank() else "max", name="op"),
        lambda: dd.allreduce(torch.ones(2, dtype=torch.float64 if dd.rank() else torch.float32), "sum", name="dtype"),
        lambda: dd.allreduce(torch.ones(40 if dd.rank() else 2), "sum", name="one rides, one does not"),
        lambda: dd.allreduce(torch.ones(2), "sum", name=f"name {dd.rank() % 2}"),
    )
    for call in differing:
        dd.allreduce(torch.ones(2), "sum")
        raises(MismatchError, call)
        assert dd.allreduce(torch.ones(2), "sum").tolist() == [dd.size()] * 2


@law
def long_names_travel_in_several_messages() -> None:
    for length in (300, 700, 1500, 5000):
        assert dd.allreduce(torch.ones(2), "sum", name="n" * length).tolist() == [dd.size()] * 2


def watched(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The gradients, as tensors of their own in the same memory, and what they are now."""
    return [(p.grad.detach(), p.grad.clone()) for p in model.parameters() if p.grad is not None]


@law
def gradients_that_a_program_keeps_outlive_everything() -> None:
    """Later steps, another optimizer in their place, a plan that changes, and the optimizer itself."""
    for set_to_none in (True, False):
        model = net()
        optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        kept = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            right = mean_gradients(model, (step,))
            loss_of(model, dd.rank(), step).backward()
            assert_close(gradients(model), right)
            if set_to_none and step in (0, 1, 2, 4):
                kept += watched(model)
                kept += [(grad, grad.clone()) for p in model.parameters() if (grad := p.grad) is not None]
            optimizer.step()
        kept += watched(model)
        del optimizer, model
        gc.collect()
        for _ in range(2):  # what the first one had is given back while the others are made
            table = torch.nn.Embedding(5, 3, sparse=True)
            net_and_table = torch.nn.ModuleList([net(), table])
            optimizer = dd.wrap_optimizer(torch.optim.SGD(net_and_table.parameters(), lr=0.1))
            for step in range(5):
                optimizer.zero_grad()
                rows = torch.tensor([step % 5, dd.rank() % 5])
                right = mean_gradients(net_and_table[0], (step,))
                (loss_of(net_and_table[0], dd.rank(), step) + table(rows).sum()).backward()
                assert_close(gradients(net_and_table[0]), right)
                kept += watched(net_and_table[0])
                optimizer.step()
        for now, then in kept:
            assert torch.equal(now, then)


@law
def a_rank_that_has_joined_keeps_its_gradients() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
        optimizer.step()
    kept = watched(model)
    if dd.rank():
        for step in range(3, 6):
            optimizer.zero_grad()
            loss_of(model, dd.rank(), step).backward()
            optimizer.step()
    dd.join()
    for now, then in kept:
        assert torch.equal(now, then)


def halve(grad: torch.Tensor) -> None:
    """As programs clip: the gradient gets other memory."""
    grad.data = grad.data / 2


MOVES: tuple[Callable[[torch.Tensor], object], ...] = (halve, torch.Tensor.share_memory_, lambda g: g.set_(g.clone()))


@law
def gradients_that_a_program_moves_are_reduced_where_they_are_next() -> None:
    """On one rank only, on all, of some parameters or of all; with memory that ranks share and without."""
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for move in MOVES:
        for which in (lambda number: number == 0, lambda number: number < 2 or dd.rank() == 0):
            for step in range(4):
                optimizer.zero_grad(set_to_none=step < 2)
                loss_of(model, dd.rank(), step).backward()
                assert_close(gradients(model), mean_gradients(model, (step,)))
                for number, param in enumerate(model.parameters()):
                    if param.grad is not None and which(number):
                        before = param.grad.clone()
                        move(param.grad)
                        assert torch.equal(param.grad, before / 2 if move is halve else before)


def shared_bytes() -> int:
    """What the files in memory take that this process has open and that have no name."""
    files = {entry.stat().st_ino: entry.stat() for entry in os.scandir("/proc/self/fd") if is_unnamed(entry.path)}
    return 512 * sum(found.st_blocks for found in files.values())


def is_unnamed(link: str) -> bool:
    try:
        return os.readlink(link).startswith("/dev/shm/#")
    except OSError:
        return False


@law_alone
def optimizers_that_every_rank_has_dropped_take_no_memory() -> None:
    """As a search over hyperparameters makes them: one after the other, in one session."""
    used = []
    for trial in range(4):
        weights = [nn.Parameter(torch.ones(1 << 18)) for _ in range(2)]
        optimizer = dd.wrap_optimizer(torch.optim.SGD(weights, lr=0.1 * (trial + 1)))
        for _ in range(3):
            optimizer.zero_grad()
            sum(weight.sum() for weight in weights).mul(dd.rank() + 1).backward()
            assert weights[0].grad.unique().tolist() == [sum(rank + 1 for rank in ranks()) / dd.size()]
            optimizer.step()
        if dd.rank():
            del weights, optimizer
        used.append(shared_bytes())
        assert used[-1] <= used[min(1, trial)], used
    dd.join()


@law_alone
def what_an_interrupted_backward_left_survives_a_join() -> None:
    """Those who have joined take part in rounds with zeros, in the same shared memory."""
    weight, other = nn.Parameter(torch.ones(1 << 16)), nn.Parameter(torch.ones(1))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([other, weight], lr=0.1))
    scale = float(dd.rank() + 1)

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("refused")

    if dd.rank() == 0:
        product = other * 2
        product.register_hook(refuse)
        raises(ValueError, (product.sum() + weight.sum() * scale).backward, "refused")
    else:
        (weight.sum() * scale).backward()
        optimizer.zero_grad()
    dd.join()
    other.sum().backward()
    assert weight.grad.unique().tolist() == [1.0 / dd.size()], "the first rank's, and nothing of the others"
    optimizer.step()
