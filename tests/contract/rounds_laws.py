"""The laws of gradients that are sparse, missing, infinite or late: rank by rank another way, and no rank waits."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import torch
from contract.optimizer_laws import Fixed, Wrap, by_dd, by_hvd, sgd
from contract.oracle import (
    assert_close,
    assert_same_everywhere,
    gradients,
    law,
    law_alone,
    loss_of,
    net,
    raises,
    ranks,
)
from torch import nn

import dualdist as dd
import dualdist.hvd as hvd
from dualdist.ddp import buckets


class Tied(nn.Module):
    """An embedding with sparse gradients, whose weights may be used as a dense layer too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(dd.size() + 1, 3, sparse=True)
        self.dense = nn.Linear(3, 2)

    def forward(self, row: int | None, *, tied: bool = False) -> torch.Tensor:
        hidden = torch.ones(2, 3) if row is None else self.embedding(torch.tensor([row, row]))
        return (hidden @ self.embedding.weight.t() if tied else self.dense(hidden)).square().sum()


def assert_sparse_trains(wrap: Wrap, make: Callable[[nn.Module], torch.optim.Optimizer], op: str = "mean") -> None:
    """Rank r uses row r; in the second step rank 0 uses none, in the third nobody does, in the last all do again."""
    model = Tied()
    alone = copy.deepcopy(model)
    optimizer, plain = wrap(make(model), model), make(alone)
    for step in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        rows = [None if step == 2 or (step == 1 and rank == 0) else rank for rank in ranks()]
        model(rows[dd.rank()]).backward()
        (sum(alone(row) for row in rows) / (dd.size() if op == "mean" else 1)).backward()
        found, right = model.embedding.weight.grad, alone.embedding.weight.grad
        assert (found is None) == (right is None)
        if found is not None and right is not None:
            assert found.is_sparse
            torch.testing.assert_close(found.to_dense(), right.to_dense(), rtol=1e-5, atol=1e-6)
        assert_close(gradients(model.dense), gradients(alone.dense))
        optimizer.step()
        plain.step()
    assert_close(list(model.parameters()), list(alone.parameters()), 1e-4, 1e-5)


@law
def the_default_dtype_does_not_matter_to_what_ranks_tell_each_other() -> None:
    usual = torch.get_default_dtype()
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    try:
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            torch.set_default_dtype(dtype)
            optimizers = [dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.0)) for weight in weights]
            optimizers.append(dd.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.0), op="adasum"))
            for weight, optimizer in zip(weights, optimizers, strict=False):
                optimizer.zero_grad()
                weight.sum().backward()
                assert weight.grad.tolist() == [1.0, 1.0]
                optimizer.step()
            optimizers[-1].step()
    finally:
        torch.set_default_dtype(usual)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam([model.embedding.weight], lr=0.1)


def slow(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@law
def sparse_gradients_train_like_one_process() -> None:
    assert_sparse_trains(by_dd(), slow)
    assert_sparse_trains(by_hvd(sparse_as_dense=True, gradient_predivide_factor=2.0), slow)
    for dense in (False, True):
        assert_sparse_trains(by_hvd(sparse_as_dense=dense, op=hvd.Sum, groups=1), slow, "sum")


@law
def sparse_optimizers_get_sparse_gradients() -> None:
    for dense in (False, True):
        model = Tied()
        optimizer = hvd_of(sparse_adam(model), sparse_as_dense=dense)
        alone = copy.deepcopy(model)
        plain = sparse_adam(alone)
        model(dd.rank()).backward()
        (sum(alone(rank) for rank in ranks()) / dd.size()).backward()
        optimizer.step()
        plain.step()
        assert_close([model.embedding.weight.detach()], [alone.embedding.weight.detach()], 1e-4, 1e-5)


def hvd_of(optimizer: torch.optim.Optimizer, **options: object) -> torch.optim.Optimizer:
    return by_hvd(**options)(
        optimizer, nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])
    )


@law
def weights_that_are_sparse_on_one_rank_and_dense_on_another_are_dense() -> None:
    """Tied weights: who uses both ends has a dense gradient. Also once they have been sparse, and afterwards."""
    for dense in (False, True):
        for first in (False, True):
            model = Tied()
            alone = copy.deepcopy(model)
            optimizer = by_dd(sparse_as_dense=dense)(slow(model), model)
            for step in range(3):
                optimizer.zero_grad()
                alone.zero_grad()
                tied = [bool(rank % 2 == 0 and (step or first)) for rank in ranks()]
                model(dd.rank(), tied=tied[dd.rank()]).backward()
                (sum(alone(rank, tied=tied[rank]) for rank in ranks()) / dd.size()).backward()
                found, right = model.embedding.weight.grad, alone.embedding.weight.grad
                assert found.is_sparse == (not any(tied))
                torch.testing.assert_close(found.to_dense(), right.to_dense(), rtol=1e-4, atol=1e-5)


@law
def sparse_gradients_of_other_dimensions_are_added_up() -> None:
    """An embedding's are rows, those of torch.gather single elements; a rank that has none knows of neither."""
    places = torch.tensor([[0], [2], [1], [0]])
    for uses in (["rows", "elements"], ["elements"], ["elements", "elements", "rows"]):
        table, other = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(2))
        optimizer = dd.wrap_optimizer(torch.optim.SGD([table, other], lr=1.0))
        right = torch.zeros(4, 3)
        if "rows" in uses[: dd.size()]:
            right[1] += 1
        right[torch.arange(4), places.view(-1)] += uses[: dd.size()].count("elements")
        use = (uses + [""] * dd.size())[dd.rank()]
        for _ in range(2):
            optimizer.zero_grad()
            loss = other.sum()
            if use == "rows":
                loss = loss + nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum()
            elif use == "elements":
                loss = loss + torch.gather(table, 1, places, sparse_grad=True).sum()
            loss.backward()
            dims = 1 if "rows" in uses[: dd.size()] else 2
            assert (table.grad.is_sparse, table.grad.sparse_dim()) == (True, dims), uses
            torch.testing.assert_close(table.grad.to_dense(), right / dd.size())
            optimizer.step()


@law
def what_was_dense_before_is_sent_as_dense_where_nobody_waits_for_flags() -> None:
    """As on a GPU, where a rank that has the gradient dense does not hear that another has it sparse."""
    usual, buckets.ASYNC_DEVICES = buckets.ASYNC_DEVICES, frozenset(("cpu",))
    try:
        for uses in ("dense mixed sparse", "sparse mixed dense sparse", "mixed sparse dense mixed"):
            table = nn.Embedding(dd.size() + 1, 3, sparse=True)
            dd.broadcast_parameters(table)
            optimizer = dd.wrap_optimizer(torch.optim.SGD(table.parameters(), lr=0.1))
            were_dense = False
            for use in uses.split():
                are_dense = [use == "dense" or (use == "mixed" and rank == 0) for rank in ranks()]
                right = torch.zeros(dd.size() + 1, 3)
                for rank, is_dense in enumerate(are_dense):
                    right[rank] += 1 / dd.size()
                    right += is_dense / dd.size()
                optimizer.zero_grad()
                (
                    table(torch.tensor([dd.rank()])).sum() + (table.weight.sum() if are_dense[dd.rank()] else 0)
                ).backward()
                found, were_dense = table.weight.grad, were_dense or (all(are_dense) and use == uses.split()[0])
                assert found.is_sparse == (use == "sparse" and not were_dense), uses
                torch.testing.assert_close(found.to_dense(), right)
                optimizer.step()
            assert_same_everywhere(table)
    finally:
        buckets.ASYNC_DEVICES = usual


@law_alone
def a_backward_that_raised_after_sparse_gradients_left_does_not_spoil_the_next() -> None:
    """It raises on rank 0 only, which tries again: what the others sent for the first time is of no use to anybody."""
    first, table = nn.Parameter(torch.ones(1)), nn.Embedding(1 << 19, 1, sparse=True)  # a bucket of its own
    optimizer = dd.wrap_optimizer(torch.optim.SGD([first, table.weight], lr=0.1))

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("refused")

    for _ in range(2):
        optimizer.zero_grad()
        product = first * 2
        loss = product.sum() + table(torch.tensor([dd.rank()])).sum()
        product.register_hook(refuse)
        if dd.rank() == 0:
            raises(ValueError, loss.backward, "refused")
        optimizer.zero_grad()
        (table(torch.tensor([dd.rank()])).sum() + first.sum()).backward()
        grad = table.weight.grad.to_dense()
        assert torch.allclose(grad[: dd.size()], torch.full((dd.size(), 1), 1 / dd.size()))
        assert grad.sum() == 1.0
        optimizer.step()


@law
def a_parameter_without_gradient_on_some_ranks_gets_the_mean_over_all() -> None:
    for wrap in (
        by_hvd(backward_passes_per_step=2),
        by_hvd(groups=2, compression=Fixed),
        by_hvd(op=hvd.Sum, gradient_predivide_factor=1.0),
    ):
        layers = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
        dd.broadcast_parameters(layers)
        optimizer = wrap(slow(layers), layers)
        passes, factor = optimizer.backward_passes_per_step, dd.size() if optimizer.op == hvd.Sum else 1
        for _ in range(passes):
            chosen = [0] if dd.rank() else [0, 1]  # layer 1 by rank 0 only, layer 2 by nobody
            sum(layers[index](torch.ones(1, 2)).sum() for index in chosen).backward()
        assert torch.allclose(layers[0].weight.grad, torch.full((1, 2), 1.0 * passes * factor))
        assert torch.allclose(layers[1].weight.grad, torch.full((1, 2), passes * factor / dd.size()))
        assert layers[2].weight.grad is None
        optimizer.step()


@law
def loss_scaling_works_horovods_way_too() -> None:
    """An overflow on one rank is everybody's; in the other steps, what is clipped is the mean."""
    for op, factor in ((hvd.Average, 1 / dd.size()), (hvd.Sum, 1.0)):
        model = net()
        optimizer, alone = by_hvd(op=op)(sgd(model), model), net()
        plain = sgd(alone)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, dd.rank(), step)
            scaler.scale(loss * float("inf") if step == 1 and dd.rank() == dd.size() - 1 else loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (2.0 if step else 4.0)
            if step != 1:
                plain.zero_grad()
                (sum(loss_of(alone, rank, step) for rank in ranks()) * factor).backward()
                nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
                plain.step()
            assert_close([p.detach() for p in model.parameters()], [p.detach() for p in alone.parameters()])


@law
def closures_and_lbfgs_train_like_one_process() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        model.untouched.requires_grad_(False)
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    for op, factor in ((hvd.Average, 1 / dd.size()), (hvd.Sum, 1.0)):
        model, alone = net().double(), net().double()
        optimizer, plain = by_hvd(op=op)(make(model), model), make(alone)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, dd.rank())
            loss.backward()
            return loss

        def whole(
            model: nn.Module = alone, optimizer: torch.optim.Optimizer = plain, factor: float = factor
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(loss_of(model, rank) for rank in ranks()) * factor
            loss.backward()
            return loss

        found, right = optimizer.step(closure), plain.step(whole)
        torch.testing.assert_close(found.detach(), right.detach(), rtol=1e-9, atol=1e-9)
        assert_close([p.detach() for p in model.parameters()], [p.detach() for p in alone.parameters()], 1e-7, 1e-9)


def train_uneven(wrap: Wrap, *, drops: bool) -> weakref.ref[torch.Tensor]:
    """Rank r has size - r batches; who has none joins, or drops its model first, of which a reference comes back."""
    model = Tied()
    optimizer = wrap(slow(model), model)
    alone = copy.deepcopy(model)
    plain = slow(alone)
    for step in range(dd.size() - dd.rank()):
        here = [rank for rank in ranks() if step < dd.size() - rank]
        optimizer.zero_grad()
        plain.zero_grad()
        model(dd.rank()).backward()
        (sum(alone(rank) for rank in here) / dd.size()).backward()
        torch.testing.assert_close(
            model.embedding.weight.grad.to_dense(), alone.embedding.weight.grad.to_dense(), rtol=1e-3, atol=1e-4
        )
        assert_close(gradients(model.dense), gradients(alone.dense), 1e-3, 1e-4)
        optimizer.step()
        plain.step()
    if not drops:
        dd.join()
        dd.broadcast_parameters(model)
        assert_same_everywhere(model)
        optimizer.zero_grad()
        model(dd.rank()).backward()
        optimizer.step()
        assert_same_everywhere(model)
    return weakref.ref(model.dense.weight)


@law_alone
def those_who_join_follow_one_optimizer_of_any_kind() -> None:
    train_uneven(by_dd(), drops=False)


@law_alone
def those_who_join_follow_gradients_of_any_size_and_kind() -> None:
    """Large ones of a compressor of one's own, and complex ones, which go other ways than those in a bucket."""
    for dtype, compressor in ((torch.float32, Fixed), (torch.complex64, None)):
        weight = nn.Parameter(torch.ones(20_000, dtype=dtype))
        optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), compression=compressor)
        for step in range(dd.rank() + 1):
            optimizer.zero_grad()
            weight.real.sum().backward()
            assert weight.grad[0].real.item() == (dd.size() - step) / dd.size()
            optimizer.step()
        assert dd.join() == dd.size() - 1
        del weight, optimizer  # so that the next one is the only one


@law_alone
def those_who_join_may_have_dropped_their_model() -> None:
    dropped = train_uneven(by_dd(), drops=True)
    if dd.rank() % 2:
        gc.collect()  # at another time on each rank
        assert dropped() is None, "nobody keeps the model"
    dd.join()


@law_alone
def those_who_join_follow_several_optimizers_of_any_kind() -> None:
    for wrap in (
        by_dd(sparse_as_dense=True),
        by_dd(compression=Fixed),
        by_hvd(groups=2, gradient_predivide_factor=2.0),
    ):
        train_uneven(wrap, drops=False)
    train_uneven(by_dd(), drops=True)
    dd.join()
