"""Collectives that move tensors, objects, parameters and optimizer state; work handles and arguments."""

from collections.abc import Iterable

import numpy as np
import torch
from contract.oracle import law, loss_of, net, raises, ranks
from torch import nn

import dualdist as dd
from dualdist.errors import MismatchError, UsageError


@law
def allgather_keeps_rank_order_and_accepts_uneven_rows() -> None:
    even = dd.allgather(torch.full((2, 3), dd.rank()))
    assert torch.equal(even, torch.cat([torch.full((2, 3), rank) for rank in ranks()]))
    uneven = dd.allgather(torch.full((dd.rank(), 2), float(dd.rank())))
    assert torch.equal(uneven, torch.cat([torch.full((rank, 2), float(rank)) for rank in ranks()]))
    assert dd.allgather(torch.tensor(dd.rank())).tolist() == list(ranks())
    assert dd.allgather(torch.empty(0, 5)).shape == (0, 5)
    assert dd.allgather(torch.empty(dd.rank() + 1, 0)).shape == (sum(rank + 1 for rank in ranks()), 0)
    assert dd.allgather(torch.empty(2 * dd.rank(), 0)).shape == (sum(2 * rank for rank in ranks()), 0)


@law
def allgather_and_broadcast_move_any_dtype() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.complex64, torch.float64):
        mine = torch.tensor([[dd.rank(), 1]]).to(dtype)
        all_ranks = torch.tensor([[rank, 1] for rank in ranks()]).to(dtype)
        assert torch.equal(dd.allgather(mine), all_ranks), dtype
        assert torch.equal(dd.broadcast(mine, dd.size() - 1), all_ranks[-1:]), dtype
    scalar = torch.tensor(dd.rank() == 0)
    assert dd.broadcast_(scalar, 0).item() is True


@law
def broadcast_copies_the_roots_values() -> None:
    for root in ranks():
        mine = torch.full((4,), float(dd.rank()))
        assert dd.broadcast(mine, root).tolist() == [float(root)] * 4
        assert mine.tolist() == [float(dd.rank())] * 4
        crossed = torch.full((2, 3), float(dd.rank())).t()
        assert dd.broadcast_(crossed, root) is crossed
        assert crossed.tolist() == [[float(root)] * 2] * 3


@law
def objects_are_gathered_and_broadcast() -> None:
    mine = {"rank": dd.rank(), "text": "x" * (dd.rank() * 1000), "tensor": torch.arange(dd.rank())}
    for rank, other in enumerate(dd.allgather_object(mine)):
        assert (other["rank"], len(other["text"]), len(other["tensor"])) == (rank, rank * 1000, rank)
    for root in ranks():
        assert dd.broadcast_object((dd.rank(), None), root) == (root, None)
    raises(UsageError, lambda: dd.broadcast_object(lambda: None), "pickle")
    raises(UsageError, lambda: dd.allgather_object(lambda: None if dd.rank() == 0 else 1), "pickle")
    dd.barrier()


@law
def numbers_of_numpy_and_torch_are_accepted_as_arguments() -> None:
    last = np.int64(dd.size() - 1)
    assert dd.broadcast(torch.tensor(dd.rank()), last).item() == last
    assert dd.broadcast_(torch.tensor(dd.rank()), torch.tensor(last)).item() == last
    assert dd.broadcast_object(dd.rank(), last) == last
    half, two = np.float32(0.5), torch.tensor(2.0)
    assert dd.allreduce(torch.ones(1), "sum", prescale=half).item() == dd.size() / 2
    assert dd.grouped_allreduce([torch.ones(1)], "sum", postscale=half)[0].item() == dd.size() / 2
    assert dd.reducescatter(torch.ones(dd.size()), "sum", prescale=two).item() == dd.size() * 2
    rows, _ = dd.alltoall(torch.full((dd.size(),), dd.rank()), np.ones(dd.size(), dtype=np.int8))
    assert rows.tolist() == list(ranks())
    group = dd.new_group(np.arange(dd.size()))
    assert group.ranks == tuple(ranks())
    dd.remove_group(group)


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
    raises(MismatchError, lambda: dd.wrap_optimizer(optimizer, named, shard=True), *words)


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
