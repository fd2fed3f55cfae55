"""The laws of what a wrapped optimizer stays, and of what Horovod's controls on it do."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from contract.optimizer_laws import assert_trains_like_one_process, by_dd, by_hvd, sgd
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
import dualdist.hvd as hvd
from dualdist import session


@law
def synchronized_gradients_can_be_clipped_before_the_step() -> None:
    """Horovod's way, and the plain one; what is clipped is not reduced again."""
    for horovods in (True, False):
        model = net()
        optimizer, alone = by_hvd()(sgd(model), model), net()
        plain = sgd(alone)
        for step in range(2):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, dd.rank(), step).backward()
            (sum(loss_of(alone, rank, step) for rank in ranks()) / dd.size()).backward()
            if horovods:
                optimizer.synchronize()
            for each in (model, alone):
                nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            if horovods:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            plain.step()
            assert_close(gradients(model), gradients(alone))


@law
def a_step_after_synchronize_warns_and_reduces_nothing_again() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd_sgd(weight, op=hvd.Sum)
    weight.sum().backward()
    optimizer.synchronize()
    weight.grad.mul_(0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        assert [str(each.message)[:62] for each in caught] == [
            "optimizer.step() called without optimizer.skip_synchronize() a"
        ]
        assert caught[0].filename == __file__
    assert weight.tolist() == [-0.5 * dd.size()] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for synchronizes in (False, True, False):
            weight.grad = None  # as model.zero_grad() does, of which the optimizer hears nothing
            weight.sum().backward()
            if synchronizes:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
    assert weight.tolist() == [-3.5 * dd.size()] * 2


@law
def synchronize_reduces_what_is_not_due_yet() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd_sgd(weight, backward_passes_per_step=3)
    mean = sum(ranks()) / dd.size()
    for count in (1, 2):
        weight.grad = None
        for _ in range(count):
            (weight.sum() * dd.rank()).backward()
        assert weight.grad.tolist() == [float(count * dd.rank())] * 2
        optimizer.synchronize()
        assert torch.allclose(weight.grad, torch.full((2,), count * mean))
        with optimizer.skip_synchronize():
            optimizer.step()
    weight.grad = None
    if dd.rank() == 0:
        (weight.sum() * dd.size()).backward()
    optimizer.synchronize()
    assert weight.grad.tolist() == [1.0] * 2, "the others' backward touched nothing"
    with optimizer.skip_synchronize():
        optimizer.step()


def hvd_sgd(*params: nn.Parameter, lr: float = 1.0, **options: Any) -> torch.optim.SGD:
    return by_hvd(**options)(torch.optim.SGD(params, lr=lr), nn.ParameterList(params))


@law
def names_are_alike_on_all_ranks() -> None:
    by_hvd()
    model = net()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    names = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))._parameter_names
    assert len(set(names.values())) == len(names) == 4
    assert hvd.allgather_object(sorted(names.values())) == [sorted(names.values())] * dd.size()
    names = by_hvd()(sgd(model), model)._parameter_names
    assert names == {param: name for name, param in model.named_parameters()}


@law
def the_newer_options_of_an_optimizer_count() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd_sgd(weight, op=hvd.Sum, backward_passes_per_step=3)
    again = hvd.DistributedOptimizer(optimizer, named_parameters=[("weight", weight)])
    assert again is optimizer
    assert (optimizer.op, optimizer.backward_passes_per_step) == (hvd.Average, 1)
    (weight.sum() * dd.rank()).backward()
    assert torch.allclose(weight.grad, torch.full((2,), sum(ranks()) / dd.size()))
    optimizer.step()
    hvd.DistributedOptimizer(dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0), op="sum"), op=hvd.Average)
    weight.grad = None
    weight.sum().backward()
    assert weight.grad.tolist() == [1.0] * 2


class Careful(torch.optim.SGD):
    """A subclass with arguments of its own, a step that calls the base's, and marks that must not get lost."""

    _step_supports_amp_scaling = True

    def __init__(self, model: nn.Module, *, factor: float) -> None:
        super().__init__(model.parameters(), lr=0.1 * factor)
        self.factor = factor

    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * self.factor * scale
        return super().step(closure)


@law
def a_subclass_stays_what_it_was() -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # from now on the base's step runs hooks too
    for op, factor in ((hvd.Average, 1), (hvd.Sum, dd.size())):
        for closes in (False, True):
            model = net()
            given = Careful(model, factor=2.0)
            calls: list[str] = []
            given.register_step_post_hook(lambda *_, calls=calls: calls.append("mine"))
            given.defaults["mine"] = 3
            optimizer = by_hvd(op=op)(given, model)
            assert optimizer is given
            assert type(optimizer) is Careful
            assert (optimizer.factor, optimizer.defaults["mine"], optimizer._step_supports_amp_scaling) == (
                2.0,
                3,
                True,
            )
            alone = net()
            plain = Careful(alone, factor=2.0)

            def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, dd.rank())
                loss.backward()
                return loss

            if closes:
                loss = optimizer.step(closure, 0.5)
                right = sum(loss_of(alone, rank) for rank in ranks()) / dd.size() * factor
                torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
            else:
                closure()
                assert optimizer.step(scale=0.5) is None
            (sum(loss_of(alone, rank) for rank in ranks()) / dd.size() * factor).backward()
            plain.step(scale=0.5)
            assert_close(list(model.parameters()), list(alone.parameters()))
            assert len(calls) == 2, "once for each of the two steps"


@law
def hooks_run_once_and_see_the_new_parameters() -> None:
    for wrap in (by_hvd(), by_hvd(op=hvd.Adasum) if dd.size() & (dd.size() - 1) == 0 else by_dd()):
        model, seen = net(), []
        given = sgd(model)
        given.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        given.register_step_post_hook(lambda *_, seen=seen, m=model: seen.append(m[0].weight.detach().clone()))
        optimizer = wrap(given, model)
        loss_of(model, dd.rank()).backward()
        optimizer.step()
        assert seen[0] == "before"
        assert len(seen) == 2
        assert torch.equal(seen[1], model[0].weight)


@law
def copies_are_plain_and_checkpoints_are_too() -> None:
    for make in (sgd, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)):
        model, alone = net(), net()
        optimizer, plain = by_hvd()(make(model), model), make(alone)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for each, other in ((model, optimizer), (alone, plain)):
            members = [dd.rank()] if each is model else ranks()
            (sum(loss_of(each, rank) for rank in members) / len(members)).backward()
            other.step()
        scheduler.step()
        plain.param_groups[0]["lr"] *= 0.5
        keys = {key for key in optimizer.param_groups[0] if key != "initial_lr"}
        assert keys == set(plain.param_groups[0])
        assert optimizer.state_dict().keys() == plain.state_dict().keys()
        plain.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of hooks that it does not copy
            copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        for found in copies:
            assert type(found) is type(optimizer)
            for name in ("synchronize", "_parameter_names", "_dualdist_wrapper", "op"):
                assert not hasattr(found, name), name
            weight = found.param_groups[0]["params"][0]
            before = weight.detach().clone()
            found.zero_grad()
            (weight * (dd.rank() + 1)).sum().backward()
            assert torch.equal(weight.grad, torch.full_like(weight, dd.rank() + 1.0)), "not reduced"
            found.step()
            assert not torch.equal(weight, before)
            found.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        optimizer.zero_grad()
        loss_of(model, dd.rank(), 1).backward()
        assert_close(gradients(model), mean_gradients(model, (1,)))
        optimizer.step()
        assert_same_everywhere(model)


@law
def a_group_added_later_has_its_own_hyperparameters_and_is_reduced() -> None:
    model = net()
    optimizer = by_hvd(op=hvd.Sum)(torch.optim.SGD(model[:3].parameters(), lr=0.1, weight_decay=0.1), model)
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.5, "weight_decay": 0.0})
    alone = net()
    plain = torch.optim.SGD(
        [{"params": alone[:3].parameters()}, {"params": alone[4].parameters(), "lr": 0.5, "weight_decay": 0.0}],
        lr=0.1,
        weight_decay=0.1,
    )
    loss_of(model, dd.rank()).backward()
    sum(loss_of(alone, rank) for rank in ranks()).backward()
    optimizer.step()
    plain.step()
    assert_close(list(model.parameters()), list(alone.parameters()))
    if dd.size() > 1:
        other = {"params": [nn.Parameter(torch.ones(2 + dd.rank() % 2))]}
        raises(hvd.HorovodInternalError, lambda: optimizer.add_param_group(other), "(2,)", "(3,)")


@law
def both_ways_of_zeroing_and_all_dtypes_train_like_one_process() -> None:
    for to_none in (True, False):
        model = net()
        model.untouched.requires_grad_(False)
        optimizer = by_hvd()(sgd(model), model)
        for step in range(2):
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, dd.rank(), step).backward()
            assert_close(gradients(model), mean_gradients(model, (step,)))
            optimizer.step()
    # Eight and eleven bits, rounded in each layer, and once more where ranks add up.
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        for wrap in (by_hvd(), by_dd(accumulate=2)):
            assert_trains_like_one_process(wrap, model=net().to(dtype), backwards=(2,), rtol=tolerance, atol=tolerance)


@law
def channels_last_keeps_its_strides() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    dd.broadcast_parameters(conv)
    optimizer = by_hvd(compression=hvd.Compression.fp16, groups=1)(sgd(conv), conv)
    images = torch.arange(3 * 3 * 5 * 5.0).reshape(3, 3, 5, 5) / 100
    conv(images.to(memory_format=torch.channels_last) * (dd.rank() + 1)).sum().backward()
    alone = copy.deepcopy(conv)
    alone.zero_grad()
    (alone(images) - alone.bias.view(1, -1, 1, 1)).sum().backward()
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    torch.testing.assert_close(conv.weight.grad, alone.weight.grad * mean, rtol=2e-3, atol=1e-3)
    assert conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
    optimizer.step()
    assert_same_everywhere(conv)


@law_alone
def an_optimizer_goes_on_in_the_next_session_of_the_face() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd_sgd(weight)
    (weight.sum() * dd.rank()).backward()
    optimizer.step()
    backend = dd.backend()
    dd.shutdown()
    dd.init(None if backend == "single" else backend, timeout_s=40)
    by_hvd()
    optimizer.zero_grad()
    (weight.sum() * dd.rank()).backward()
    optimizer.step()
    assert torch.allclose(weight, torch.full((2,), -2 * sum(ranks()) / dd.size()))


@law
def an_optimizer_that_is_wrapped_anew_gives_back_the_memory_of_before() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(1000))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    line = session.current().world.gradients._backend
    before = in_use(line)
    for _ in range(6):
        optimizer = by_hvd()(optimizer, model)
        optimizer.zero_grad()
        model[0].sum().backward()
        optimizer.step()
    assert in_use(line) <= before + 3


def in_use(line: object) -> int:
    """How many buffers have a place in the memory that ranks share, where they do."""
    host = getattr(line, "_host", None)
    return 0 if host is None else len(host._reserved)
