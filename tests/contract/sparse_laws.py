"""Sparse gradients, also of ranks that have joined, and dtypes of the messages between ranks."""

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import torch
from contract.optimizer_laws import Fixed, Wrap, by_dd, by_hvd
from contract.oracle import assert_close, assert_same_everywhere, gradients, law, law_alone, raises, ranks, refuse
from torch import nn

import dualdist as dd
import dualdist.hvd as hvd
from dualdist.ddp import bucket


class Tied(nn.Module):
    """An embedding with sparse gradients, whose weights a dense layer may share, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(dd.size() + 1, 3, sparse=True)
        self.dense = nn.Linear(3, 2)
        self.untouched = nn.Parameter(torch.ones(2))

    def forward(self, row: int | None, *, tied: bool = False) -> torch.Tensor:
        hidden = torch.ones(2, 3) if row is None else self.embedding(torch.tensor([row, row]))
        return (hidden @ self.embedding.weight.t() if tied else self.dense(hidden)).square().sum()


def assert_sparse_trains(wrap: Wrap, make: Callable[[nn.Module], torch.optim.Optimizer], op: str = "mean") -> None:
    """Rank r uses row r; in the second step rank 0 uses none, in the third no rank does, in the last all do."""
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
def the_default_dtype_does_not_affect_messages_between_ranks() -> None:
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
    for dense in (False, True):
        assert_sparse_trains(by_dd(sparse_as_dense=dense), slow)
        assert_sparse_trains(by_hvd(sparse_as_dense=dense, op=hvd.Sum, groups=1), slow, "sum")
    assert_sparse_trains(by_hvd(sparse_as_dense=True, gradient_predivide_factor=2.0), slow)


@law
def sparse_adam_gets_sparse_gradients() -> None:
    for dense in (False, True):
        model = Tied()
        alone = copy.deepcopy(model)
        plain = sparse_adam(alone)
        optimizer = by_hvd(sparse_as_dense=dense)(sparse_adam(model), nn.ParameterList([model.embedding.weight]))
        model(dd.rank()).backward()
        (sum(alone(rank) for rank in ranks()) / dd.size()).backward()
        optimizer.step()
        plain.step()
        assert_close([model.embedding.weight.detach()], [alone.embedding.weight.detach()], 1e-4, 1e-5)


@law
def gradients_sparse_on_one_rank_and_dense_on_another_become_dense() -> None:
    """Ranks that tie the weights have a dense gradient. Also after steps in which all were sparse, and before."""
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
def sparse_gradients_of_different_sparse_dims_are_added() -> None:
    """An embedding's are rows, those of torch.gather single elements; a rank without a gradient knows of neither."""
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
def gradients_once_dense_are_sent_dense_on_async_devices() -> None:
    """As on a GPU, where a rank with a dense gradient does not learn that another one's is sparse."""
    usual, bucket.accelerator = bucket.accelerator, SimpleNamespace(is_accelerator=lambda device: True)
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
        bucket.accelerator = usual


@law_alone
def sparse_gradients_sent_by_an_interrupted_backward_are_dropped() -> None:
    """It raises on rank 0 only, which retries."""
    first, table = nn.Parameter(torch.ones(1)), nn.Embedding(1 << 19, 1, sparse=True)  # a separate bucket
    dd.broadcast_parameters(table)
    optimizer = dd.wrap_optimizer(torch.optim.SGD([first, table.weight], lr=0.1))

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


def train_uneven(wrap: Wrap, *, drops: bool) -> weakref.ref[torch.Tensor]:
    """Train on size - r batches on rank r; then join, or return a reference to the model, which is freed."""
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
        assert dd.join() == 0
        dd.broadcast_parameters(model)
        assert_same_everywhere(model)
        optimizer.zero_grad()
        model(dd.rank()).backward()
        optimizer.step()
        assert_same_everywhere(model)
    return weakref.ref(model.dense.weight)


@law_alone
def joined_ranks_follow_one_optimizer() -> None:
    train_uneven(by_dd(), drops=False)


@law_alone
def joined_ranks_follow_large_compressed_and_complex_gradients() -> None:
    """These are not sent in buckets."""
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
def joined_ranks_may_have_freed_their_model() -> None:
    dropped = train_uneven(by_dd(), drops=True)
    if dd.rank() % 2:
        gc.collect()  # at another time on each rank
        assert dropped() is None, "the session does not keep the model"
    dd.join()


@law_alone
def joined_ranks_follow_several_optimizers() -> None:
    other = dd.wrap_optimizer(slow(nn.Linear(1, 1)))
    for wrap in (
        by_dd(sparse_as_dense=True),
        by_dd(compression=Fixed),
        by_hvd(groups=2, gradient_predivide_factor=2.0),
    ):
        train_uneven(wrap, drops=False)
    train_uneven(by_dd(), drops=True)
    dd.join()
    del other
