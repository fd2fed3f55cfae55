"""The description of each collective: its request, what it does on a backend, and how its gradient flows.

A function here checks its arguments and returns a Collective, which run() waits for and start() begins. `tensors` is
one tensor or, for a grouped collective, a list; the result has the same form. Gradients are those that Horovod defines:
allgather and broadcast take the mean over ranks where a mathematician takes the sum, because losses are mostly means
over the whole batch, so that gradients keep the size that they have in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeVar, cast

import torch

from dualdist.backends.arithmetic import LINEAR, Op, check_op, check_scales, finalize_, reduce_rows, scale_, wire_op
from dualdist.backends.base import Backend
from dualdist.backends.control_plane import allgather_bytes, as_bytes
from dualdist.backends.operation import Stages
from dualdist.collectives.arguments import Reduction, as_ints, check_reduction, name_of, root_of, scales_of
from dualdist.collectives.group import Group
from dualdist.collectives.handle import Collective, is_differentiable, requires_grad
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.collectives.reductions import adasum_, allreduce_, sparse_sum
from dualdist.collectives.refusals import description
from dualdist.collectives.tensor_utils import (
    check_tensor,
    check_tensors,
    copy_to_,
    flatten,
    from_bytes,
    plain_copy,
    plain_values,
    row_nbytes,
    spec_from,
    spec_of,
    with_rows,
)
from dualdist.errors import UnsupportedError, UsageError
from dualdist.utils import accelerator

Tensors = TypeVar("Tensors", torch.Tensor, list[torch.Tensor])
Splits = Sequence[int] | torch.Tensor | None


@description
def allreduce(
    group: Group,
    tensors: Tensors,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    reduction: Reduction | None = None,
    in_place: bool = False,
) -> Collective[Tensors]:
    """Reduce over all ranks into new tensors, or `in_place`. Gradient: the same reduction of the ranks' gradients."""
    if isinstance(tensors, torch.Tensor) and tensors.is_sparse and not in_place:
        return sparse_allreduce(group, tensors, op, name, prescale, postscale, reduction=reduction)
    members, kind, form = _parse(tensors, "allreduce", is_written=in_place)
    if op == "adasum" and group.size & (group.size - 1):
        raise UsageError(f"op 'adasum' pairs the ranks, so their number is a power of two, not {group.size}")
    scales, reduction = scales_of(prescale, postscale), reduction or group.reduction
    # Before the request numbers a name, so that a rank whose memory was too short may try again.
    targets = members if in_place else [plain_copy(tensor) for tensor in members]
    request = _reduction_request(group, kind, name, members, op, scales, reduction)

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[Tensors]:
        yield from _reduce_in_place(backend, targets, op, scales, request.name, reduction)
        return form(targets)

    def backward(gradients: Sequence[torch.Tensor], rank_args: Sequence[Any]) -> Tensors:
        _require_linear(op)
        return allreduce(group, form(gradients), op, f"{request.name}.backward", *scales, reduction=reduction).run()

    return Collective(group, request, perform, members[0].device, () if in_place else members, backward)


def _parse(
    tensors: Tensors, kind: str, *, is_written: bool = False
) -> tuple[Sequence[torch.Tensor], str, Callable[[Sequence[torch.Tensor]], Tensors]]:
    """Return the checked tensors, the kind of the collective, and a function that gives results their form."""
    is_grouped = isinstance(tensors, list)
    form: Any = list if is_grouped else itemgetter(0)  # without a reference to the tensors
    members = cast(Sequence[torch.Tensor], tensors if is_grouped else [tensors])
    return check_tensors(members, is_written=is_written), f"grouped_{kind}" if is_grouped else kind, form


def _reduction_request(
    group: Group,
    kind: str,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    op: Op,
    scales: tuple[float, float],
    reduction: Reduction,
) -> CollectiveRequest:
    """Return the request of a reduction; raise UsageError if the tensors cannot be reduced in this way."""
    for tensor in tensors:
        check_op(op, tensor.dtype)
        check_scales(scales, tensor.dtype)
    check_reduction(reduction, op)
    shared_args = reduction_args(list(map(spec_of, tensors)), tensors[0].device.type, op, scales, reduction)
    return CollectiveRequest(kind, name_of(group, kind, name), shared_args)


def _require_linear(op: Op) -> None:
    if op not in LINEAR:
        raise UnsupportedError(f"no gradient flows through a reduction by {op!r}: use 'mean' or 'sum', or detach()")


def reduction_args(
    specs: Sequence[str],
    device: str,
    op: Op,
    scales: tuple[float, float] = (1.0, 1.0),
    reduction: Reduction = "unordered",
) -> dict[str, Any]:
    """Return the arguments of a reduction that all ranks must pass alike."""
    scaled = {"prescale": scales[0], "postscale": scales[1]} if scales != (1.0, 1.0) else {}
    return {"tensors": specs, "device": device, "op": op, "reduction": reduction, **scaled}


def _reduce_in_place(
    backend: Backend,
    tensors: Sequence[torch.Tensor],
    op: Op,
    scales: tuple[float, float],
    name: str,
    reduction: Reduction,
) -> Stages[None]:
    """Reduce the tensors, those of one dtype in one buffer."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    is_mean, running = op == "mean", []
    for number, members in enumerate(by_dtype.values()):
        buffer, sizes = scale_(flatten(members), scales[0]), [member.numel() for member in members]
        if op == "adasum":
            yield from adasum_(backend, buffer, sizes, f"op.{name}.{number}")
        else:
            reduced_by = "mean" if is_mean else wire_op(op)
            yield allreduce_(backend, buffer, reduced_by, f"op.{name}.{number}", is_ordered=reduction == "ordered")
        running.append((buffer, zip(members, buffer.split(sizes), strict=True)))
    for buffer, pieces in running:
        finalize_(buffer, "sum" if is_mean else op, backend.size, scales[1])
        for member, piece in pieces:
            copy_to_(member, piece)


def zero_contribution(group: Group, request: CollectiveRequest) -> Collective[None]:
    """Return the part of a rank that has joined in a reduction of the other ranks: zeros."""
    shared_args = request.shared_args
    device = accelerator.current(shared_args["device"])
    zeros = [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in map(spec_from, shared_args["tensors"])]
    scales = shared_args.get("prescale", 1.0), shared_args.get("postscale", 1.0)

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[None]:
        return _reduce_in_place(backend, zeros, shared_args["op"], scales, request.name, shared_args["reduction"])

    return Collective(group, request, perform, device)


@description
def sparse_allreduce(
    group: Group,
    tensor: torch.Tensor,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    reduction: Reduction | None = None,
) -> Collective[torch.Tensor]:
    """Reduce a sparse COO tensor by mean or sum, coalesced; only stored values travel. Gradient: as of allreduce."""
    if op not in ("mean", "sum", "integer mean"):
        raise UsageError(f"op {op!r}: sparse tensors are reduced by 'mean' or 'sum'")
    if check_tensor(tensor, takes_sparse=True).layout is not torch.sparse_coo:
        raise UnsupportedError(f"a tensor of layout {tensor.layout} is not reduced: convert it to sparse COO")
    check_op(op, tensor.dtype)
    reduction = reduction or group.reduction
    check_reduction(reduction, op)
    values, scales = tensor.detach(), scales_of(prescale, postscale)
    name = name_of(group, "sparse_allreduce", name)
    shared_args = reduction_args([f"sparse {spec_of(tensor)}"], tensor.device.type, op, scales, reduction)
    shared_args["sparse_dim"] = tensor.sparse_dim()

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[torch.Tensor]:
        return sparse_sum(backend, values, op, f"op.{name}", scales, is_ordered=reduction == "ordered")

    def backward(gradients: Sequence[torch.Tensor], rank_args: Sequence[Any]) -> torch.Tensor:
        _require_linear(op)
        return allreduce(group, gradients[0], op, f"{name}.backward", *scales, reduction=reduction).run()

    request = CollectiveRequest("sparse_allreduce", name, shared_args)
    return Collective(group, request, perform, tensor.device, [tensor], backward)


@description
def allgather(group: Group, tensors: Tensors, name: str | None = None) -> Collective[Tensors]:
    """Concatenate the ranks' rows in rank order: (n_rank, *s) -> (sum of n_rank, *s).

    Gradient: the mean over ranks of the gradients of this rank's rows.
    """
    members, kind, form = _parse(tensors, "allgather")
    rows = [with_rows(plain_values(tensor)) for tensor in members]
    name = name_of(group, kind, name)
    shared_args = {"tensors": [spec_of(tensor, any_rows=True) for tensor in rows], "device": members[0].device.type}
    differentiable = [(number, tensor.shape) for number, tensor in enumerate(members) if is_differentiable(tensor)]

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[Tensors]:
        widths = [row_nbytes(each) for each in rows]
        sizes = [[count * width for count, width in zip(counts, widths, strict=True)] for counts in rank_args]
        sent = torch.cat([as_bytes(each.contiguous()) for each in rows])
        blocks = yield from allgather_bytes(backend, sent, [sum(size) for size in sizes], f"op.{name}")
        pieces = blocks.split([nbytes for size in sizes for nbytes in size])
        columns = [torch.cat(pieces[number :: len(rows)]) for number in range(len(rows))]
        totals = [sum(counts) for counts in zip(*rank_args, strict=True)]
        return form([_rows_like(*each) for each in zip(rows, columns, totals, strict=True)])

    def backward(gradients: Sequence[torch.Tensor], rank_args: Sequence[Any]) -> list[torch.Tensor]:
        means = allreduce(group, list(gradients), "mean", f"{name}.backward").run()
        starts = [sum(counts[number] for counts in rank_args[: group.rank]) for number, _ in differentiable]
        return [
            mean[start : start + rank_args[group.rank][number]].reshape(shape)
            for mean, start, (number, shape) in zip(means, starts, differentiable, strict=True)
        ]

    request = CollectiveRequest(kind, name, shared_args, [each.shape[0] for each in rows])
    return Collective(group, request, perform, members[0].device, members, backward)


def _rows_like(like: torch.Tensor, data: torch.Tensor, count: int) -> torch.Tensor:
    return from_bytes(data, like.dtype, (count, *like.shape[1:]))


@description
def broadcast(
    group: Group, tensor: torch.Tensor, root: int, name: str | None = None, *, in_place: bool = False
) -> Collective[torch.Tensor]:
    """Give every rank root's values, in a new tensor or `in_place`.

    Gradient: to root the mean over ranks, to the others zero.
    """
    root, root_index = root_of(group, root)
    check_tensor(tensor, is_written=in_place)
    target = tensor if in_place else plain_copy(tensor)
    name = name_of(group, "broadcast", name)
    shared_args = {"tensors": [spec_of(tensor)], "device": tensor.device.type, "root": root}

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[torch.Tensor]:
        buffer = plain_values(target).contiguous()
        if buffer.numel():
            yield backend.broadcast_(as_bytes(buffer), root_index, f"op.{name}")
        copy_to_(target, buffer)
        return target

    def backward(gradients: Sequence[torch.Tensor], rank_args: Sequence[Any]) -> torch.Tensor:
        mean = allreduce(group, gradients[0], "mean", f"{name}.backward").run()
        # Zeros that depend on the mean, since second derivatives need every rank to take part.
        return mean if group.rank == root_index else mean.masked_fill(torch.ones_like(mean, dtype=torch.bool), 0)

    request = CollectiveRequest("broadcast", name, shared_args)
    return Collective(group, request, perform, tensor.device, () if in_place else [tensor], backward)


@description
def alltoall(
    group: Group, tensor: torch.Tensor, splits: Splits = None, name: str | None = None
) -> Collective[tuple[torch.Tensor, torch.Tensor]]:
    """Send the next splits[i] rows to rank i, or equal parts; return the rows that came, and how many from each rank.

    Gradient: flows back to where the rows came from.
    """
    rows = plain_values(check_tensor(tensor))
    if isinstance(splits, torch.Tensor):
        splits = check_tensor(splits, "splits").reshape(-1)
    sent = _send_counts(rows, splits, group.size)
    name = name_of(group, "alltoall", name)
    shared_args = {"tensors": [spec_of(rows, any_rows=True)], "device": tensor.device.type}
    like = splits[:0] if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[tuple[torch.Tensor, torch.Tensor]]:
        received = [counts[backend.rank] for counts in rank_args]
        moves = any(sum(counts) for counts in rank_args)
        found = yield from _move_rows(backend, rows, sent, received, name, moves=moves)
        return found, like.new_tensor(received)

    def backward(gradients: Sequence[torch.Tensor], rank_args: Sequence[Any]) -> torch.Tensor:
        received = [counts[group.rank] for counts in rank_args]
        return alltoall(group, gradients[0], received, f"{name}.backward").run()[0]

    request = CollectiveRequest("alltoall", name, shared_args, sent)
    return Collective(group, request, perform, tensor.device, [tensor], backward)


def _move_rows(
    backend: Backend, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str, *, moves: bool
) -> Stages[torch.Tensor]:
    """Send rows to each rank and return those that came; every rank calls this, and `moves` is the same on all."""
    width = row_nbytes(rows)
    found = torch.empty(0, dtype=torch.uint8, device=rows.device)
    if width and moves:
        sizes = [count * width for count in sent], [count * width for count in received]
        found = yield backend.alltoall(as_bytes(rows.contiguous()), *sizes, f"op.{name}")
    return _rows_like(rows, found, sum(received))


def _send_counts(rows: torch.Tensor, splits: Splits, size: int) -> list[int]:
    """Return how many rows go to each rank."""
    if rows.dim() == 0:
        raise UsageError("alltoall sends rows: pass a tensor with at least one dimension")
    count = rows.shape[0]
    if splits is None or len(splits) == 0:
        if count % size:
            raise UsageError(f"alltoall of {count} rows between {size} ranks: they do not divide evenly, pass splits")
        return [count // size] * size
    return _check_splits(splits, count, size)


def _check_splits(splits: Sequence[int] | torch.Tensor, count: int, size: int) -> list[int]:
    """Return `splits` as ints; raise UsageError unless they share out `count` rows between `size` ranks."""
    sent = as_ints(splits.tolist() if isinstance(splits, torch.Tensor) else splits, "splits")
    if len(sent) != size or any(split < 0 for split in sent) or sum(sent) != count:
        raise UsageError(f"splits {sent}: expected {size} numbers of rows, 0 or more, together {count}")
    return sent


@description
def reducescatter(
    group: Group,
    tensors: Tensors,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    reduction: Reduction | None = None,
) -> Collective[Tensors]:
    """Return this rank's rows of the reduction; the first ranks have one more where the rows do not divide evenly.

    Rows are added in rank order in any case; an ordered mean is rounded once, after the division.

    Gradient: the gradients of all ranks' rows; of a sum, times the number of ranks.
    """
    members, kind, form = _parse(tensors, "reducescatter")
    if op == "adasum":
        raise UsageError("op 'adasum' looks at whole tensors: use allreduce")
    if any(tensor.dim() == 0 for tensor in members):
        raise UsageError("reducescatter shares out rows: pass tensors with at least one dimension")
    scales, is_ordered = scales_of(prescale, postscale), (reduction or group.reduction) == "ordered"
    given = [plain_values(each) if scales[0] == 1 else plain_copy(each) for each in members]
    request = _reduction_request(group, kind, name, members, op, scales, reduction or group.reduction)

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[Tensors]:
        found = []
        for number, each in enumerate(given):
            part, values = f"op.{request.name}.{number}", scale_(each, scales[0])
            found.append((yield from _own_rows(backend, values, part, op, scales[1], is_ordered=is_ordered)))
        return form(found)

    def backward(gradients: Sequence[torch.Tensor], rank_args: Sequence[Any]) -> Tensors:
        _require_linear(op)
        factor = scales[0] * scales[1] * (group.size if op == "sum" else 1)
        scaled = [scale_(gradient.clone(), factor) for gradient in gradients]
        return allgather(group, form(scaled), f"{request.name}.backward").run()

    return Collective(group, request, perform, members[0].device, members, backward)


def _own_rows(
    backend: Backend, rows: torch.Tensor, name: str, op: Op, postscale: float, *, is_ordered: bool
) -> Stages[torch.Tensor]:
    """Reduce all ranks' values of this rank's rows, here and in rank order: the same on every backend."""
    counts = even_shares(rows.shape[0], backend.size)
    count, width = counts[backend.rank], row_nbytes(rows)
    shape = (backend.size, count, *rows.shape[1:])
    if not rows.numel():
        return rows.new_empty(shape[1:])
    sizes = [each * width for each in counts], [count * width] * backend.size
    received = yield backend.alltoall(as_bytes(rows.contiguous()), *sizes, name)
    received = from_bytes(received, rows.dtype, shape)
    if is_ordered and op == "mean" and rows.is_floating_point():
        return scale_(reduce_rows(received, "mean"), postscale)
    return finalize_(reduce_rows(received, wire_op(op)), op, backend.size, postscale)


def even_shares(rows: int, size: int) -> list[int]:
    """Return how many rows each rank gets: as even as possible, the first ranks take the remainder."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]


@description
def scatter(
    group: Group, tensor: torch.Tensor | None, root: int, splits: Splits = None, name: str | None = None
) -> Collective[torch.Tensor]:
    """Give rank i the next splits[i] rows of root's tensor, or even shares; the others may pass None.

    Gradient: to root that of all rows, if its tensor requires one. Only root knows the tensor: its `rank_args`
    describe it.
    """
    root, root_index = root_of(group, root)
    inputs: list[torch.Tensor] = []
    rows, root_args, device = None, None, None
    if accelerator.is_in_use():  # whose stream a rank without a tensor uses
        device = accelerator.current(str(accelerator.kind()))
    if tensor is not None:
        check_tensor(tensor)
    if group.rank == root_index:
        rows, counts = _rows_to_scatter(tensor, splits, group.size)
        root_args = [spec_of(rows), rows.device.type, counts, requires_grad([rows])]
        rows, device = plain_values(rows), rows.device
    name = name_of(group, "scatter", name)

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[torch.Tensor]:
        spec, kind, counts, has_gradient = rank_args[root_index]
        dtype, shape = spec_from(spec)
        given = torch.empty((0, *shape[1:]), dtype=dtype, device=accelerator.current(kind)) if rows is None else rows
        sent = [0] * backend.size if rows is None else counts
        received = [0] * backend.size
        received[root_index] = counts[backend.rank]
        found = yield from _move_rows(backend, given, sent, received, name, moves=any(counts))
        if has_gradient:
            inputs.append(_no_rows(tensor, found) if rows is None else cast(torch.Tensor, tensor))
        return found

    def backward(gradients: Sequence[torch.Tensor], rank_args: Sequence[Any]) -> torch.Tensor:
        return gather(group, gradients[0], root, f"{name}.backward").run()

    request = CollectiveRequest("scatter", name, {"root": root}, root_args)
    return Collective(group, request, perform, device, inputs, backward)


def _rows_to_scatter(tensor: torch.Tensor | None, splits: Splits, size: int) -> tuple[torch.Tensor, list[int]]:
    """Return root's tensor, and how many rows each rank gets."""
    if tensor is None:
        raise UsageError("the root of scatter passed None: pass the tensor whose rows are dealt out")
    if tensor.dim() == 0:
        raise UsageError("scatter deals out rows: pass a tensor with at least one dimension")
    count = tensor.shape[0]
    return tensor, even_shares(count, size) if splits is None else _check_splits(splits, count, size)


def _no_rows(tensor: object, like: torch.Tensor) -> torch.Tensor:
    """Return no rows, of `tensor` if it fits: with them a rank that scattered none takes part in the backward pass."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype == like.dtype and tensor.shape[1:] == like.shape[1:]:
        return _requiring_grad(tensor[:0])
    return _requiring_grad(like[:0])


def _requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


@description
def gather(group: Group, tensor: torch.Tensor, root: int, name: str | None = None) -> Collective[torch.Tensor]:
    """Concatenate the ranks' rows on root, (n_rank, *s) -> (sum of n_rank, *s); the others get no rows, (0, *s).

    Gradient: root's gradients flow back to where the rows came from, if some rank's tensor requires one.
    """
    root, root_index = root_of(group, root)
    rows = with_rows(plain_values(check_tensor(tensor)))
    inputs: list[torch.Tensor] = []
    shape = tensor.shape
    name = name_of(group, "gather", name)
    shared_args = {"tensors": [spec_of(rows, any_rows=True)], "device": rows.device.type, "root": root}

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[torch.Tensor]:
        counts = [count for count, _ in rank_args]
        if any(has_gradient for _, has_gradient in rank_args):
            inputs.append(_requiring_grad(tensor))
        received = counts if backend.rank == root_index else [0] * backend.size
        sent = [0] * backend.size
        sent[root_index] = len(rows)
        return _move_rows(backend, rows, sent, received, name, moves=any(counts))

    def backward(gradients: Sequence[torch.Tensor], rank_args: Sequence[Any]) -> torch.Tensor:
        counts = [count for count, _ in rank_args]
        return scatter(group, gradients[0], root, counts, f"{name}.backward").run().reshape(shape)

    request = CollectiveRequest("gather", name, shared_args, [len(rows), requires_grad([tensor])])
    return Collective(group, request, perform, tensor.device, inputs, backward)


def barrier(group: Group, timeout_s: float | None = None) -> None:
    """Return when every rank has called this; other collectives may still be under way."""
    request = CollectiveRequest("barrier", group.next_name("barrier"), {})
    Collective(group, request, lambda backend, rank_args: None, timeout_s=timeout_s).run()


def run_agreed(
    group: Group, kind: str, name: str, shared_args: dict[str, Any], perform: Callable[[Backend], Any]
) -> Any:
    """Run `perform` at the same point on every rank, once all ranks agree on the arguments; return its result."""
    request = CollectiveRequest(kind, name, shared_args)
    return Collective(group, request, lambda backend, rank_args: perform(backend)).run()
