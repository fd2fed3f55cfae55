"""Optimizers with op="adasum", compared with all ranks' steps taken in this process and combined in float64."""

import copy
from collections.abc import Callable

import torch
from contract.optimizer_laws import Wrap, by_dd, by_hvd, nesterov, sgd
from contract.oracle import (
    adasum,
    assert_close,
    assert_same_everywhere,
    closure_of,
    law,
    law_alone,
    loss_of,
    net,
    parameters,
    raises,
    ranks,
)
from torch import nn

import dualdist as dd
import dualdist.hvd as hvd
from dualdist.errors import UsageError

# The numbers of ranks, powers of two, that Adasum supports.
PAIRS = (1, 2, 4, 8, 16)

Make = Callable[[nn.Module], torch.optim.Optimizer]


class AllRanks:
    """All ranks in this process: each has its own optimizer, and all start each step from the same parameters."""

    def __init__(self, model: nn.Module, make: Make) -> None:
        self.models = [copy.deepcopy(model) for _ in ranks()]
        self.optimizers = [make(each) for each in self.models]

    def step(self, take: Callable[[int, nn.Module, torch.optim.Optimizer], None]) -> list[torch.Tensor]:
        """Take each rank's own step, combine the steps by Adasum, and return the parameters."""
        before = [param.detach().clone() for param in self.models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            take(rank, model, optimizer)
        for number, old in enumerate(before):
            params = [list(model.parameters())[number] for model in self.models]
            total = adasum([param.detach().double() - old.double() for param in params])
            for param in params:
                param.data.copy_(old.double() + total)
        return parameters(self.models[0])


def assert_steps_are_combined(wrap: Wrap, make: Make = sgd, passes: int = 1, rtol: float = 1e-5) -> None:
    model = net()
    all_ranks = AllRanks(model, make)
    optimizer = wrap(make(model), model)
    for step in range(2):

        def take(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = step) -> None:
            optimizer.zero_grad()
            for number in range(passes):
                loss_of(model, rank, passes * step + number).backward()
            optimizer.step()

        take(dd.rank(), model, optimizer)
        expected = all_ranks.step(take)
        assert_close(parameters(model), expected, rtol, rtol / 10)
    assert_same_everywhere(model)
    assert str(optimizer.state_dict()["param_groups"]) == str(make(net()).state_dict()["param_groups"])


@law
def optimizer_steps_are_combined_by_adasum() -> None:
    """For powers of two of ranks; other numbers are refused."""
    hvd.init()
    if dd.size() not in PAIRS:
        model = net()
        raises(UsageError, lambda: by_dd(op="adasum")(sgd(model), model), "power of two")
        raises(NotImplementedError, lambda: by_hvd(op=hvd.Adasum)(sgd(model), model), "power of two")
        return
    for make in (sgd, nesterov):
        assert_steps_are_combined(by_hvd(op=hvd.Adasum), make)
    assert_steps_are_combined(by_dd(op="adasum"), lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    assert_steps_are_combined(by_hvd(op=hvd.Adasum, backward_passes_per_step=2), passes=2)
    model = net()
    raises(
        UsageError,
        lambda: by_dd(op="adasum", gradient_predivide_factor=2.0)(sgd(model), model),
        "gradient_predivide_factor",
    )


@law
def compressed_steps_are_combined_by_adasum() -> None:
    """With 11 bits: within their tolerance, and not within that of uncompressed steps."""
    if dd.size() not in PAIRS:
        return
    for wrap in (by_dd(op="adasum", compression="fp16"), by_hvd(op=hvd.Adasum, compression=hvd.Compression.fp16)):
        assert_steps_are_combined(wrap, rtol=1e-2)
    if dd.size() > 1:
        raises(AssertionError, lambda: assert_steps_are_combined(by_dd(op="adasum", compression="fp16"), rtol=1e-7))


@law
def an_overflow_on_one_rank_skips_the_adasum_step_on_all() -> None:
    """Although no backward reduces anything."""
    if dd.size() not in PAIRS:
        return
    for fused in (False, True):
        model = net()
        make = (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True)) if fused else sgd
        all_ranks = AllRanks(model, make)
        optimizer = by_hvd(op=hvd.Adasum)(make(model), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.zero_grad()
            loss = loss_of(model, dd.rank(), step)
            scaler.scale(loss * float("inf") if dd.rank() == 0 and step == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()

            def take(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = step) -> None:
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()

            expected = before if step == 1 else all_ranks.step(take)
            assert scaler.get_scale() == (2.0 if step else 4.0)
            assert_close(parameters(model), expected)


@law
def closures_run_independently_before_adasum() -> None:
    """LBFGS evaluates more often on one rank than on another; ranks communicate after all are done."""
    if dd.size() not in PAIRS:
        return

    options = {"lr": 0.5, "max_iter": 2 + dd.rank(), "max_eval": 10 + dd.rank(), "line_search_fn": "strong_wolfe"}

    def make(model: nn.Module) -> torch.optim.Optimizer:
        model.untouched.requires_grad_(False)
        return torch.optim.LBFGS(model.parameters(), **options)

    model = net().double()
    all_ranks = AllRanks(model, make)
    for rank, each in enumerate(all_ranks.optimizers):
        each.param_groups[0].update(max_iter=2 + rank, max_eval=10 + rank)
    optimizer = by_dd(op="adasum")(make(model), model)

    def take(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step(closure_of(optimizer, lambda: loss_of(model, rank)))

    for _ in range(2):
        take(dd.rank(), model, optimizer)
        expected = all_ranks.step(take)
        assert_close(parameters(model), expected, 1e-9, 1e-9)


@law_alone
def adasum_skips_ranks_that_joined_or_have_no_gradient() -> None:
    """Their step is zero; the result is the Adasum of the others."""
    if dd.size() not in PAIRS:
        return
    weight = nn.Parameter(torch.zeros(2))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0), op="adasum")
    if dd.rank() == 0:
        (weight * torch.tensor([1.0, 2.0])).sum().backward()
    optimizer.step()
    assert weight.tolist() == [-1.0, -2.0]
    optimizer.zero_grad()
    if dd.rank() == 0:
        (weight * torch.tensor([1.0, 2.0])).sum().backward()
        optimizer.step()
        assert weight.tolist() == [-2.0, -4.0]
    dd.join()


@law
def adasum_on_some_ranks_only_is_refused() -> None:
    if dd.size() not in PAIRS:
        return
    model = net()
    hvd.init()
    if dd.size() > 1:
        ops = (hvd.Adasum, hvd.Average)
        raises(hvd.HorovodInternalError, lambda: by_hvd(op=ops[dd.rank() % 2])(sgd(model), model), "adasum", "mean")
    optimizer = by_hvd(op=hvd.Adasum)(sgd(model), model)
    optimizer.synchronize()
    if dd.size() > 1:
        raises(AssertionError, lambda: optimizer.skip_synchronize().__enter__(), "Adasum")
