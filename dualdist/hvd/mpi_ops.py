"""Horovod's operations on tensors, by its names and signatures, over dualdist's collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from dualdist import collectives, differentiable, express
from dualdist.errors import UsageError
from dualdist.group import Handle
from dualdist.hvd import basics
from dualdist.hvd.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)
from dualdist.hvd.compression import Compression, Compressor
from dualdist.hvd.exceptions import HorovodInternalError, horovods_errors
from dualdist.hvd.face import current
from dualdist.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    joined_group,
    remove_process_set,
)
from dualdist.joining import join as join_group
from dualdist.reductions import INTEGERS, Op

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

Average, Sum, Adasum, Min, Max, Product = range(6)
OPS: dict[int, Op] = {Average: "mean", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}

Tensors = Sequence[torch.Tensor]


def init(*args: Any, **kwargs: Any) -> None:
    """Join the job: init(comm=None, process_sets=None), see dualdist.hvd.basics.init."""
    with horovods_errors():
        basics.init(*args, **kwargs)


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Leave the job; init() may follow."""
    basics.shutdown(*args, **kwargs)


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The operation that is meant by `op`, or by the older `average`; ValueError where both are given."""
    if op is not None and average is not None:
        raise UsageError("op and average were given: leave average out, op says it all")
    if average is not None:
        warnings.warn("average=... is Horovod's older way; pass op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else op


def _reduction(
    op: int, tensors: Tensors, prescale: float, postscale: float, process_set: ProcessSet
) -> tuple[Op, float, float]:
    """dualdist's operation and scales. Integers are averaged too: the sum, divided in float64 and cut off."""
    if op not in OPS:
        raise UsageError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product")
    if op == Adasum:
        members = process_set.size() or 1
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum works on all ranks, not on other process sets")
        if members & (members - 1):
            raise NotImplementedError(f"Adasum pairs the ranks: their number is a power of two, not {members}")
    kinds = {tensor.dtype in INTEGERS for tensor in tensors}
    if op == Average and True in kinds:
        if len(kinds) > 1:
            raise UsageError("integers and floats are averaged in different ways: reduce them in two calls")
        return "integer mean", prescale, postscale
    return OPS[op], prescale, postscale


def _started(handle: Handle[Any], result: Callable[[Any], Any] = lambda value: value) -> int:
    """The number by which poll() and synchronize() know the operation."""
    face = current()
    number = next(face.numbers)
    face.pending[number] = handle.begin(), result
    return number


def poll(handle: int) -> bool:
    """Whether synchronize() would return at once; ValueError where there is no such operation, or no more."""
    pending = current().pending
    if handle not in pending:
        raise UsageError(f"handle {handle} is of no operation under way: was it synchronized already?")
    return pending[handle][0].done()


def synchronize(handle: int) -> Any:
    """The operation's result, once it is there; None where there is no such operation, or no more."""
    found = current().pending.pop(handle, None)
    if found is None:
        return None
    with horovods_errors():
        return found[1](found[0].wait())


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin allreduce(); the tensor is left as it is."""
    with horovods_errors():
        group = joined_group(process_set)
        kind = handle_average_backwards_compatibility(op, average)
        how = _reduction(kind, [tensor], prescale_factor, postscale_factor, process_set)
        return _started(collectives.allreduce(group, tensor, how[0], name, *how[1:]))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A new tensor with the reduction over the process set; gradients flow through it."""
    with horovods_errors():
        group = joined_group(process_set)
        kind = handle_average_backwards_compatibility(op, average)
        sent, ctx = compression.compress(tensor)
        how = _reduction(kind, [sent], prescale_factor, postscale_factor, process_set)
        if differentiable.wants_gradient([sent]):
            found = differentiable.allreduce(group, sent, how[0], name, *how[1:])
        else:
            found = express.allreduce(group, sent, how[0], name, *how[1:])
        return compression.decompress(found, ctx)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin allreduce_()."""
    with horovods_errors():
        group = joined_group(process_set)
        kind = handle_average_backwards_compatibility(op, average)
        how = _reduction(kind, [tensor], prescale_factor, postscale_factor, process_set)
        return _started(collectives.allreduce_(group, tensor, how[0], name, *how[1:]))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction in place of the tensor, which is returned."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return cast(torch.Tensor, synchronize(handle))


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin grouped_allreduce(); the tensors are left as they are."""
    with horovods_errors():
        group = joined_group(process_set)
        kind = handle_average_backwards_compatibility(op, average)
        how = _reduction(kind, tensors, prescale_factor, postscale_factor, process_set)
        return _started(collectives.grouped_allreduce(group, tensors, how[0], name, *how[1:]), tuple)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """allreduce() of each tensor, all of them or none."""
    with horovods_errors():
        group = joined_group(process_set)
        kind = handle_average_backwards_compatibility(op, average)
        pairs = [compression.compress(tensor) for tensor in tensors]
        sent = [tensor for tensor, _ in pairs]
        how = _reduction(kind, sent, prescale_factor, postscale_factor, process_set)
        if differentiable.wants_gradient(sent):
            found = differentiable.grouped_allreduce(group, sent, how[0], name, *how[1:])
        else:
            found = collectives.grouped_allreduce(group, sent, how[0], name, *how[1:]).wait()
        return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, pairs, strict=True)]


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin grouped_allreduce_()."""
    with horovods_errors():
        group = joined_group(process_set)
        kind = handle_average_backwards_compatibility(op, average)
        how = _reduction(kind, tensors, prescale_factor, postscale_factor, process_set)
        return _started(collectives.grouped_allreduce_(group, tensors, how[0], name, *how[1:]), tuple)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """The reductions in place of the tensors, which are returned."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return cast(tuple[torch.Tensor, ...], synchronize(handle))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to average or add sparse tensors; a function that waits for the result."""
    with horovods_errors():
        group = joined_group(process_set)
        how = _reduction(op, [tensor], 1.0, 1.0, process_set)
        handle = collectives.sparse_allreduce(group, tensor, how[0], name).begin()

    def finish() -> torch.Tensor:
        with horovods_errors():
            return handle.wait()

    return finish


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin allgather()."""
    with horovods_errors():
        return _started(collectives.allgather(joined_group(process_set), tensor, name))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Everybody's rows in rank order; gradients flow through it."""
    with horovods_errors():
        group = joined_group(process_set)
        if differentiable.wants_gradient([tensor]):
            return differentiable.allgather(group, tensor, name)
        return collectives.allgather(group, tensor, name).wait()


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin grouped_allgather()."""
    with horovods_errors():
        return _started(collectives.grouped_allgather(joined_group(process_set), tensors, name), tuple)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """allgather() of each tensor, all of them or none."""
    with horovods_errors():
        group = joined_group(process_set)
        if differentiable.wants_gradient(tensors):
            return tuple(differentiable.grouped_allgather(group, tensors, name))
        return tuple(collectives.grouped_allgather(group, tensors, name).wait())


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin broadcast()."""
    with horovods_errors():
        root = current().job_rank(root_rank)
        return _started(collectives.broadcast(joined_group(process_set), tensor, root, name))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor with the values of `root_rank`, a rank of the job; gradients flow through it."""
    with horovods_errors():
        group, root = joined_group(process_set), current().job_rank(root_rank)
        if differentiable.wants_gradient([tensor]):
            return differentiable.broadcast(group, tensor, root, name)
        return collectives.broadcast(group, tensor, root, name).wait()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin broadcast_()."""
    with horovods_errors():
        root = current().job_rank(root_rank)
        return _started(collectives.broadcast_(joined_group(process_set), tensor, root, name))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The values of `root_rank` in place of the tensor's, which is returned."""
    return cast(torch.Tensor, synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin alltoall(); its result is always the rows and their numbers."""
    with horovods_errors():
        return _started(collectives.alltoall(joined_group(process_set), tensor, splits, name))


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows that the ranks sent here, and with `splits` how many came from each; gradients flow through it."""
    with horovods_errors():
        group = joined_group(process_set)
        if differentiable.wants_gradient([tensor]):
            found = differentiable.alltoall(group, tensor, splits, name)
        else:
            found = collectives.alltoall(group, tensor, splits, name).wait()
        return found[0] if splits is None else found


def _no_adasum(op: int) -> None:
    if op == Adasum:
        raise HorovodInternalError("Adasum looks at whole tensors, and reducescatter only at shares: use allreduce")


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin reducescatter()."""
    with horovods_errors():
        group = joined_group(process_set)
        _no_adasum(op)
        how = _reduction(op, [tensor], prescale_factor, postscale_factor, process_set)
        return _started(collectives.reducescatter(group, tensor, how[0], name, *how[1:]))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's share of the rows of the reduction; gradients flow through it."""
    with horovods_errors():
        group = joined_group(process_set)
        _no_adasum(op)
        sent, ctx = compression.compress(tensor)
        how = _reduction(op, [sent], prescale_factor, postscale_factor, process_set)
        if differentiable.wants_gradient([sent]):
            found = differentiable.reducescatter(group, sent, how[0], name, *how[1:])
        else:
            found = collectives.reducescatter(group, sent, how[0], name, *how[1:]).wait()
        return compression.decompress(found, ctx)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin grouped_reducescatter()."""
    with horovods_errors():
        group = joined_group(process_set)
        _no_adasum(op)
        how = _reduction(op, tensors, prescale_factor, postscale_factor, process_set)
        return _started(collectives.grouped_reducescatter(group, tensors, how[0], name, *how[1:]), tuple)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """reducescatter() of each tensor, all of them or none."""
    with horovods_errors():
        group = joined_group(process_set)
        _no_adasum(op)
        pairs = [compression.compress(tensor) for tensor in tensors]
        sent = [tensor for tensor, _ in pairs]
        how = _reduction(op, sent, prescale_factor, postscale_factor, process_set)
        if differentiable.wants_gradient(sent):
            found = differentiable.grouped_reducescatter(group, sent, how[0], name, *how[1:])
        else:
            found = collectives.grouped_reducescatter(group, sent, how[0], name, *how[1:]).wait()
        return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, pairs, strict=True)]


def join(device: int = -1) -> int:
    """Let the others go on without this rank's data; the last rank to join, once all have. `device` does not matter.

    Operations that this rank has begun are finished first, so the others must begin them before they need it to join.
    """
    face = current()
    with horovods_errors():
        last = join_group(face.base, collectives.stand_in)
    return face.base.ranks.index(last)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Every rank of the process set has called this when it returns."""
    with horovods_errors():
        group = joined_group(process_set)
        collectives.barrier(group)
        # Once more, so that the ranks leave within a message of each other: scripts take times from barrier to barrier.
        collectives.barrier(group)
