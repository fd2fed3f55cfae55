"""What one rank deals out to the others and what it collects from them; the gradients of each flow back by the other.

No backend has these: they are an alltoall in which one rank alone sends, or receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import as_bytes
from dualdist.collectives.arguments import name_of, root_of
from dualdist.collectives.autograd import back_of, wants_gradient, with_gradient
from dualdist.collectives.collectives import device_of, shares, splits_of
from dualdist.collectives.group import Group
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.collectives.tensor_utils import checked, from_bytes, row_bytes, rows_of, spec_from, spec_of, values_of
from dualdist.collectives.work import Handle, PendingOperation
from dualdist.errors import UnsupportedError, UsageError

T = TypeVar("T")
Splits = Sequence[int] | torch.Tensor | None


@dataclass(frozen=True)
class RootedResult:
    """What has arrived here, how many rows each rank gave or got, and whether gradients shall flow back."""

    rows: torch.Tensor
    counts: Sequence[int]
    gradient_is_wanted: bool

    def wait(self) -> torch.Tensor:
        return self.rows


def scatter(
    group: Group, tensor: torch.Tensor | None, root: int, splits: Splits = None, name: str | None = None
) -> Handle[torch.Tensor]:
    """The rows that root deals to this rank: of its (n, *s) the next splits[i] go to rank i, or else even shares."""
    return _scatter(group, tensor, root, splits, name_of(group, "scatter", name), RootedResult.wait)


def gather(group: Group, tensor: torch.Tensor, root: int, name: str | None = None) -> Handle[torch.Tensor]:
    """On root everybody's rows in rank order, (n_rank, *s) -> (sum of n_rank, *s); none, (0, *s), on the others."""
    return _gather(group, tensor, root, name_of(group, "gather", name), RootedResult.wait)


def scatter_through(
    group: Group, tensor: torch.Tensor | None, root: int, splits: Splits, name: str | None
) -> torch.Tensor:
    """scatter, waited for; where root's tensor wants a gradient, the ranks' gradients flow back to its rows."""
    name = name_of(group, "scatter", name)
    found = _scatter(group, tensor, root, splits, name, _as_it_is).wait()
    _, place = root_of(group, root)
    return _through(
        found,
        tensor if group.rank == place else _nothing_of(tensor, found.rows[:0]),
        lambda gradient: gather_through(group, gradient, root, back_of(name)),
    )


def _nothing_of(tensor: object, like: torch.Tensor) -> torch.Tensor:
    """No rows, by which a rank that dealt none takes part in the way back: of its tensor, where that is alike."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype == like.dtype and tensor.shape[1:] == like.shape[1:]:
        return tensor[:0]
    return like.detach()


def gather_through(group: Group, tensor: torch.Tensor, root: int, name: str | None) -> torch.Tensor:
    """gather, waited for; where some rank's tensor wants a gradient, root's gradients flow back to where rows were."""
    name = name_of(group, "gather", name)
    found = _gather(group, tensor, root, name, _as_it_is).wait()
    return _through(
        found,
        tensor,
        lambda gradient: scatter_through(group, gradient, root, found.counts, back_of(name)).reshape(tensor.shape),
    )


def _through(
    found: RootedResult, source: torch.Tensor | None, back: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The rows, through which gradients flow back to the source on every rank, if they shall on some rank."""
    if not found.gradient_is_wanted:
        return found.rows
    assert source is not None, "root has a tensor"
    if not source.requires_grad:
        source = source.detach().requires_grad_()
    rows: torch.Tensor = with_gradient([source], lambda given: found, lambda gradients: [back(gradients[0])])
    return rows


def _as_it_is(found: RootedResult) -> RootedResult:
    return found


def _scatter(
    group: Group, tensor: torch.Tensor | None, root: int, splits: Splits, name: str, pick: Callable[[RootedResult], T]
) -> Handle[T]:
    """Root alone knows what it deals, and what is wrong with that: it tells the others both."""
    root, place = root_of(group, root)
    rows, own, device = None, None, _gpu()
    if group.rank == place:
        try:
            rows, counts = _dealt(tensor, splits, group.size)
            own = ["", spec_of(rows), rows.device.type, counts, wants_gradient([rows])]
            rows, device = values_of(rows), rows.device
        except (UsageError, UnsupportedError) as error:
            own = [f"{error}"]

    def perform(backend: Backend, told: Sequence[Any]) -> T:
        problem, *rest = told[place]
        if problem:
            raise UsageError(f"{name}: {problem} (on rank {root}, the root)")
        spec, kind, counts, is_wanted = rest
        dtype, shape = spec_from(spec)
        mine = torch.empty((0, *shape[1:]), dtype=dtype, device=device_of(kind)) if rows is None else rows
        sent = [0] * backend.size if rows is None else counts
        received = _only(place, counts[backend.rank], backend.size)
        moved = _moved(backend, mine, sent, received, name) if any(counts) else mine.clone()
        return pick(RootedResult(moved, counts, is_wanted))

    return group.submit(PendingOperation(CollectiveRequest("scatter", name, {"root": root}, own), perform, device))


def _dealt(tensor: torch.Tensor | None, splits: Splits, size: int) -> tuple[torch.Tensor, list[int]]:
    """What root deals, and how many rows each rank gets."""
    if tensor is None:
        raise UsageError("the root of scatter passed None: pass the tensor whose rows are dealt out")
    (rows,) = checked([tensor])
    if rows.dim() == 0:
        raise UsageError("scatter deals out rows: pass a tensor with at least one dimension")
    count = rows.shape[0]
    return rows, shares(count, size) if splits is None else splits_of(splits, count, size)


def _gather(group: Group, tensor: torch.Tensor, root: int, name: str, pick: Callable[[RootedResult], T]) -> Handle[T]:
    root, place = root_of(group, root)
    rows = rows_of(values_of(checked([tensor])[0]))
    terms = {"tensors": [spec_of(rows, but_rows=True)], "device": rows.device.type, "root": root}

    def perform(backend: Backend, told: Sequence[Any]) -> T:
        counts = [count for count, _ in told]
        received = counts if backend.rank == place else [0] * backend.size
        sent = _only(place, len(rows), backend.size)
        moved = _moved(backend, rows, sent, received, name) if any(counts) else rows.clone()
        return pick(RootedResult(moved, counts, any(is_wanted for _, is_wanted in told)))

    own = [len(rows), wants_gradient([tensor])]
    return group.submit(PendingOperation(CollectiveRequest("gather", name, terms, own), perform, tensor.device))


def _moved(
    backend: Backend, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str
) -> torch.Tensor:
    """An alltoall of rows; every rank calls it, also one that neither sends nor receives any."""
    width = row_bytes(rows)
    mine = as_bytes(rows.contiguous())
    came = mine.new_empty(0)
    if width:
        sizes = [count * width for count in sent], [count * width for count in received]
        came = backend.alltoall(mine, *sizes, f"op.{name}").wait()
    return from_bytes(came, rows.dtype, (sum(received), *rows.shape[1:]))


def _only(place: int, count: int, size: int) -> list[int]:
    """So many for one rank, nothing for the others."""
    return [count if rank == place else 0 for rank in range(size)]


def _gpu() -> torch.device | None:
    """Where a rank that passes no tensor may get one: its streams shall be those of its program."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
