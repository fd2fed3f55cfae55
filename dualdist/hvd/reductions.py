"""Horovod's reductions of tensors, by its names and signatures, over dualdist's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from dualdist.collectives import autograd, collectives, fast_allreduce
from dualdist.hvd.compression import Compression, Compressor
from dualdist.hvd.exceptions import HorovodInternalError, horovods_errors
from dualdist.hvd.face import started, synchronize
from dualdist.hvd.ops import Adasum, Average, Tensors, handle_average_backwards_compatibility, reduction_of
from dualdist.hvd.process_sets import ProcessSet, global_process_set, joined_group


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
        how = reduction_of(kind, [tensor], prescale_factor, postscale_factor, process_set)
        return started(collectives.allreduce(group, tensor, how[0], name, *how[1:]))


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
        how = reduction_of(kind, [sent], prescale_factor, postscale_factor, process_set)
        if autograd.wants_gradient([sent]):
            found = autograd.allreduce(group, sent, how[0], name, *how[1:])
        else:
            found = fast_allreduce.allreduce(group, sent, how[0], name, *how[1:])
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
        how = reduction_of(kind, [tensor], prescale_factor, postscale_factor, process_set)
        return started(collectives.allreduce_(group, tensor, how[0], name, *how[1:]))


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
        how = reduction_of(kind, tensors, prescale_factor, postscale_factor, process_set)
        return started(collectives.grouped_allreduce(group, tensors, how[0], name, *how[1:]), tuple)


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
        how = reduction_of(kind, sent, prescale_factor, postscale_factor, process_set)
        if autograd.wants_gradient(sent):
            found = autograd.grouped_allreduce(group, sent, how[0], name, *how[1:])
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
        how = reduction_of(kind, tensors, prescale_factor, postscale_factor, process_set)
        return started(collectives.grouped_allreduce_(group, tensors, how[0], name, *how[1:]), tuple)


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
        how = reduction_of(op, [tensor], 1.0, 1.0, process_set)
        handle = collectives.sparse_allreduce(group, tensor, how[0], name).begin()

    def finish() -> torch.Tensor:
        with horovods_errors():
            return handle.wait()

    return finish


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
        how = reduction_of(op, [tensor], prescale_factor, postscale_factor, process_set)
        return started(collectives.reducescatter(group, tensor, how[0], name, *how[1:]))


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
        how = reduction_of(op, [sent], prescale_factor, postscale_factor, process_set)
        if autograd.wants_gradient([sent]):
            found = autograd.reducescatter(group, sent, how[0], name, *how[1:])
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
        how = reduction_of(op, tensors, prescale_factor, postscale_factor, process_set)
        return started(collectives.grouped_reducescatter(group, tensors, how[0], name, *how[1:]), tuple)


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
        how = reduction_of(op, sent, prescale_factor, postscale_factor, process_set)
        if autograd.wants_gradient(sent):
            found = autograd.grouped_reducescatter(group, sent, how[0], name, *how[1:])
        else:
            found = collectives.grouped_reducescatter(group, sent, how[0], name, *how[1:]).wait()
        return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, pairs, strict=True)]
