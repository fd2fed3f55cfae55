"""Gradients in buffers that the reduction reuses: what a program keeps or moves stays intact."""

import gc
from collections.abc import Callable, Iterable

import torch
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
    train,
)
from torch import nn

import dualdist as dd


def watched(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each gradient as another tensor on the same storage, and a copy of its values."""
    return [(p.grad.detach(), p.grad.clone()) for p in model.parameters() if p.grad is not None]


def views(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[bool]:
    """Return for each gradient whether it is in one of the buckets."""
    buckets = optimizer._dualdist_wrapper.reducer.registry.buckets
    addresses = {bucket.values.untyped_storage().data_ptr() for bucket in buckets}
    return [p.grad.untyped_storage().data_ptr() in addresses for p in parameters if p.grad is not None]


CLEARINGS: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda param: param.grad.zero_(),
    lambda param: param.grad.detach_().zero_(),
    lambda param: setattr(param, "grad", torch.zeros_like(param)),
    lambda param: setattr(param.grad, "data", torch.zeros_like(param)),
)


@law
def gradients_are_views_of_the_buckets_until_the_next_backward() -> None:
    """Whatever the program did with those of the step before: each is what autograd accumulates into or replaces."""
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss_of(model, dd.rank(), 0).backward()
    params = [param for param in model.parameters() if param.grad is not None]
    optimizer.step()
    for step in range(9):
        right = mean_gradients(model, (step,))
        before = [param.grad for param in params]
        if step < len(CLEARINGS):
            for param in params:
                CLEARINGS[step](param)
        elif step == len(CLEARINGS):  # none is cleared
            mean = iter(before)
            right = [grad if grad is None else grad + next(mean) for grad in right]
        else:
            optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
        assert_close(gradients(model), right)
        assert all(views(params, optimizer)), step
        assert not any(param.grad._is_view() for param in params)
        optimizer.step()


@law
def kept_gradients_keep_their_values_where_they_are_copied() -> None:
    """In later steps, with another optimizer of the same parameters, and after the optimizer is freed."""
    for set_to_none in (True, False):
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dd.wrap_optimizer(sgd, model.named_parameters(), gradient_as_bucket_view=False)
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
        del optimizer, sgd, model
        gc.collect()
        for _ in range(2):  # the first one's buffers are freed while the others are made
            table = torch.nn.Embedding(5, 3, sparse=True)
            net_and_table = torch.nn.ModuleList([net(), table])
            sgd = torch.optim.SGD(net_and_table.parameters(), lr=0.1)
            optimizer = dd.wrap_optimizer(sgd, gradient_as_bucket_view=False)
            for step in range(5):
                optimizer.zero_grad()
                rows = torch.tensor([step % 5, dd.rank() % 5])
                right = mean_gradients(net_and_table[0], (step,))
                (loss_of(net_and_table[0], dd.rank(), step) + table(rows).sum()).backward()
                assert_close(gradients(net_and_table[0]), right)
                assert not any(views(net_and_table[0].parameters(), optimizer))
                kept += watched(net_and_table[0])
                optimizer.step()
        for now, then in kept:
            assert torch.equal(now, then)


@law
def joined_ranks_keep_their_gradients() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    train(model, optimizer, range(6 if dd.rank() else 3))
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    dd.join()
    after = [param.grad for param in model.parameters() if param.grad is not None]
    for now, then in zip(after, before, strict=True):
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
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), gradient_as_bucket_view=False)
    mine = torch.zeros_like(weight)
    for step in range(3):
        weight.grad = mine.zero_()
        (weight.sum() * (dd.rank() + 1)).backward()
        assert weight.grad is mine
        assert torch.allclose(mine, torch.full_like(mine, mean_scale())), step
        optimizer.step()
