"""Horovod's other moves of tensors, by its names and signatures, over dualdist's collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from dualdist.collectives import autograd, collectives
from dualdist.ddp.join import join as join_group
from dualdist.hvd.exceptions import horovods_errors
from dualdist.hvd.face import current, started, synchronize
from dualdist.hvd.ops import Tensors
from dualdist.hvd.process_sets import ProcessSet, global_process_set, joined_group


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin allgather()."""
    with horovods_errors():
        return started(collectives.allgather(joined_group(process_set), tensor, name))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Everybody's rows in rank order; gradients flow through it."""
    with horovods_errors():
        group = joined_group(process_set)
        if autograd.wants_gradient([tensor]):
            return autograd.allgather(group, tensor, name)
        return collectives.allgather(group, tensor, name).wait()


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin grouped_allgather()."""
    with horovods_errors():
        return started(collectives.grouped_allgather(joined_group(process_set), tensors, name), tuple)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """allgather() of each tensor, all of them or none."""
    with horovods_errors():
        group = joined_group(process_set)
        if autograd.wants_gradient(tensors):
            return tuple(autograd.grouped_allgather(group, tensors, name))
        return tuple(collectives.grouped_allgather(group, tensors, name).wait())


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin broadcast()."""
    with horovods_errors():
        root = current().job_rank(root_rank)
        return started(collectives.broadcast(joined_group(process_set), tensor, root, name))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor with the values of `root_rank`, a rank of the job; gradients flow through it."""
    with horovods_errors():
        group, root = joined_group(process_set), current().job_rank(root_rank)
        if autograd.wants_gradient([tensor]):
            return autograd.broadcast(group, tensor, root, name)
        return collectives.broadcast(group, tensor, root, name).wait()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin broadcast_()."""
    with horovods_errors():
        root = current().job_rank(root_rank)
        return started(collectives.broadcast_(joined_group(process_set), tensor, root, name))


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
        return started(collectives.alltoall(joined_group(process_set), tensor, splits, name))


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows that the ranks sent here, and with `splits` how many came from each; gradients flow through it."""
    with horovods_errors():
        group = joined_group(process_set)
        if autograd.wants_gradient([tensor]):
            found = autograd.alltoall(group, tensor, splits, name)
        else:
            found = collectives.alltoall(group, tensor, splits, name).wait()
        return found[0] if splits is None else found


def join(device: int = -1) -> int:
    """Let the others go on without this rank's data; the last rank to join, once all have. `device` does not matter.

    Operations that this rank has begun are finished first, so the others must begin them before they need it to join.
    """
    face = current()
    with horovods_errors():
        last = join_group(face.base, collectives.zero_contribution)
    return face.base.ranks.index(last)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Every rank of the process set has called this when it returns."""
    with horovods_errors():
        group = joined_group(process_set)
        collectives.barrier(group)
        # Once more, so that the ranks leave within a message of each other: scripts take times from barrier to barrier.
        collectives.barrier(group)
