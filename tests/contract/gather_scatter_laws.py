"""Scatter and gather, which are built from other collectives on every backend."""

from collections.abc import Callable

import numpy as np
import torch
from contract.oracle import law, raises, ranks

import dualdist as dd
from dualdist.errors import NotInitializedError, UnsupportedError, UsageError

DTYPES = (torch.float32, torch.int16, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2)


def of_root(tensor: torch.Tensor, root: int) -> torch.Tensor | None:
    return tensor if dd.rank() == root else None


def share(rows: torch.Tensor, rank: int) -> torch.Tensor:
    return rows.tensor_split(dd.size())[rank]  # which gives the first ones the remainder


@law
def scatter_splits_the_roots_rows_in_rank_order() -> None:
    for root in ranks():
        for count in (0, 1, dd.size(), 2 * dd.size() + 1):
            rows = torch.arange(count * 3.0).view(count, 3) + root
            found = dd.scatter(of_root(rows, root), root)
            assert torch.equal(found, share(rows, dd.rank())), (root, count)
    for dtype in DTYPES:
        rows = torch.arange(2 * dd.size()).remainder(2).to(dtype)
        found = dd.scatter(of_root(rows, 0))
        assert found.dtype == dtype
        assert torch.equal(found.to(torch.complex64), share(rows, dd.rank()).to(torch.complex64)), dtype


@law
def scatter_takes_splits_from_the_root_and_ignores_other_ranks_arguments() -> None:
    root = dd.size() - 1
    splits = [2 * rank for rank in ranks()]
    rows = torch.arange(float(sum(splits)))
    expected = rows.split(splits)[dd.rank()]
    mine: torch.Tensor | None = rows
    for given in (splits, torch.tensor(splits), np.array(splits)):
        mine = rows if dd.rank() == root else (None, torch.ones(7, 2, dtype=torch.int8))[dd.rank() % 2]
        found = dd.scatter(mine, np.int64(root), given if dd.rank() == root else [-1])
        assert torch.equal(found, expected)
    assert dd.scatter(of_root(torch.empty(3, 0), 0)).shape == (share(torch.empty(3), dd.rank()).shape[0], 0)
    crossed = torch.arange(6.0 * dd.size()).view(3, 2 * dd.size()).t()
    assert torch.equal(dd.scatter(of_root(crossed, 0)), share(crossed, dd.rank()))


@law
def gather_returns_all_rows_on_the_root_and_none_elsewhere() -> None:
    for root in ranks():
        for dtype in DTYPES:
            mine = torch.full((dd.rank(), 2), dd.rank() % 2).to(dtype)
            found = dd.gather(mine, root)
            all_ranks = torch.cat([torch.full((rank, 2), rank % 2).to(dtype) for rank in ranks()])
            expected = all_ranks if dd.rank() == root else all_ranks[:0]
            assert (found.dtype, found.shape) == (dtype, expected.shape)
            assert found.tolist() == expected.tolist(), (root, dtype)
        numbers = list(ranks()) if dd.rank() == root else []
        assert dd.gather(torch.tensor(dd.rank()), root).tolist() == numbers
        assert dd.gather(torch.empty(0, 5), root).shape == (0, 5)
        assert dd.gather(torch.empty(2, 0), root).shape == ((2 * dd.size() if dd.rank() == root else 0), 0)


@law
def gather_inverts_scatter_async_and_in_groups() -> None:
    rows = torch.randn(2 * dd.size() + 1, 3, generator=torch.Generator().manual_seed(0))
    back = dd.gather(dd.scatter(of_root(rows, 0)))
    assert torch.equal(back, rows if dd.rank() == 0 else rows[:0])
    handles = [dd.scatter(of_root(rows + i, 0), async_op=True) for i in range(3)]
    later = [dd.gather(handle.wait(), async_op=True) for handle in handles]
    for i, handle in enumerate(later):
        assert torch.equal(handle.wait(), rows + i if dd.rank() == 0 else rows[:0])
    last = dd.new_group([dd.size() - 1])
    evens = dd.new_group(range(0, dd.size(), 2))
    for group in (last, evens):
        if group.is_member:
            root = group.ranks[-1]
            mine = dd.scatter(of_root(rows, root), root, group=group)
            assert torch.equal(mine, rows.tensor_split(group.size)[group.rank])
            assert torch.equal(dd.gather(mine, root, group=group), rows if dd.rank() == root else rows[:0])
            raises(UsageError, lambda group=group: dd.gather(rows, dd.size(), group=group), "root")
        dd.remove_group(group)
        raises(NotInitializedError, lambda group=group: dd.scatter(rows, group.ranks[0], group=group), "closed")


@law
def large_uneven_scatter_and_gather_complete_in_any_wait_order() -> None:
    """More than a transport's buffer holds at once; the first rank gets and gives nothing, the last one most."""
    size, rank = dd.size(), dd.rank()
    counts = [r * 70_001 for r in ranks()] if size > 1 else [70_001]
    rows = torch.arange(float(sum(counts)) * 3).view(-1, 3)
    mine = dd.scatter(of_root(rows, 0), 0, counts)
    assert torch.equal(mine, rows.split(counts)[rank])
    whole = dd.gather(mine, size - 1)
    assert torch.equal(whole, rows if rank == size - 1 else rows[:0])
    there = dd.scatter(of_root(rows[:size], 0), async_op=True, name="there")
    back = dd.gather(torch.full((rank,), rank), async_op=True, name="back")
    last = dd.scatter(of_root(rows[size:] if size > 1 else rows, 0), async_op=True)
    for handle in (last, back, there) if rank % 2 else (there, last, back):
        handle.wait()
    assert torch.equal(there.wait(), rows[rank : rank + 1])
    assert back.wait().tolist() == [r for r in ranks() for _ in range(r) if rank == 0]


@law
def invalid_arguments_of_the_root_are_errors_on_every_rank() -> None:
    root = dd.size() - 1
    wrong: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (lambda: dd.scatter(None, root), ("None", "scatter")),
        (lambda: dd.scatter(torch.tensor(1.0), root), ("dimension",)),
        (lambda: dd.scatter(torch.ones(3), root, [3] * (dd.size() + 1)), ("splits",)),
        (lambda: dd.scatter(torch.ones(3), root, [-1] + [0] * root), ("splits",)),
        (lambda: dd.scatter(torch.ones(3), root, [1] * root + [4]), ("splits",)),
        (lambda: dd.scatter(torch.ones(3), root, [1.5] * dd.size()), ("splits",)),
        (lambda: dd.scatter(torch.ones(3), -1), ("root=-1",)),
        (lambda: dd.scatter([1.0], root), ("a list",)),
        (lambda: dd.scatter(torch.ones(2), 0.5), ("root",)),
        (lambda: dd.gather(torch.ones(2), dd.size()), (f"root={dd.size()}",)),
    ]
    for call, words in wrong:
        raises(UsageError, call, *words)
        assert dd.allreduce(torch.ones(1), "sum").item() == dd.size()
    raises(UnsupportedError, lambda: dd.scatter(torch.eye(3).to_sparse(), root), "sparse")


@law
def scatter_and_gather_return_gradients_to_the_rows_rank() -> None:
    """As if all rows had stayed in one process: each row meets the weight of its rank or position."""
    size, rank, root = dd.size(), dd.rank(), dd.size() - 1
    rows = torch.ones(2 * size + 1, 2, requires_grad=rank == root)
    found = dd.scatter(of_root(rows, root), root)
    assert found.requires_grad
    (found * (rank + 1)).sum().backward()
    if rank == root:
        expected = torch.cat([torch.full_like(share(rows, r), r + 1.0) for r in ranks()])
        assert torch.equal(rows.grad, expected)
    # One rank's tensor has no gradient; all take part in the way back.
    mine = torch.ones(rank + 1, 2, requires_grad=rank != root)
    gathered = dd.gather(mine, root)
    assert gathered.requires_grad == (size > 1)
    if size > 1:
        places = torch.arange(float(sum(r + 1 for r in ranks()))).view(-1, 1)
        (gathered * places[: len(gathered)]).sum().backward()
        start = sum(r + 1 for r in range(rank))
        expected = places[start : start + rank + 1].expand(-1, 2)
        assert mine.grad is None if rank == root else torch.equal(mine.grad, expected)
    assert not dd.scatter(torch.ones(size), 0).requires_grad
    assert not dd.gather(torch.ones(size), 0).requires_grad
    with torch.no_grad():
        assert not dd.gather(torch.ones(size, requires_grad=True)).requires_grad
    scalar = torch.tensor(2.0, requires_grad=True)
    (dd.gather(scalar) * 3).sum().backward()
    assert scalar.grad is not None
    assert scalar.grad.item() == 3.0


@law
def second_derivatives_of_scatter_and_gather_match_one_process() -> None:
    y = torch.full((2,), float(dd.rank() + 1), requires_grad=True)
    (first,) = torch.autograd.grad((dd.gather(y) ** 3).sum(), y, create_graph=True)
    torch.testing.assert_close(first, 3 * y**2)
    (second,) = torch.autograd.grad(first.sum(), y)
    torch.testing.assert_close(second, 6 * y)
    x = torch.arange(1.0, 2 * dd.size() + 1)
    x = (x if dd.rank() == 0 else x[:0]).requires_grad_()
    (first,) = torch.autograd.grad((dd.scatter(x) ** 3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x)
