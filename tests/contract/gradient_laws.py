"""The laws of replicas and gradients; the oracle does the same mathematics alone, on everybody's data."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from contract.oracle import (
    assert_close,
    assert_same_everywhere,
    batch,
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
from torch.utils.checkpoint import checkpoint

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
    words = ("another order", "rank 1 has c (2,)", "at place 1 of 4", "root has b (2,)")
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
def gradients_are_the_mean_when_backward_returns() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
        assert_close(gradients(model), mean_gradients(model, (step,)))
        optimizer.step()
    assert model.untouched.grad is None


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
def a_second_backward_adds_to_the_first() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, dd.rank(), 0).backward()
    loss_of(model, dd.rank(), 1).backward()
    assert_close(gradients(model), mean_gradients(model, (0, 1)))
    optimizer.step()


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


@law
def a_backward_that_raised_does_not_spoil_the_next() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("refused")

    x, y = batch(dd.rank())
    hidden = model[1](model[0](x))
    hidden.register_hook(refuse)
    rest = model[4](model[3](model[2](hidden)))
    raises(ValueError, lambda: nn.functional.mse_loss(rest, y).backward(), "refused")
    optimizer.zero_grad()
    loss_of(model, dd.rank(), 1).backward()
    assert_close(gradients(model), mean_gradients(model, (1,)))
    optimizer.step()


@law_alone
def gradients_of_an_interrupted_backward_are_not_lost() -> None:
    """Nothing is dropped between the two backwards: what the first one left adds up with the second."""
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1 << 19))  # a bucket of its own, sent at once
    optimizer = dd.wrap_optimizer(torch.optim.SGD([first, last], lr=0.1))
    scale = float(dd.rank() + 1)
    mean = sum(rank + 1 for rank in ranks()) / dd.size()

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("refused")

    product = first * 2
    product.register_hook(refuse)
    loss = product.sum() + last.sum() * scale  # autograd begins with what was computed last
    raises(ValueError, loss.backward, "refused")
    (last.sum() * scale + first.sum() * scale).backward()
    assert torch.allclose(last.grad, torch.full_like(last, 2 * mean))
    assert torch.allclose(first.grad, torch.full_like(first, mean))
    optimizer.step()


@law_alone
def a_parameter_inside_and_outside_a_checkpoint_keeps_both_gradients() -> None:
    shared, other = nn.Parameter(torch.ones(1 << 19)), nn.Parameter(torch.ones(3))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([other, shared], lr=0.1))
    x = torch.ones(1 << 19, requires_grad=True)
    inside = checkpoint(lambda t: t * shared, x * other.sum(), use_reentrant=True)
    (inside.sum() * (dd.rank() + 1) + shared.sum()).backward()
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    assert torch.allclose(shared.grad, torch.full_like(shared, 3 * mean + 1))
    optimizer.step()


@law
def second_derivatives_leave_the_reduction_alone() -> None:
    weight = nn.Parameter(torch.full((2,), 3.0))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle that is taken apart below
        (weight.square().sum() * (dd.rank() + 1)).backward(create_graph=True)
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    assert torch.allclose(weight.grad, torch.full((2,), 6 * mean))
    weight.grad = None  # the graph keeps a cycle alive otherwise
    optimizer.step()


@law
def a_sum_is_not_summed_again() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), op="sum")
    weight.sum().backward()
    raises(UsageError, lambda: weight.sum().backward(), "zero_grad")
    optimizer.zero_grad()
    weight.sum().backward()
    assert weight.grad.tolist() == [float(dd.size())] * 2
    optimizer.step()


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
def reentrant_checkpointing_gives_the_mean() -> None:
    for reentrant in (True, False):
        model = net()
        optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = batch(dd.rank())
        hidden = checkpoint(lambda h, m=model: m[3](m[2](m[1](m[0](h)))), x.requires_grad_(), use_reentrant=reentrant)
        nn.functional.mse_loss(model[4](hidden), y).backward()
        assert_close(gradients(model), mean_gradients(model))
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


@law
def a_compressor_may_leave_some_gradients_as_they_are() -> None:
    class LargeOnes:
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            return tensor.half() if tensor.numel() > 1 else tensor, tensor.dtype

        def decompress(self, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
            assert tensor.dtype == (torch.float16 if tensor.numel() > 1 else torch.float32)
            return tensor.to(ctx)

    model = nn.Linear(2, 1)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=LargeOnes())
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(1, 2)) * (dd.rank() + 1)).sum().backward()
        assert model.bias.grad.tolist() == [mean]
        assert model.weight.grad.tolist() == [[mean, mean]]


@law
def gradients_that_a_program_keeps_are_left_alone() -> None:
    """As in one process: a tensor that was .grad keeps its values when the next backward makes new ones."""
    weight = nn.Parameter(torch.ones(1 << 16))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    kept = []
    for step in range(4):
        optimizer.zero_grad()
        (weight.sum() * (dd.rank() + 1) * 10**step).backward()
        kept.append(weight.grad if step % 2 else weight.grad[:5])
    for step, grad in enumerate(kept):
        assert torch.allclose(grad, torch.full_like(grad, mean * 10**step)), step
    del kept, grad
    mine = torch.zeros_like(weight)
    for step in range(3):
        weight.grad = mine.zero_()
        (weight.sum() * (dd.rank() + 1)).backward()
        assert weight.grad is mine, "what the program keeps stays the gradient"
        assert torch.allclose(mine, torch.full_like(mine, mean)), step


@law
def a_gradient_that_another_hook_changes_is_reduced_as_it_became() -> None:
    weight, last = nn.Parameter(torch.ones(1 << 16)), nn.Parameter(torch.ones(1))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([last, weight], lr=0.1))

    def clamp(param: torch.Tensor) -> None:
        param.grad.clamp_(max=1.0)

    weight.register_post_accumulate_grad_hook(clamp)
    finished_last = last.sum()  # autograd goes backwards
    (weight.sum() * 5 * (dd.rank() + 1) + finished_last).backward()
    assert torch.equal(weight.grad, torch.ones(1 << 16))
    optimizer.step()


@law
def parameters_of_several_dtypes_and_layouts_are_reduced() -> None:
    half = nn.Parameter(torch.ones(3, dtype=torch.float16))
    double = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    image = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([half, double, image], lr=0.1))
    scale = float(dd.rank() + 1)
    (half.sum().double() * scale + double.sum() * scale + image.sum() * scale).backward()
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    for param in (half, double, image):
        assert param.grad.dtype == param.dtype
        assert torch.allclose(param.grad, torch.full_like(param, mean))
    optimizer.step()


@law_alone
def many_buckets_leave_in_one_order() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(512, 600) for _ in range(6)]  # 1.2 MB each: several buckets
    model = nn.ModuleList(layers)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    order = layers if dd.rank() % 2 else layers[::-1]  # ranks finish their gradients in another order
    for layer in order:
        nn.init.zeros_(layer.weight)
    sum((index + 1) * layer(torch.ones(1, 512)).sum() for index, layer in enumerate(order)).backward()
    for index, layer in enumerate(layers):
        scales = [index + 1 if rank % 2 else 6 - index for rank in ranks()]
        assert torch.allclose(layer.bias.grad, torch.full((600,), sum(scales) / dd.size())), index
    optimizer.step()


@law
def sparse_gradients_are_the_mean_of_everybodys() -> None:
    """For each rank another row, for rank 0 none in the second step; twice, as the buffers change after the first."""
    for dense in (False, True):
        embedding = torch.nn.Embedding(dd.size() + 1, 3, sparse=True)
        dd.broadcast_parameters(embedding)
        linear = torch.nn.Linear(3, 1)
        dd.broadcast_parameters(linear)
        params = [*embedding.parameters(), *linear.parameters()]
        optimizer = dd.wrap_optimizer(torch.optim.SGD(params, lr=1.0), sparse_as_dense=dense)
        for step in range(3):
            optimizer.zero_grad()
            touched = [rank for rank in ranks() if rank or step != 1]
            if dd.rank() in touched:
                linear(embedding(torch.tensor([dd.rank(), dd.rank()]))).sum().backward()
            else:
                linear(torch.zeros(3)).sum().backward()
            expected = torch.zeros_like(embedding.weight)
            expected[touched] = 2 * linear.weight.detach() / dd.size()
            if touched:
                assert embedding.weight.grad.is_sparse
                torch.testing.assert_close(embedding.weight.grad.to_dense(), expected)
            optimizer.step()
        assert_same_everywhere(embedding)
