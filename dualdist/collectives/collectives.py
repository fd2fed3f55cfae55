"""Operations between ranks, written once on top of a backend's few moves, and agreed on before they move anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import allgather_bytes, as_bytes
from dualdist.collectives import reductions
from dualdist.collectives.arguments import as_ints, name_of, root_of, scales_of
from dualdist.collectives.group import Group
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.collectives.reductions import (
    Op,
    adasum_,
    check_op,
    check_scales,
    finalize_,
    reduce_rows,
    scale_,
    sparse_sum,
    wire_op,
)
from dualdist.collectives.tensor_utils import (
    checked,
    copy_of,
    flattened,
    from_bytes,
    put_back,
    require_own_memory,
    require_tensor,
    row_bytes,
    rows_of,
    spec_from,
    spec_of,
    values_of,
)
from dualdist.collectives.work import Handle, PendingOperation
from dualdist.errors import UnsupportedError, UsageError

T = TypeVar("T")


def allreduce(
    group: Group,
    tensor: torch.Tensor,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle[torch.Tensor]:
    """The reduction over all ranks in a new tensor, shape and strides as given."""
    require_tensor(tensor)
    if tensor.is_sparse:
        return sparse_allreduce(group, tensor, op, name, prescale, postscale)
    return _allreduce(group, "allreduce", [copy_of(tensor)], op, name, (prescale, postscale), _first)


def allreduce_(
    group: Group,
    tensor: torch.Tensor,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle[torch.Tensor]:
    """The reduction over all ranks in place of the tensor."""
    return _allreduce(group, "allreduce", [tensor], op, name, (prescale, postscale), _first)


def grouped_allreduce(
    group: Group,
    tensors: Sequence[torch.Tensor],
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Each tensor's reduction over all ranks in a new tensor; all of them or none."""
    copies = [copy_of(tensor) for tensor in tensors]
    return _allreduce(group, "grouped_allreduce", copies, op, name, (prescale, postscale), list)


def grouped_allreduce_(
    group: Group,
    tensors: Sequence[torch.Tensor],
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """grouped_allreduce in place."""
    return _allreduce(group, "grouped_allreduce", tensors, op, name, (prescale, postscale), list)


def _first(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _allreduce(
    group: Group,
    kind: str,
    tensors: Sequence[torch.Tensor],
    op: Op,
    name: str | None,
    scales: tuple[float, float],
    pick: Callable[[Sequence[torch.Tensor]], T],
) -> Handle[T]:
    scales = scales_of(*scales)
    for tensor in checked(tensors):
        check_op(op, tensor.dtype)
        check_scales(scales, tensor.dtype)
        require_own_memory(tensor)
    if op == "adasum" and group.size & (group.size - 1):
        raise UsageError(f"op 'adasum' pairs the ranks, so their number is a power of two, not {group.size}")
    name = name_of(group, kind, name)
    terms = {"tensors": [spec_of(tensor) for tensor in tensors], **reduction_terms(tensors[0].device.type, op, scales)}

    def perform(backend: Backend, own: Sequence[Any]) -> T:
        _reduce_in_place(backend, tensors, op, scales, name)
        return pick(tensors)

    return group.submit(PendingOperation(CollectiveRequest(kind, name, terms), perform, tensors[0].device))


def reduction_terms(device: str, op: Op, scales: tuple[float, float] = (1.0, 1.0)) -> dict[str, Any]:
    """What all ranks must pass alike, besides the tensors."""
    scaled = {"prescale": scales[0], "postscale": scales[1]} if scales != (1.0, 1.0) else {}
    return {"device": device, "op": op, **scaled}


def _reduce_in_place(
    backend: Backend, tensors: Sequence[torch.Tensor], op: Op, scales: tuple[float, float], name: str
) -> None:
    """Reduce the tensors, those of one dtype in one buffer."""
    prescale, postscale = scales
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault(tensor.dtype, []).append(tensor)
    flats = [flattened(members) for members in kinds.values()]
    works = []
    for number, (flat, members) in enumerate(zip(flats, kinds.values(), strict=True)):
        scale_(flat, prescale)
        if op == "adasum":
            adasum_(backend, flat, [member.numel() for member in members], f"op.{name}.{number}")
        else:
            works.append(reductions.allreduce_(backend, flat, wire_op(op), f"op.{name}.{number}"))
    for work in works:
        work.wait()
    for flat, members in zip(flats, kinds.values(), strict=True):
        finalize_(flat, op, backend.size, postscale)
        for piece, member in zip(flat.split([member.numel() for member in members]), members, strict=True):
            put_back(piece, member)


def zero_contribution(offer: CollectiveRequest) -> PendingOperation[Any]:
    """The part of a rank that has joined in a reduction of the others: zeros."""
    device = device_of(offer.terms["device"])
    zeros = [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in map(spec_from, offer.terms["tensors"])]
    scales = offer.terms.get("prescale", 1.0), offer.terms.get("postscale", 1.0)

    def perform(backend: Backend, own: Sequence[Any]) -> None:
        _reduce_in_place(backend, zeros, offer.terms["op"], scales, offer.name)

    return PendingOperation(offer, perform, device)


def device_of(kind: str) -> torch.device:
    """This rank's device of a kind that another rank named."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def sparse_allreduce(
    group: Group,
    tensor: torch.Tensor,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle[torch.Tensor]:
    """The mean or sum over all ranks of a sparse COO tensor, coalesced; only what is stored travels."""
    if op not in ("mean", "sum", "integer mean"):
        raise UsageError(f"op {op!r}: sparse tensors are reduced by 'mean' or 'sum'")
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedError(f"a tensor of layout {tensor.layout} is not reduced: convert it to sparse COO")
    check_op(op, tensor.dtype)
    name = name_of(group, "sparse_allreduce", name)
    mine, scales = tensor.detach(), scales_of(prescale, postscale)
    terms: dict[str, Any] = {"tensors": [f"sparse {spec_of(tensor)}"], "sparse_dim": tensor.sparse_dim()}
    terms |= reduction_terms(tensor.device.type, op, scales)

    def perform(backend: Backend, own: Sequence[Any]) -> torch.Tensor:
        return sparse_sum(backend, mine, op, f"op.{name}", scales)

    return group.submit(PendingOperation(CollectiveRequest("sparse_allreduce", name, terms), perform, tensor.device))


def allgather(group: Group, tensor: torch.Tensor, name: str | None = None) -> Handle[torch.Tensor]:
    """Everybody's rows in rank order: (n_rank, *s) -> (sum of n_rank, *s); n may differ between ranks."""
    return _allgather(group, "allgather", [tensor], name, _first)


def grouped_allgather(
    group: Group, tensors: Sequence[torch.Tensor], name: str | None = None
) -> Handle[list[torch.Tensor]]:
    """Everybody's rows of each tensor, in rank order; all of them or none."""
    return _allgather(group, "grouped_allgather", tensors, name, list)


def _allgather(
    group: Group,
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    pick: Callable[[Sequence[torch.Tensor]], T],
) -> Handle[T]:
    all_rows = [rows_of(values_of(tensor)) for tensor in checked(tensors)]
    name = name_of(group, kind, name)
    terms = {"tensors": [spec_of(rows, but_rows=True) for rows in all_rows], "device": tensors[0].device.type}

    def perform(backend: Backend, own: Sequence[Any]) -> T:
        sizes = [[count * row_bytes(rows) for rows, count in zip(all_rows, counts, strict=True)] for counts in own]
        mine = torch.cat([as_bytes(rows.contiguous()) for rows in all_rows])
        blocks = allgather_bytes(backend, mine, [sum(size) for size in sizes], f"op.{name}")
        pieces = blocks.split([nbytes for size in sizes for nbytes in size])
        results = []
        for number, rows in enumerate(all_rows):
            everybody = torch.cat(pieces[number :: len(all_rows)])
            results.append(from_bytes(everybody, rows.dtype, (sum(c[number] for c in own), *rows.shape[1:])))
        return pick(results)

    offer = CollectiveRequest(kind, name, terms, [rows.shape[0] for rows in all_rows])
    return group.submit(PendingOperation(offer, perform, tensors[0].device))


def broadcast(group: Group, tensor: torch.Tensor, root: int, name: str | None = None) -> Handle[torch.Tensor]:
    """Root's values in a new tensor; the shape is the same on every rank."""
    return broadcast_(group, copy_of(tensor), root, name)


def broadcast_(group: Group, tensor: torch.Tensor, root: int, name: str | None = None) -> Handle[torch.Tensor]:
    """Root's values in place of the tensor's on every rank; the shape is the same on every rank."""
    root, place = root_of(group, root)
    require_own_memory(checked([tensor])[0])
    name = name_of(group, "broadcast", name)
    terms = {"tensors": [spec_of(tensor)], "device": tensor.device.type, "root": root}

    def perform(backend: Backend, own: Sequence[Any]) -> torch.Tensor:
        buffer = values_of(tensor).contiguous()
        if buffer.numel():
            backend.broadcast_(as_bytes(buffer), place, f"op.{name}").wait()
        put_back(buffer, tensor)
        return tensor

    return group.submit(PendingOperation(CollectiveRequest("broadcast", name, terms), perform, tensor.device))


def alltoall(
    group: Group, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """What the ranks have sent here, in rank order, and how many rows came from each.

    Of the tensor's rows, the next splits[i] go to rank i; without splits, equal parts.
    """
    return _alltoall(group, tensor, splits, name, _both)


def alltoall_evenly(group: Group, tensor: torch.Tensor, name: str | None = None) -> Handle[torch.Tensor]:
    """What the ranks have sent here, in rank order: of every rank's rows, an equal part."""
    return _alltoall(group, tensor, None, name, _first)


def _both(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors[0], tensors[1]


def _alltoall(
    group: Group,
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None,
    name: str | None,
    pick: Callable[[Sequence[torch.Tensor]], T],
) -> Handle[T]:
    rows = values_of(checked([tensor])[0])
    sent = _splits(rows, splits, group.size)
    name = name_of(group, "alltoall", name)
    terms = {"tensors": [spec_of(rows, but_rows=True)], "device": tensor.device.type}

    def perform(backend: Backend, own: Sequence[Any]) -> T:
        received = [theirs[backend.rank] for theirs in own]
        width = row_bytes(rows)
        sizes = [count * width for count in sent], [count * width for count in received]
        if any(sum(theirs) for theirs in own) and width:
            came = backend.alltoall(as_bytes(rows.contiguous()), *sizes, f"op.{name}").wait()
        else:
            came = torch.empty(0, dtype=torch.uint8, device=rows.device)
        like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
        found = from_bytes(came, rows.dtype, (sum(received), *rows.shape[1:]))
        return pick([found, like.new_tensor(received)])

    return group.submit(PendingOperation(CollectiveRequest("alltoall", name, terms, sent), perform, tensor.device))


def _splits(rows: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, size: int) -> list[int]:
    """How many rows go to each rank."""
    if rows.dim() == 0:
        raise UsageError("alltoall sends rows: pass a tensor with at least one dimension")
    count = rows.shape[0]
    if splits is None or len(splits) == 0:
        if count % size:
            raise UsageError(f"alltoall of {count} rows between {size} ranks: they do not divide evenly, pass splits")
        return [count // size] * size
    return splits_of(splits, count, size)


def splits_of(splits: Sequence[int] | torch.Tensor, count: int, size: int) -> list[int]:
    """How many of `count` rows go to each rank, as the caller says; UsageError where that cannot be."""
    sent = as_ints(splits.tolist() if isinstance(splits, torch.Tensor) else splits, "splits")
    if len(sent) != size or any(split < 0 for split in sent) or sum(sent) != count:
        raise UsageError(f"splits {sent}: expected {size} numbers of rows, 0 or more, together {count}")
    return sent


def reducescatter(
    group: Group,
    tensor: torch.Tensor,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle[torch.Tensor]:
    """This rank's share of the rows of the reduction; the first ranks have one more where they do not divide evenly."""
    return _reducescatter(group, "reducescatter", [tensor], op, name, (prescale, postscale), _first)


def grouped_reducescatter(
    group: Group,
    tensors: Sequence[torch.Tensor],
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """This rank's share of each tensor's reduction; all of them or none."""
    return _reducescatter(group, "grouped_reducescatter", tensors, op, name, (prescale, postscale), list)


def _reducescatter(
    group: Group,
    kind: str,
    tensors: Sequence[torch.Tensor],
    op: Op,
    name: str | None,
    scales: tuple[float, float],
    pick: Callable[[Sequence[torch.Tensor]], T],
) -> Handle[T]:
    scales = scales_of(*scales)
    for tensor in checked(tensors):
        check_op(op, tensor.dtype)
        check_scales(scales, tensor.dtype)
        if op == "adasum":
            raise UsageError("op 'adasum' looks at as_ints tensors: use allreduce")
        if tensor.dim() == 0:
            raise UsageError("reducescatter shares out rows: pass tensors with at least one dimension")
    given = [values_of(tensor) if scales[0] == 1 else scale_(copy_of(tensor), scales[0]) for tensor in tensors]
    name = name_of(group, kind, name)
    terms = {"tensors": [spec_of(tensor) for tensor in tensors], **reduction_terms(tensors[0].device.type, op, scales)}

    def perform(backend: Backend, own: Sequence[Any]) -> T:
        return pick([_share(backend, rows, op, scales[1], f"op.{name}.{i}") for i, rows in enumerate(given)])

    return group.submit(PendingOperation(CollectiveRequest(kind, name, terms), perform, tensors[0].device))


def _share(backend: Backend, rows: torch.Tensor, op: Op, postscale: float, name: str) -> torch.Tensor:
    """Everybody's values for this rank's rows, reduced here in rank order: alike on every backend."""
    counts = shares(rows.shape[0], backend.size)
    mine = counts[backend.rank]
    width = row_bytes(rows)
    shape = (backend.size, mine, *rows.shape[1:])
    if not rows.numel():
        return rows.new_empty(shape[1:])
    sizes = [count * width for count in counts], [mine * width] * backend.size
    came = from_bytes(backend.alltoall(as_bytes(rows.contiguous()), *sizes, name).wait(), rows.dtype, shape)
    return finalize_(reduce_rows(came, wire_op(op)), op, backend.size, postscale)


def shares(rows: int, size: int) -> list[int]:
    """How many rows each rank gets: as even as can be, the first ranks take the remainder."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]


def barrier(group: Group, name: str | None = None) -> None:
    """Every rank has called this when it returns; it does not wait for what else is under way."""
    run_agreed(group, "barrier", name_of(group, "barrier", name), {}, lambda backend: None)


def run_agreed(group: Group, kind: str, name: str, terms: dict[str, Any], perform: Callable[[Backend], T]) -> T:
    """What `perform` returns, run at the same place by every rank once all agree on the terms."""
    return group.submit(
        PendingOperation(CollectiveRequest(kind, name, terms), lambda backend, own: perform(backend))
    ).wait()
