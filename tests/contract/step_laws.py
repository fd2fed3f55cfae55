"""The laws of what a step finds: gradients zeroed, missing, added up, clipped, scaled, or those of a closure."""

from __future__ import annotations

import copy
from typing import Any

import torch
from contract.oracle import (
    assert_close,
    assert_same_everywhere,
    gradients,
    law,
    law_alone,
    loss_of,
    mean_gradients,
    net,
    raises,
    ranks,
)
from torch import nn

import dualdist as dd
from dualdist.errors import MismatchError


@law
def zeroed_gradients_work_like_absent_ones() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, dd.rank(), step).backward()
        assert_close(gradients(model), mean_gradients(model, (step,)))
        optimizer.step()


@law
def gradients_are_summed_on_request() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), op="sum")
    loss_of(model, dd.rank()).backward()
    expected = [None if grad is None else grad * dd.size() for grad in mean_gradients(model)]
    assert_close(gradients(model), expected)
    optimizer.step()


@law_alone
def a_parameter_that_some_ranks_use_gets_the_mean_over_all() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
    for layer in model:
        nn.init.ones_(layer.weight)
    dd.broadcast_parameters(model)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    chosen = [0] if dd.rank() else [0, 1]  # layer 1 by rank 0 only, layer 2 by nobody
    sum(model[index](torch.ones(1, 2)).sum() for index in chosen).backward()
    assert torch.equal(model[0].weight.grad, torch.ones(1, 2))
    assert torch.equal(model[1].weight.grad, torch.full((1, 2), 1 / dd.size()))
    assert model[2].weight.grad is None
    optimizer.step()


@law_alone
def a_rank_whose_backward_touched_nothing_takes_part_when_it_steps() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        optimizer.zero_grad()
        if dd.rank() == 0 or dd.size() == 1:
            loss_of(model, 0, step).backward()
        optimizer.step()
    assert_same_everywhere(model)
    assert model.untouched.grad is None


@law
def a_step_without_any_backward_does_no_harm() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()
    assert gradients(model) == [None] * len(gradients(model))


@law
def gradients_set_by_hand_are_reduced_by_the_step() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.full((2,), float(dd.rank()))
    optimizer.step()
    assert torch.allclose(weight, torch.full((2,), -sum(ranks()) / dd.size()))


@law_alone
def accumulation_reduces_once_and_adds_up() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), accumulate=3)
    for _ in range(2):
        optimizer.zero_grad()
        for step in (0, 1):
            loss_of(model, dd.rank(), step).backward()
        alone = copy.deepcopy(model)
        alone.zero_grad()
        for step in (0, 1):
            loss_of(alone, dd.rank(), step).backward()
        assert_close(gradients(model), gradients(alone))  # not reduced yet
        loss_of(model, dd.rank(), 2).backward()
        assert_close(gradients(model), mean_gradients(model, (0, 1, 2)))
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, dd.rank(), 0).backward()  # the last, short round of an epoch
    expected = mean_gradients(model)
    optimizer.step()
    assert_close(gradients(model), expected)


@law
def clipping_sees_the_mean() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, dd.rank()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = torch.stack([grad.norm() for grad in mean_gradients(model) if grad is not None]).norm()
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
    optimizer.step()


@law
def closures_see_the_mean_and_lbfgs_stays_in_step() -> None:
    model = net().double()  # LBFGS amplifies rounding; in double nothing of it shows
    model.untouched.requires_grad_(False)
    optimizer = dd.wrap_optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe"))
    alone = copy.deepcopy(model)
    plain = torch.optim.LBFGS(alone.parameters(), lr=0.5, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, dd.rank())
        loss.backward()
        return loss

    def whole() -> torch.Tensor:
        plain.zero_grad()
        loss = sum(loss_of(alone, rank) for rank in ranks()) / dd.size()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    torch.testing.assert_close(first.detach(), plain.step(whole).detach(), rtol=1e-5, atol=1e-6)
    assert_same_everywhere(model)
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in alone.parameters()])


@law
def the_loss_of_a_closure_is_reduced_as_its_gradients_are() -> None:
    """A line search whose loss is a size-th of what its gradient says goes another way."""
    model = net().double()
    model.untouched.requires_grad_(False)
    alone = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 1, "max_iter": 6, "line_search_fn": "strong_wolfe"}
    optimizer = dd.wrap_optimizer(torch.optim.LBFGS(model.parameters(), **options), op="sum")
    plain = torch.optim.LBFGS(alone.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 10 * loss_of(model, dd.rank())
        loss.backward()
        return loss

    def whole() -> torch.Tensor:
        plain.zero_grad()
        loss = sum(10 * loss_of(alone, rank) for rank in ranks())
        loss.backward()
        return loss

    torch.testing.assert_close(optimizer.step(closure), plain.step(whole), check_dtype=False)
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in alone.parameters()])
    assert_same_everywhere(model)


@law
def a_closure_may_return_any_number_or_nothing_on_all_ranks_alike() -> None:
    weight = nn.Parameter(torch.zeros(1))
    rank, size = dd.rank(), dd.size()
    for op, divisor in (("mean", size), ("sum", 1)):
        optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), op=op)

        def step(loss: object, optimizer: torch.optim.Optimizer = optimizer) -> Any:
            def closure() -> object:
                optimizer.zero_grad()
                (weight * rank).sum().backward()
                return loss

            return optimizer.step(closure)

        total = sum(ranks())
        assert step(rank if rank % 2 else float(rank)) == total / divisor, "an int here and a float there"
        assert step(rank > 0) == (size - 1) / divisor
        assert step(torch.tensor(rank)).item() == total / divisor
        assert step(torch.tensor(float(rank))).item() == total / divisor
        assert step(None) is None
        assert step((rank, "words")) == (rank, "words")
        if size > 1:
            raises(MismatchError, lambda: step(None if rank == 0 else 1.0), "closure's NoneType", "closure's loss")
            raises(MismatchError, lambda: step(torch.tensor(1.0) if rank == 0 else 1.0), "closure's loss", "float64()")
            assert step(1) == size / divisor, "and the ranks are still in step"


@law
def loss_scaling_sees_the_mean() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, dd.rank(), step)).backward()
        scaler.unscale_(optimizer)
        assert_close(gradients(model), mean_gradients(model, (step,)))
        scaler.step(optimizer)
        scaler.update()


@law
def an_overflow_on_one_rank_is_everybodys() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [param.detach().clone() for param in model.parameters()]
    loss = loss_of(model, dd.rank())
    scaler.scale(loss * float("inf") if dd.rank() == 0 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)


@law_alone
def a_skipped_step_does_not_confuse_the_next() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()  # no step follows, as after an overflow
    optimizer.zero_grad()
    if dd.rank() == 0:
        weight.sum().backward()
    optimizer.step()
    assert torch.allclose(weight, torch.full((2,), 1 - 1 / dd.size()))


@law
def sums_begin_anew_however_gradients_were_dropped() -> None:
    for drop in ("optimizer", "model", "by hand"):
        model = nn.Linear(2, 2)
        dd.broadcast_parameters(model)
        optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), op="sum")
        for _ in range(2):  # no step: as after an overflow
            if drop == "by hand":
                for param in model.parameters():
                    param.grad = None
            else:
                (optimizer if drop == "optimizer" else model).zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            assert model.bias.grad.tolist() == [dd.size()] * 2, drop
