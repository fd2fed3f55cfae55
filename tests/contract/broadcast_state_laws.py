"""broadcast_parameters and broadcast_optimizer_state, and models that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from contract.oracle import law, loss_of, net, raises
from torch import nn

import dualdist as dd
from dualdist.errors import MismatchError


@law
def broadcast_parameters_copies_the_roots_model() -> None:
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
def models_of_different_shapes_or_orders_are_errors_on_every_rank() -> None:
    if dd.size() == 1:
        return
    model = nn.Linear(3, 3 + dd.rank() % 2)
    for call in (dd.broadcast_parameters, dd.check_consistency):
        raises(MismatchError, lambda call=call: call(model), "rank 1", "(4, 3)", "(3, 3)")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(MismatchError, lambda: dd.wrap_optimizer(optimizer), "rank 1")
    named = [(name, nn.Parameter(torch.ones(2))) for name in "abcd"]
    order = [0, 2, 1, 3] if dd.rank() == 1 else [0, 1, 2, 3]
    optimizer = torch.optim.SGD([named[number][1] for number in order], lr=0.1)
    words = ("another order", "rank 1 has c (2,)", "at index 1 of 4", "root has b (2,)")
    raises(MismatchError, lambda: dd.wrap_optimizer(optimizer, named), *words)


@law
def broadcast_optimizer_state_copies_the_roots_state() -> None:
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
    """State in float32 and integers for a parameter in bfloat16, nested, and state of no parameter."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": torch.tensor(0.5 * (dd.rank() + 1)), "betas": (0.5, dd.rank())})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state["steps of all"] = {"count": 7 + dd.rank()}
        for param in self.param_groups[0]["params"]:
            third = torch.full(param.shape, (dd.rank() + 1) / 3)
            self.state[param] = {"copy": third, "history": [third.double(), (torch.tensor(dd.rank() + 2), "words")]}


@law
def broadcast_optimizer_state_keeps_dtypes_and_param_groups() -> None:
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
