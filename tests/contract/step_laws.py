"""optimizer.step(): gradients that are missing, set by hand, accumulated, clipped or scaled, and closures."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from contract.optimizer_laws import Fixed, Wrap, assert_trains_like_one_process, by_dd, by_hvd, sgd
from contract.oracle import (
    assert_close,
    assert_same_everywhere,
    closure_of,
    gradients,
    law,
    law_alone,
    loss_of,
    net,
    parameters,
    raises,
    ranks,
    total_loss,
)
from torch import nn

import dualdist as dd
import dualdist.hvd as hvd
from dualdist.errors import DriftError, MismatchError


def assert_mean_over_all_ranks(wrap: Wrap, passes: int = 1, factor: int = 1) -> None:
    """Rank 0 uses two layers, the others one of them, and no rank the third."""
    layers = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
    dd.broadcast_parameters(layers)
    optimizer = wrap(torch.optim.SGD(layers.parameters(), lr=0.01), layers)
    for _ in range(passes):
        sum(layers[index](torch.ones(1, 2)).sum() for index in ([0] if dd.rank() else [0, 1])).backward()
    assert torch.allclose(layers[0].weight.grad, torch.full((1, 2), 1.0 * passes * factor))
    assert torch.allclose(layers[1].weight.grad, torch.full((1, 2), passes * factor / dd.size()))
    assert layers[2].weight.grad is None
    optimizer.step()


@law_alone
def a_parameter_unused_on_some_ranks_gets_the_mean_over_all() -> None:
    assert_mean_over_all_ranks(by_dd())


@law
def options_keep_the_mean_over_all_of_a_parameter_unused_on_some_ranks() -> None:
    assert_mean_over_all_ranks(by_hvd(backward_passes_per_step=2), passes=2)
    assert_mean_over_all_ranks(by_hvd(groups=2, compression=Fixed))
    assert_mean_over_all_ranks(by_hvd(op=hvd.Sum, gradient_predivide_factor=1.0), factor=dd.size())


@law_alone
def a_rank_without_a_backward_takes_part_in_the_reduction_in_its_step() -> None:
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
def a_step_without_any_backward_changes_nothing() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()
    assert gradients(model) == [None] * len(gradients(model))


@law
def gradients_set_by_hand_are_reduced_in_the_step() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.full((2,), float(dd.rank()))
    optimizer.step()
    assert torch.allclose(weight, torch.full((2,), -sum(ranks()) / dd.size()))


@law_alone
def accumulated_gradients_are_reduced_once() -> None:
    assert_trains_like_one_process(by_dd(accumulate=3), passes=3, backwards=(3, 3, 1))


@law
def closures_return_any_number_or_no_number_on_every_rank() -> None:
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
def gradients_with_op_sum_start_from_zero_however_they_were_cleared() -> None:
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
def closures_train_lbfgs_like_one_process() -> None:
    """The closure's loss is reduced like its gradients, for the line search. In float64: LBFGS amplifies rounding."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        model.untouched.requires_grad_(False)
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")

    mean, total = 1 / dd.size(), 1.0
    for wrap, factor in ((by_dd(), mean), (by_dd(op="sum"), total), (by_hvd(), mean), (by_hvd(op=hvd.Sum), total)):
        model, alone = net().double(), net().double()
        optimizer, plain = wrap(make(model), model), make(alone)
        found = optimizer.step(closure_of(optimizer, lambda model=model: loss_of(model, dd.rank())))
        right = plain.step(closure_of(plain, lambda alone=alone, factor=factor: total_loss(alone) * factor))
        torch.testing.assert_close(found.detach(), right.detach(), rtol=1e-9, atol=1e-9)
        assert_close(parameters(model), parameters(alone), 1e-7, 1e-9)
        assert_same_everywhere(model)


@law
def loss_scaling_skips_every_ranks_step_if_one_overflows() -> None:
    """In the other steps the mean, or the sum, is unscaled and clipped."""
    for wrap, factor in ((by_dd(), 1 / dd.size()), (by_hvd(), 1 / dd.size()), (by_hvd(op=hvd.Sum), 1.0)):
        model, alone = net(), net()
        optimizer, plain = wrap(sgd(model), model), sgd(alone)
        skips = getattr(optimizer, "skip_synchronize", contextlib.nullcontext)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, dd.rank(), step)
            scaler.scale(loss * float("inf") if step == 1 and dd.rank() == dd.size() - 1 else loss).backward()
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with skips():
                scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (2.0 if step else 4.0)
            if step != 1:
                plain.zero_grad()
                (total_loss(alone, step) * factor).backward()
                nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
                plain.step()
            assert_close(parameters(model), parameters(alone))


@law
def a_step_that_one_rank_leaves_out_is_an_error_on_all() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):  # one that all leave out is none
        optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
    if dd.rank() != 1:
        optimizer.step()
    optimizer.zero_grad()
    if dd.size() > 1:
        raises(DriftError, loss_of(model, dd.rank()).backward, "rank 1 left out a step")
    dd.broadcast_parameters(model)
    assert_trains_like_one_process(by_dd())


def step_in_hooks(groups: list[list[nn.Parameter]], make: Callable[..., torch.optim.Optimizer], every: int) -> None:
    """Step an optimizer of each group in the hook of its last gradient of every `every`-th backward."""
    for group in groups:
        optimizer, arrived = dd.wrap_optimizer(make(group), accumulate=every), itertools.count(1)

        def step(
            _: torch.Tensor, optimizer: Any = optimizer, arrived: Any = arrived, last: int = every * len(group)
        ) -> None:
            if next(arrived) % last == 0:
                optimizer.step()
                optimizer.zero_grad()

        for param in group:
            param.register_post_accumulate_grad_hook(step)


@law
def optimizers_that_are_stepped_in_hooks_train_like_one_process() -> None:
    sizes: dict[str, Callable[[nn.Module], list[list[nn.Parameter]]]] = {
        "per parameter": lambda model: [[param] for param in model.parameters()],
        "per layer": lambda model: [list(layer.parameters()) for layer in model if list(layer.parameters())],
        "one": lambda model: [list(model.parameters())],
    }
    for make, every, (kind, divide) in itertools.product(
        (functools.partial(torch.optim.SGD, lr=0.1), functools.partial(torch.optim.AdamW, lr=0.01)),
        (1, 2),
        sizes.items(),
    ):
        torch.manual_seed(7)
        layers = (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        model = nn.Sequential(*layers).double()
        alone = copy.deepcopy(model)
        dd.broadcast_parameters(model)
        step_in_hooks(divide(model), make, every)
        reference = make(alone.parameters())
        for number in range(3 * every):
            batches = torch.randn(dd.size(), 5, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            model(batches[dd.rank()]).square().mean().backward()
            (sum(alone(batch).square().mean() for batch in batches) / dd.size()).backward()
            if (number + 1) % every == 0:
                reference.step()
                reference.zero_grad()
        for found, right in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(found, right, rtol=1e-8, atol=1e-9), (kind, every, make)
        assert_same_everywhere(model)


@law_alone
def a_backward_without_a_step_does_not_affect_the_next() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()  # no step follows, as after an overflow
    optimizer.zero_grad()
    if dd.rank() == 0:
        weight.sum().backward()
    optimizer.step()
    assert torch.allclose(weight, torch.full((2,), 1 - 1 / dd.size()))
