"""Gradients in buffers that the reduction reuses: what a program keeps or moves stays intact, and memory is freed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
from contract.optimizer_laws import by_hvd
from contract.oracle import (
    assert_close,
    gradients,
    law,
    law_alone,
    loss_of,
    mean_gradients,
    mean_scale,
    net,
    raises,
    refuse,
)
from torch import nn

import dualdist as dd
from dualdist import session


def watched(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each gradient as another tensor on the same storage, and a copy of its values."""
    return [(p.grad.detach(), p.grad.clone()) for p in model.parameters() if p.grad is not None]


@law
def kept_gradients_keep_their_values() -> None:
    """In later steps, with another optimizer of the same parameters, and after the optimizer is freed."""
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
        for _ in range(2):  # the first one's buffers are freed while the others are made
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
def joined_ranks_keep_their_gradients() -> None:
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
    """Halve by replacing the storage, as some programs clip."""
    grad.data = grad.data / 2


MOVES: tuple[Callable[[torch.Tensor], object], ...] = (halve, torch.Tensor.share_memory_, lambda g: g.set_(g.clone()))


@law
def gradients_whose_storage_the_program_replaces_are_reduced() -> None:
    """On one rank only or on all, of some parameters or of all; in shared memory and elsewhere."""
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
    """Return the bytes of the unlinked shared-memory files that this process has open."""
    files = {entry.stat().st_ino: entry.stat() for entry in os.scandir("/proc/self/fd") if is_unnamed(entry.path)}
    return 512 * sum(found.st_blocks for found in files.values())


def is_unnamed(link: str) -> bool:
    try:
        return os.readlink(link).startswith("/dev/shm/#")
    except OSError:
        return False


@law_alone
def optimizers_freed_on_every_rank_free_shared_memory() -> None:
    """As in a hyperparameter search, which wraps one optimizer after the other in one session."""
    used = []
    for trial in range(4):
        weights = [nn.Parameter(torch.ones(1 << 18)) for _ in range(2)]
        optimizer = dd.wrap_optimizer(torch.optim.SGD(weights, lr=0.1 * (trial + 1)))
        for _ in range(3):
            optimizer.zero_grad()
            sum(weight.sum() for weight in weights).mul(dd.rank() + 1).backward()
            assert weights[0].grad.unique().tolist() == [mean_scale()]
            optimizer.step()
        if dd.rank():
            del weights, optimizer
        used.append(shared_bytes())
        assert used[-1] <= used[min(1, trial)], used
    dd.join()


@law_alone
def unreduced_gradients_of_an_interrupted_backward_survive_a_join() -> None:
    """Joined ranks contribute zeros from the same shared memory."""
    weight, other = nn.Parameter(torch.ones(1 << 16)), nn.Parameter(torch.ones(1))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([other, weight], lr=0.1))
    scale = float(dd.rank() + 1)
    if dd.rank() == 0:
        product = other * 2
        product.register_hook(refuse)
        raises(ValueError, (product.sum() + weight.sum() * scale).backward, "refused")
    else:
        (weight.sum() * scale).backward()
        optimizer.zero_grad()
    dd.join()
    other.sum().backward()
    assert weight.grad.unique().tolist() == [1.0 / dd.size()], "rank 0's only"
    optimizer.step()


@law
def a_gradient_tensor_set_by_the_program_stays_the_gradient() -> None:
    weight = nn.Parameter(torch.ones(1 << 16))
    dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    mine = torch.zeros_like(weight)
    for step in range(3):
        weight.grad = mine.zero_()
        (weight.sum() * (dd.rank() + 1)).backward()
        assert weight.grad is mine
        assert torch.allclose(mine, torch.full_like(mine, mean_scale())), step


@law
def wrapping_an_optimizer_again_frees_its_shared_memory() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(1000))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backend = session.current().world.gradients._backend
    before = in_use(backend)
    for _ in range(6):
        optimizer = by_hvd()(optimizer, model)
        optimizer.zero_grad()
        model[0].sum().backward()
        optimizer.step()
    assert in_use(backend) <= before + 3


def in_use(backend: object) -> int:
    """Return the number of buffers in the ranks' shared memory, if the backend has one."""
    host = getattr(backend, "_host", None)
    return 0 if host is None else len(host._reserved)
