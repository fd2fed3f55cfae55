"""Autograd through collectives: first and second derivatives, also where ranks differ in requires_grad."""

from collections.abc import Callable

import torch
from contract.oracle import law, raises, ranks

import dualdist as dd
from dualdist.errors import MismatchError


@law
def backward_of_every_collective_matches_horovods() -> None:
    """Sums of the ranks' gradients, or means where Horovod takes means."""
    size, rank = dd.size(), dd.rank()
    weights = [torch.arange(1.0, 4.0) * (r + 1) for r in ranks()]
    mean_weight, mine = sum(weights) / size, weights[rank]

    def gradient(call: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        given = given.clone().requires_grad_()
        call(given).backward()
        assert given.grad is not None
        return given.grad

    x = torch.ones(3)
    assert torch.equal(gradient(lambda t: (dd.allreduce(t, "sum") * mine).sum(), x), mean_weight * size)
    torch.testing.assert_close(gradient(lambda t: (dd.allreduce(t) * mine).sum(), x), mean_weight)
    torch.testing.assert_close(
        gradient(lambda t: (dd.grouped_allreduce([t, 2 * t])[1] * mine).sum(), x), 2 * mean_weight
    )
    scaled = gradient(lambda t: (dd.allreduce(t, "sum", prescale=2.0, postscale=3.0) * mine).sum(), x)
    assert torch.equal(scaled, mean_weight * size * 6)
    root = size - 1
    back = gradient(lambda t: (dd.broadcast(t, root) * mine).sum(), x)
    torch.testing.assert_close(back, mean_weight if rank == root else torch.zeros(3))
    rows = torch.ones(rank + 1, 3)
    places = torch.arange(float(sum(r + 1 for r in ranks()))).view(-1, 1)
    start = sum(r + 1 for r in range(rank))
    expected = places[start : start + rank + 1] * mean_weight
    torch.testing.assert_close(gradient(lambda t: (dd.allgather(t) * places * mine).sum(), rows), expected)
    torch.testing.assert_close(
        gradient(lambda t: (dd.grouped_allgather([t, t])[0] * places * mine).sum(), rows), expected
    )
    splits = [r + 1 for r in ranks()]
    sent = torch.ones(sum(splits), 3)
    expected = torch.cat([weights[r].expand(r + 1, 3) for r in ranks()])
    assert torch.equal(gradient(lambda t: (dd.alltoall(t, splits)[0] * mine).sum(), sent), expected)
    shares = torch.ones(size, 3)
    torch.testing.assert_close(gradient(lambda t: (dd.reducescatter(t) * mine).sum(), shares), torch.stack(weights))
    assert torch.equal(
        gradient(lambda t: (dd.reducescatter(t, "sum") * mine).sum(), shares), torch.stack(weights) * size
    )
    assert not dd.allreduce(torch.ones(3), "sum").requires_grad


def derivatives(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of (call(x^2) . call(x^2)) / 2, and that of the sum of its cubes."""
    y = call(x * x)
    (first,) = torch.autograd.grad(0.5 * (y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**3).sum(), x)
    return first, second


@law
def second_derivatives_are_reduced_like_first_ones() -> None:
    """With equal values on all ranks, each collective is call(x) = a x on one rank, with the gradient g -> b g."""
    size = dd.size()
    x = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    rows = x.detach().repeat(size).requires_grad_()
    calls: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, float, float]] = [
        (lambda t: dd.allreduce(t), x, 1.0, 1.0),
        (lambda t: dd.allreduce(t, "sum"), x, size, size),
        (lambda t: dd.allreduce(t, "sum", prescale=2.0, postscale=3.0), x, 6 * size, 6 * size),
        (lambda t: dd.grouped_allreduce([t, t.float()], "sum")[0], x, size, size),
        (lambda t: dd.alltoall(t, [3] * size)[0], rows, 1.0, 1.0),
        (lambda t: dd.alltoall(t), rows, 1.0, 1.0),
    ]
    for number, (call, given, a, b) in enumerate(calls):
        first, second = derivatives(call, given)
        values = given.detach()
        torch.testing.assert_close(first, 2 * a * b * values**3, msg=f"first {number}")
        # first = 2 x b(a x^2), where b and a are linear: its cubes have the gradient 6 first^2 (b a x^2 + 2 x a b x).
        twice = 6 * first.detach() ** 2 * values**2 * a * b * 3
        torch.testing.assert_close(second, twice, msg=f"second {number}")


@law
def second_derivatives_of_allgather_broadcast_and_reducescatter_match_one_process() -> None:
    size, rank = dd.size(), dd.rank()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    # Each mean on the way back meets rows that only one rank has asked for: one part in as many as there are ranks.
    (first,) = torch.autograd.grad((dd.allgather(x) ** 3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x / size)
    (first,) = torch.autograd.grad((dd.broadcast(x, size - 1) ** 3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * x**2 if rank == size - 1 else torch.zeros(2))
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x / size if rank == size - 1 else torch.zeros(2))
    rows = torch.arange(1.0, 2 * size + 1).requires_grad_()
    (first,) = torch.autograd.grad((dd.reducescatter(rows, "sum") ** 3).sum(), rows, create_graph=True)
    torch.testing.assert_close(first, size * 3 * (size * rows) ** 2)
    (second,) = torch.autograd.grad(first.sum(), rows)
    assert second.count_nonzero() == 2 * size


@law
def grouped_collectives_differentiate_floats_beside_integers() -> None:
    size = dd.size()
    for call, factor in (
        (dd.grouped_allgather, 1),
        (lambda tensors: dd.grouped_allreduce(tensors, "sum"), size),
        (lambda tensors: dd.grouped_reducescatter(tensors, "sum"), size),
    ):
        x = torch.ones(size, requires_grad=True)
        fixed = torch.ones(size)
        found = call([torch.arange(size), x, fixed, torch.ones(size, dtype=torch.int16)])
        assert [tensor.requires_grad for tensor in found] == [False, True, True, False]
        (found[1].sum() + found[2].sum()).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [float(factor)] * size


@law
def requires_grad_may_differ_between_ranks() -> None:
    """Only a backward in which some ranks take no part is an error, on every rank, that names the collective."""
    size = dd.size()
    mine = torch.ones(size, requires_grad=dd.rank() == 0)
    calls: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: dd.allreduce(mine, "sum"),
        lambda: dd.grouped_allreduce([mine, mine], "sum")[1],
        lambda: dd.allgather(mine),
        lambda: dd.grouped_allgather([mine])[0],
        lambda: dd.broadcast(mine),
        lambda: dd.alltoall(mine),
        lambda: dd.reducescatter(mine, "sum"),
        lambda: dd.grouped_reducescatter([mine], "sum")[0],
    )
    for call in calls:
        found = call().sum()
        assert dd.allreduce(torch.ones(1), "sum").item() == size
        if size == 1:
            found.backward()
            continue
        go_on = found.backward if dd.rank() == 0 else lambda: dd.allreduce(torch.ones(1), name="meanwhile")
        raises(MismatchError, go_on, ".backward", "meanwhile", "rank 0")
        assert dd.allreduce(torch.tensor([dd.rank()]), "sum").item() == sum(ranks())
