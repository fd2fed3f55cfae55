"""The wrapped optimizer as an object: its class, hooks, copies and groups, Horovod's controls, several optimizers."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from contract.optimizer_laws import by_dd, by_hvd, sgd
from contract.oracle import (
    assert_close,
    assert_same_everywhere,
    closure_of,
    gradients,
    law,
    law_alone,
    loss_of,
    mean_gradients,
    mean_scale,
    net,
    raises,
    ranks,
    reopen,
    total_loss,
)
from torch import nn

import dualdist as dd
import dualdist.hvd as hvd
from dualdist.ddp.optimizer import get_wrapper
from dualdist.errors import UsageError


@law
def means_of_the_smallest_gradients_have_the_same_bits_on_every_backend() -> None:
    """A division rounds below 2^-126: a power of two ranks divide before the sum, as DDP does, others after it."""

    def own(rank: int) -> torch.Tensor:
        return 2.0**-149 * torch.arange(1.0, 8.0) * (2 * rank + 1)

    param = nn.Parameter(torch.zeros(7))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([param], lr=0.1), [("param", param)])
    size = dd.size()
    is_power_of_two = size & (size - 1) == 0
    for is_in_place in (False, True):
        optimizer.zero_grad(set_to_none=not is_in_place)
        (param * own(dd.rank())).sum().backward()
        if is_power_of_two:
            right = torch.stack([own(rank) / size for rank in range(size)]).sum(0)
        else:
            right = torch.stack([own(rank) for rank in range(size)]).sum(0) / size
        assert param.grad is not None
        assert torch.equal(param.grad, right)


@law
def a_step_after_synchronize_warns_and_does_not_reduce_again() -> None:
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
def synchronize_reduces_before_all_backward_passes() -> None:
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
def parameter_names_agree_between_ranks() -> None:
    by_hvd()
    model = net()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    names = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))._parameter_names
    assert len(set(names.values())) == len(names) == 4
    assert hvd.allgather_object(sorted(names.values())) == [sorted(names.values())] * dd.size()
    names = by_hvd()(sgd(model), model)._parameter_names
    assert names == {param: name for name, param in model.named_parameters()}


@law
def wrapping_again_replaces_the_options() -> None:
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
    """A subclass with its own arguments, a step that calls the base's, and an attribute that GradScaler reads."""

    _step_supports_amp_scaling = True

    def __init__(self, model: nn.Module, *, factor: float) -> None:
        super().__init__(model.parameters(), lr=0.1 * factor)
        self.factor = factor

    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * self.factor * scale
        return super().step(closure)


@law
def a_subclass_keeps_its_class_attributes_and_step() -> None:
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
            assert (optimizer.factor, optimizer.defaults["mine"]) == (2.0, 3)
            assert optimizer._step_supports_amp_scaling
            alone = net()
            plain = Careful(alone, factor=2.0)
            closure = closure_of(optimizer, lambda model=model: loss_of(model, dd.rank()))
            right = total_loss(alone) / dd.size() * factor
            right.backward()
            if closes:
                torch.testing.assert_close(optimizer.step(closure, 0.5), right, rtol=1e-5, atol=1e-6)
            else:
                closure()
                assert optimizer.step(scale=0.5) is None
            plain.step(scale=0.5)
            assert_close(list(model.parameters()), list(alone.parameters()))
            assert len(calls) == 2, "once for each of the two steps"


@law
def step_hooks_run_once_and_see_the_new_parameters() -> None:
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
def wrapping_keeps_the_object_and_copies_are_refused_until_they_are_wrapped() -> None:
    """A checkpoint loads into a plain optimizer, and back."""
    for wrap, make in ((by_hvd(), sgd), (by_dd(), lambda model: torch.optim.Adam(model.parameters(), lr=0.01))):
        model, alone = net(), net()
        given, plain = make(model), make(alone)
        optimizer = wrap(given, model)
        assert optimizer is given
        assert type(optimizer) is type(plain)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for each, other in ((model, optimizer), (alone, plain)):
            (loss_of(model, dd.rank()) if each is model else total_loss(alone) / dd.size()).backward()
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
            pickle.loads(pickle.dumps(model))
        for found in copies:
            assert type(found) is type(optimizer)
            for name in ("synchronize", "_parameter_names", "_dualdist_wrapper", "op"):
                assert not hasattr(found, name), name
            if dd.size() > 1:
                raises(UsageError, found.step, "a copy of one that dd.wrap_optimizer wrapped")
            found.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            weight = dd.wrap_optimizer(found).param_groups[0]["params"][0]
            found.zero_grad()
            (weight * dd.rank()).sum().backward()
            assert torch.equal(weight.grad, torch.full_like(weight, (dd.size() - 1) / 2))
            found.step()
        optimizer.zero_grad()
        loss_of(model, dd.rank(), 1).backward()
        assert_close(gradients(model), mean_gradients(model, (1,)))
        optimizer.step()
        assert_same_everywhere(model)


@law
def param_groups_added_later_keep_their_options_and_are_reduced() -> None:
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
    total_loss(alone).backward()
    optimizer.step()
    plain.step()
    assert_close(list(model.parameters()), list(alone.parameters()))
    if dd.size() > 1:
        other = {"params": [nn.Parameter(torch.ones(2 + dd.rank() % 2))]}
        raises(hvd.HorovodInternalError, lambda: optimizer.add_param_group(other), "(2,)", "(3,)")


@law
def gradients_keep_channels_last_strides() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    dd.broadcast_parameters(conv)
    optimizer = by_hvd(compression=hvd.Compression.fp16, groups=1)(sgd(conv), conv)
    images = torch.arange(3 * 3 * 5 * 5.0).reshape(3, 3, 5, 5) / 100
    conv(images.to(memory_format=torch.channels_last) * (dd.rank() + 1)).sum().backward()
    alone = copy.deepcopy(conv)
    alone.zero_grad()
    (alone(images) - alone.bias.view(1, -1, 1, 1)).sum().backward()
    mean = mean_scale()
    torch.testing.assert_close(conv.weight.grad, alone.weight.grad * mean, rtol=2e-3, atol=1e-3)
    assert conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
    optimizer.step()
    assert_same_everywhere(conv)


@law_alone
def hvd_optimizers_work_in_the_next_session() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd_sgd(weight)
    (weight.sum() * dd.rank()).backward()
    optimizer.step()
    backend = dd.backend()
    dd.shutdown()
    reopen(backend)
    by_hvd()
    optimizer.zero_grad()
    (weight.sum() * dd.rank()).backward()
    optimizer.step()
    assert torch.allclose(weight, torch.full((2,), -2 * sum(ranks()) / dd.size()))


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
def gradients_of_optimizers_that_only_some_ranks_use_do_not_mix() -> None:
    """Rank 0's loss uses both, the others' uses one: equal shapes would be added to each other unnoticed.

    One of them steps, as those of a generator and a critic do in turn.
    """
    one, two = (nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)]) for _ in range(2))
    first = dd.wrap_optimizer(torch.optim.SGD(one.parameters(), lr=0.1))
    second = dd.wrap_optimizer(torch.optim.SGD(two.parameters(), lr=0.1))
    for stepping in (first, second, first):
        first.zero_grad()
        second.zero_grad()
        loss = two[0].sum() * 100 + two[1].sum() * 100
        if dd.rank() == 0:
            loss = loss + one[0].sum()
        loss.backward()
        assert torch.allclose(one[0].grad, torch.full((3,), 1 / dd.size()))
        assert one[1].grad is None
        assert two[0].grad.tolist() == [100.0] * 3
        stepping.step()


@law
def the_newest_optimizer_of_a_model_reduces() -> None:
    """However long the old one lives: garbage collection runs at different times on the ranks."""
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
def a_reduction_ends_with_the_last_reference_to_its_optimizer() -> None:
    """Without the garbage collector, which runs at different times on the ranks."""
    torch.optim.SGD(net().parameters(), lr=0.1)  # torch's first one imports what leaves cycles
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for options in ({}, {"shard": True}, {"check_every": 1}, {"compression": "topk"}):
            model = net()
            optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)  # type: ignore[arg-type]
            loss_of(model, dd.rank()).backward()
            optimizer.step()
            alive = [*map(weakref.ref, (optimizer, get_wrapper(optimizer), get_wrapper(optimizer).reducer))]
            del optimizer
            assert [reference() for reference in alive] == [None] * len(alive), options
    finally:
        if was_enabled:
            gc.enable()


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
def unfreezing_a_parameter_does_not_block() -> None:
    """A rank whose loss does not use an optimizer learns of its new parameters when the others reduce them."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    first.bias.requires_grad_(False)
    for model in (first, second):
        dd.broadcast_parameters(model)
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
