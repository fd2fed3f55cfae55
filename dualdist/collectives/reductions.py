"""Reductions over all ranks, in one path for all callers: of any dtype, by any op, in rank order where asked.

Note [rank order]: a sum of floats depends on its order, and from three ranks on transports add in different orders,
which mostly depend on the position of an element in its buffer, too. Shared memory on one host adds in rank order at
all sizes, and a sum of two has one order: these reduce as usual. Elsewhere, with reduction="ordered", the buffer is cut
into one part for each rank: an alltoall brings rank r the r-th part of every rank, it adds them in rank order, and an
allgather returns the sums. A rank sends 2 (n - 1) / n of the buffer, as in a ring. Numbers below 32 bits are added in
float32 and rounded once, after the division of a mean. Integers, minima and maxima are exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualdist.backends.arithmetic import (
    LOGIC,
    ORDERED,
    TOP_BIT,
    WIDER,
    Op,
    ReduceOp,
    divide_,
    finalize_,
    ordered,
    reduce_rows,
    scale_,
    unordered,
)
from dualdist.backends.base import Backend, filled
from dualdist.backends.control_plane import allgather_bytes, as_bytes, exchange
from dualdist.backends.operation import Completed, Converted, Operation, Staged, Stages
from dualdist.backends.staging import Staging


def allreduce_(
    backend: Backend,
    buffer: torch.Tensor,
    op: ReduceOp,
    name: str,
    *,
    source: torch.Tensor | None = None,
    is_ordered: bool = False,
    ready: torch.Event | None = None,
) -> Operation[torch.Tensor]:
    """Begin to reduce a contiguous buffer of any dtype in place, or another tensor into it; every rank calls this.

    `ready`: when an accelerator has the buffer's values; by default, when it has done what its current stream has now.

    A "mean" of floats or complex numbers is the sum, divided once: by the transport if it does so as fast as it adds.
    """
    dtype, size = buffer.dtype, backend.size
    if size == 1:
        return Completed(filled(buffer, source))
    if isinstance(backend, Staging) and buffer.device.type != "cpu":  # all of it on the host, as without an accelerator
        given, inner = buffer if source is None else source, backend.inner
        return backend.through_host(
            given, lambda host: allreduce_(inner, host, op, name, is_ordered=is_ordered), buffer, ready
        )
    if is_ordered and dtype.is_floating_point and op in ("sum", "mean", "product"):
        return _ordered_allreduce_(backend, filled(buffer, source), op, name)
    can_reduce = dtype in backend.supported_reduce_dtypes and not (dtype.is_floating_point and op in ("min", "max"))
    if op == "mean":
        if can_reduce and buffer.device.type in backend.mean_devices:
            return backend.allreduce_(buffer, "mean", name, source)
        total = allreduce_(backend, buffer, "sum", name, source=source, is_ordered=is_ordered)
        return Converted(total, lambda found: divide_(found, size))
    if can_reduce:
        return backend.allreduce_(buffer, op, name, source)
    return _allreduce_by_another_dtype_(backend, filled(buffer, source), op, name, is_ordered=is_ordered)


def _allreduce_by_another_dtype_(
    backend: Backend, buffer: torch.Tensor, op: ReduceOp, name: str, *, is_ordered: bool
) -> Operation[torch.Tensor]:
    """Reduce a dtype that the transport lacks by one that it has; the result is the same."""
    dtype = buffer.dtype
    if dtype == torch.bool:
        op = LOGIC.get(op, op)
    if dtype in ORDERED and (op == "min" or op == "max"):
        work = backend.allreduce_(ordered(buffer, op), op, name)
        return Converted(work, lambda found: buffer.copy_(unordered(found, dtype)))
    if dtype == torch.uint64:
        signed, flip = buffer.view(torch.int64), TOP_BIT if op in ("min", "max") else 0
        work = backend.allreduce_(signed ^ flip, op, name)
        return Converted(work, lambda found: signed.copy_(found ^ flip).view(torch.uint64))
    if dtype in WIDER:
        return Converted(allreduce_(backend, buffer.to(WIDER[dtype]), op, name), buffer.copy_)
    if dtype.is_complex and op == "sum":
        parts = torch.view_as_real(buffer)
        return Converted(allreduce_(backend, parts, op, name, is_ordered=is_ordered), lambda _: buffer)
    rows = backend.size, *buffer.shape  # of all ranks, which are reduced here, in rank order
    gathered = backend.allgather(as_bytes(buffer), name)
    return Converted(gathered, lambda found: buffer.copy_(reduce_rows(found.view(dtype).reshape(rows), op)))


def _ordered_allreduce_(backend: Backend, buffer: torch.Tensor, op: ReduceOp, name: str) -> Operation[torch.Tensor]:
    """Reduce floats in rank order: Note [rank order]."""
    dtype, has_order = buffer.dtype, buffer.device.type in backend.rank_order_devices
    if dtype in WIDER and has_order:
        return Converted(allreduce_(backend, buffer.to(WIDER[dtype]), op, name), buffer.copy_)
    if (has_order or backend.size == 2) and dtype not in WIDER and dtype in backend.supported_reduce_dtypes:
        return allreduce_(backend, buffer, op, name)
    return Staged(_reduce_by_parts_(backend, buffer, op, name)) if buffer.numel() else Completed(buffer)


def _reduce_by_parts_(backend: Backend, buffer: torch.Tensor, op: ReduceOp, name: str) -> Stages[torch.Tensor]:
    size, count, width = backend.size, buffer.numel(), buffer.element_size()
    share = -(-count // size)  # of every rank; the last ones have less, or nothing
    counts = [min(share, max(0, count - rank * share)) for rank in range(size)]
    own = counts[backend.rank]
    data = as_bytes(buffer)
    rows = yield backend.alltoall(data, [each * width for each in counts], [own * width] * size, f"{name}.scatter")
    total = reduce_rows(rows.view(buffer.dtype).view(size, own), op)
    if own < share:
        padded = total.new_zeros(share)
        padded[:own] = total
        total = padded
    gathered = yield backend.allgather(as_bytes(total), f"{name}.gather")
    data.copy_(gathered[: len(data)])
    return buffer


def adasum_(backend: Backend, flat: torch.Tensor, sizes: Sequence[int], name: str) -> Stages[torch.Tensor]:
    """Replace each tensor in `flat`, of `sizes` elements, by the Adasum over all ranks, a power of two.

    Gradients a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum if orthogonal, their mean if
    parallel. Pairs of ranks are combined, then pairs of pairs, in log2(size) steps of one exchange of the whole buffer
    (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, equation 3 and section 3.4).
    """
    own = flat if flat.dtype == torch.float64 else flat.float()
    distance = 1
    while distance < backend.size:
        counts = [own.nbytes if rank == backend.rank ^ distance else 0 for rank in range(backend.size)]
        received = yield backend.alltoall(as_bytes(own), counts, counts, f"{name}.{distance}")
        other = received.view(own.dtype)
        lower, upper = (own, other) if backend.rank & distance == 0 else (other, own)
        own = torch.cat([adaptive_sum(a, b) for a, b in zip(lower.split(sizes), upper.split(sizes), strict=True)])
        distance *= 2
    return flat.copy_(own)


def adaptive_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Combine two flat tensors by Adasum; dot products are computed in float64."""
    dot, a_square, b_square = (torch.dot(x.double(), y.double()) for x, y in ((a, b), (a, a), (b, b)))
    zero = torch.zeros_like(dot)
    a_factor = 1 - torch.where(a_square > 0, dot / (2 * a_square), zero)
    b_factor = 1 - torch.where(b_square > 0, dot / (2 * b_square), zero)
    return a * a_factor.to(a.dtype) + b * b_factor.to(b.dtype)


def sparse_sum(
    backend: Backend,
    own: torch.Tensor,
    op: Op,
    name: str,
    scales: tuple[float, float] = (1.0, 1.0),
    *,
    is_ordered: bool = False,
) -> Stages[torch.Tensor]:
    """Reduce sparse COO tensors by sum or mean, in rank order; return a coalesced tensor.

    Its number of sparse dimensions is the lowest among the ranks' tensors that store elements. If `is_ordered`, numbers
    below 32 bits are added in float32 and rounded once.
    """
    own, counts = yield from _match_sparse_dim(backend, own.coalesce(), f"{name}.count")
    indices, values = own.indices().t().contiguous(), own.values().contiguous()
    if scales[0] != 1.0:
        values = scale_(values.clone(), scales[0])
    rows = [count * indices.shape[1] * indices.element_size() for count in counts]
    sizes = [count * values.shape[1:].numel() * values.element_size() for count in counts]
    all_indices = yield from allgather_bytes(backend, as_bytes(indices), rows, f"{name}.indices")
    all_values = yield from allgather_bytes(backend, as_bytes(values), sizes, f"{name}.values")
    wide = WIDER.get(own.dtype, own.dtype) if is_ordered else own.dtype
    total = torch.sparse_coo_tensor(
        all_indices.view(indices.dtype).reshape(-1, indices.shape[1]).t(),
        all_values.view(values.dtype).reshape(-1, *values.shape[1:]).to(wide),
        own.shape,
        device=own.device,
        check_invariants=False,
    ).coalesce()
    finalize_(total.values(), op, backend.size, scales[1])
    return total.to(own.dtype)


def _match_sparse_dim(backend: Backend, own: torch.Tensor, name: str) -> Stages[tuple[torch.Tensor, list[int]]]:
    """Convert `own` to the same number of sparse dimensions on all ranks; return it and each rank's element count."""
    while True:
        summary = f"{own._nnz()} {own.sparse_dim()}".encode()
        rows = yield exchange(backend, summary, name)
        summaries = [(int(count), int(dim)) for count, dim in map(bytes.split, rows)]
        dims = {dim for count, dim in summaries if count}
        least = min(dims or [dim for _, dim in summaries])
        if own.sparse_dim() != least:
            own = (
                own.to_dense().to_sparse(least) if own._nnz() else empty_sparse(own.shape, own.dtype, own.device, least)
            ).coalesce()
        if len(dims) <= 1:  # else there may be other elements now
            return own, [count for count, _ in summaries]


def empty_sparse(shape: torch.Size, dtype: torch.dtype, device: torch.device, sparse_dim: int = 1) -> torch.Tensor:
    """Return a sparse COO tensor that stores nothing."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[sparse_dim:], dtype=dtype, device=device)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
