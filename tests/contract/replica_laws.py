"""The laws of replicas: ranks that begin alike, and optimizers, old, new and several, that keep them so."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterable

import torch
from contract.oracle import (
    assert_close,
    assert_same_everywhere,
    batch,
    gradients,
    law,
    loss_of,
    mean_gradients,
    net,
    raises,
    ranks,
)
from torch import nn

import dualdist as dd
from dualdist.errors import MismatchError, UsageError


@law
def broadcast_parameters_makes_all_ranks_roots() -> None:
    for root in (0, dd.size() - 1):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        torch.manual_seed(dd.rank())
        for tensor in model.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) * 10)
        states = dd.allgather_object(model.state_dict())
        model.register_buffer("mask", torch.tensor([dd.rank() == root, True]), persistent=False)
        dd.broadcast_parameters(model, root)
        assert model.mask.tolist() == [True, True], "a buffer that is not saved is broadcast too"
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, states[root][name]), name
        linear = nn.Linear(2, 2)
        weights = dd.allgather_object(linear.state_dict())
        dd.broadcast_parameters(linear.named_parameters(), root)
        assert torch.equal(linear.weight, weights[root]["weight"])
        dd.broadcast_parameters(linear.state_dict(), root)


@law
def models_that_differ_are_an_error_on_every_rank() -> None:
    if dd.size() == 1:
        return
    model = nn.Linear(3, 3 + dd.rank() % 2)
    raises(MismatchError, lambda: dd.broadcast_parameters(model), "rank 1", "(4, 3)", "(3, 3)")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(MismatchError, lambda: dd.wrap_optimizer(optimizer), "rank 1")
    named = [(name, nn.Parameter(torch.ones(2))) for name in "abcd"]
    order = [0, 2, 1, 3] if dd.rank() == 1 else [0, 1, 2, 3]
    optimizer = torch.optim.SGD([named[number][1] for number in order], lr=0.1)
    words = ("another order", "rank 1 has c (2,)", "at index 1 of 4", "root has b (2,)")
    raises(MismatchError, lambda: dd.wrap_optimizer(optimizer, named), *words)


@law
def broadcast_optimizer_state_makes_all_optimizers_roots() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (dd.rank() + 1), weight_decay=0.01)
    if dd.rank() == 0:
        loss_of(model, 0).backward()
        optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    dd.broadcast_optimizer_state(optimizer)
    states = dd.allgather_object(optimizer.state_dict())
    assert states[0]["state"], "root has stepped"
    assert optimizer.param_groups[0]["lr"] == 0.1
    for state in states[1:]:
        assert str(state) == str(states[0])
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old), "weights and gradients are left alone"


class Master(torch.optim.Optimizer):
    """State in float32 and integers beside a parameter of half precision, nested, and state of no parameter."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": torch.tensor(0.5 * (dd.rank() + 1)), "betas": (0.5, dd.rank())})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state["steps of all"] = {"count": 7 + dd.rank()}
        for param in self.param_groups[0]["params"]:
            third = torch.full(param.shape, (dd.rank() + 1) / 3)
            self.state[param] = {"copy": third, "history": [third.double(), (torch.tensor(dd.rank() + 2), "words")]}


@law
def broadcast_optimizer_state_casts_nothing_and_keeps_the_groups() -> None:
    weight, unused = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = Master([weight])
    optimizer.add_param_group({"params": [unused], "lr": 1.0 + dd.rank()})
    optimizer.step()
    group = optimizer.param_groups[0]
    group[f"of rank {dd.rank()}"] = dd.rank()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    roots = dict(optimizer.state[weight])
    dd.broadcast_optimizer_state(optimizer)
    assert optimizer.param_groups[0] is group
    assert scheduler.optimizer.param_groups[0]["params"][0] is weight
    assert (group["lr"].item(), group["betas"], group["of rank 0"]) == (0.5, (0.5, 0), 0)
    assert f"of rank {dd.size()}" not in group
    assert dd.size() == 1 or "of rank 1" not in group
    assert optimizer.param_groups[1]["lr"] == 1.0
    assert optimizer.state["steps of all"] == {"count": 7}
    assert set(optimizer.state) == {"steps of all", weight}, "the second group has not been stepped"
    state = optimizer.state[weight]
    assert torch.equal(state["copy"], torch.full((2,), 1 / 3)), "all bits of a float32"
    assert torch.equal(state["history"][0], torch.full((2,), 1 / 3).double())
    assert (state["history"][1][0].item(), state["history"][1][0].dtype) == (2, torch.int64)
    assert state["history"][1][1] == "words"
    if dd.rank() == 0:
        assert all(state[key] is value for key, value in roots.items()), "root's own stays"
    group["lr"] += dd.rank()
    assert optimizer.param_groups[0]["lr"].item() == 0.5 + dd.rank()


@law
def parameters_added_or_unfrozen_later_are_reduced() -> None:
    model, extra = net(), nn.Parameter(torch.ones(2))
    model[0].weight.requires_grad_(False)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    (loss_of(model, dd.rank()) + extra.sum() * dd.rank()).backward()
    assert torch.allclose(extra.grad, torch.full((2,), sum(ranks()) / dd.size()))
    optimizer.step()
    model[0].weight.requires_grad_(True)
    for step in (1, 2):
        optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
        expected = mean_gradients(model, (step,))
        optimizer.step()
        assert_close(gradients(model), expected)


@law
def the_wrapped_optimizer_is_the_same_object() -> None:
    model = net()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = str(plain.state_dict())
    optimizer = dd.wrap_optimizer(plain)
    assert optimizer is plain
    assert type(optimizer) is torch.optim.AdamW
    assert str(optimizer.state_dict()) == before
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loss_of(model, dd.rank()).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    other = torch.optim.AdamW(net().parameters(), lr=0.3)
    other.load_state_dict(optimizer.state_dict())
    raises(UsageError, lambda: dd.wrap_optimizer(optimizer), "already")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pickle.loads(pickle.dumps(optimizer))
        copy.deepcopy(optimizer)
        pickle.loads(pickle.dumps(model))


@law
def optimizers_that_ranks_use_differently_do_not_mix() -> None:
    """Rank 0's loss touches both, the others' touch one: equal shapes would be added up with each other unseen."""
    one, two = (nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)]) for _ in range(2))
    first = dd.wrap_optimizer(torch.optim.SGD(one.parameters(), lr=0.1))
    second = dd.wrap_optimizer(torch.optim.SGD(two.parameters(), lr=0.1))
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        loss = two[0].sum() * 100 + two[1].sum() * 100
        if dd.rank() == 0:
            loss = loss + one[0].sum()
        loss.backward()
        assert torch.allclose(one[0].grad, torch.full((3,), 1 / dd.size()))
        assert one[1].grad is None
        assert two[0].grad.tolist() == [100.0] * 3
        first.step()
        second.step()


@law
def the_newest_optimizer_has_the_parameters() -> None:
    """However long the old one lives: garbage is collected at another time on each rank."""
    model = net()
    kept = []
    for step in range(3):
        optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if dd.rank() % 2:
            kept.append(optimizer)
        optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
        assert_close(gradients(model), mean_gradients(model, (step,)))
        optimizer.step()


@law
def two_optimizers_and_shared_graphs_do_not_mix() -> None:
    generator, critic = net(1), nn.Linear(2, 1)
    dd.broadcast_parameters(critic)
    first = dd.wrap_optimizer(torch.optim.SGD(generator.parameters(), lr=0.1))
    second = dd.wrap_optimizer(torch.optim.Adam(critic.parameters(), lr=0.1))
    for step in range(3):
        for optimizer in (first, second):
            first.zero_grad()
            second.zero_grad()
            critic(generator(batch(dd.rank(), step)[0])).mean().backward()
            optimizer.step()
    assert_same_everywhere(generator)
    assert_same_everywhere(critic)


@law
def a_parameter_of_two_optimizers_is_reduced_once() -> None:
    shared, one, other = (nn.Parameter(torch.ones(2)) for _ in range(3))
    older = dd.wrap_optimizer(torch.optim.SGD([shared, one], lr=0.1), op="sum")
    newer = dd.wrap_optimizer(torch.optim.SGD([shared, other], lr=0.1), op="sum")
    for _ in range(2):
        older.zero_grad()
        newer.zero_grad()
        (shared + one + other).sum().backward()
        for param in (shared, one, other):
            assert param.grad.tolist() == [dd.size()] * 2
        older.step()
        newer.step()


@law
def a_parameter_that_is_unfrozen_waits_for_nobody() -> None:
    """A rank whose loss does not touch an optimizer hears of its new parameters when the others reduce it."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    first.bias.requires_grad_(False)
    dd.broadcast_parameters(first)
    optimizers = [dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in (first, second)]
    x = torch.ones(1, 2)
    for step in range(3):
        first.bias.requires_grad_(step > 0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (second(first(x)) if dd.rank() == 0 else second(x)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_everywhere(first)
    assert first.bias.grad is not None
