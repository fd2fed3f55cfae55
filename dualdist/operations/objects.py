"""Objects, parameters and optimizer state of all ranks: exchange and comparison; and waits for the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dualdist.collectives import broadcast_state, collectives, consistency
from dualdist.collectives.arguments import check_limit
from dualdist.collectives.dynamo import disable_compile
from dualdist.collectives.group import Group
from dualdist.session import group_or_world

if TYPE_CHECKING:
    from dualdist.liveness.wait_times import SlowRanks

T = TypeVar("T")


@disable_compile
def broadcast_object(obj: T, root: int = 0, *, group: Group | None = None) -> T:
    """Return root's object on every rank; every rank of the group calls this.

    Objects are pickled: use it only among ranks that you trust.

    Args:
        obj: a picklable object; ignored on ranks other than `root`.
        root: a rank of the job that is in the group.
        group: a group of new_group(), or None for all ranks.

    Returns:
        `obj` itself on root, a copy on the other ranks.

    Raises:
        MismatchError: the ranks passed different roots; raised on every rank.
        UsageError: the object cannot be pickled; raised on every rank.

    Example:
        >>> dd.broadcast_object({"lr": 0.1})
        {'lr': 0.1}
    """
    return broadcast_state.broadcast_object(group_or_world(group), obj, root)


@disable_compile
def allgather_object(obj: T, *, group: Group | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order; every rank of the group calls this.

    Objects are pickled: use it only among ranks that you trust.

    Args:
        obj: a picklable object.
        group: a group of new_group(), or None for all ranks.

    Returns:
        A list of `size` objects in rank order; this rank's own is `obj` itself.

    Raises:
        UsageError: an object cannot be pickled; raised on every rank.

    Example:
        >>> dd.allgather_object(f"rank {dd.rank()}")
        ['rank 0']
    """
    return broadcast_state.allgather_object(group_or_world(group), obj)


@disable_compile
def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Tensor]],
    root: int = 0,
    *,
    group: Group | None = None,
) -> None:
    """Copy root's parameters to every rank, in place; every rank of the group calls this.

    Call it after creating or loading the model and before training, so that all ranks begin with equal parameters.

    Args:
        params: a module (its parameters and buffers), a state_dict, or named parameters; of the same names, shapes and
            dtypes, in the same order, on every rank.
        root: a rank of the job that is in the group.
        group: a group of new_group(), or None for all ranks.

    Raises:
        MismatchError: the ranks' models differ; raised on every rank, and names the difference.

    Example:
        >>> dd.broadcast_parameters(torch.nn.Linear(2, 1))
    """
    broadcast_state.broadcast_parameters(group_or_world(group), params, root)


@disable_compile
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0, *, group: Group | None = None) -> None:
    """Copy root's optimizer state and hyperparameters to every rank; every rank of the group calls this.

    State that root does not have is deleted.

    Args:
        optimizer: an optimizer of the same class, with as many parameters in each group, on every rank.
        root: a rank of the job that is in the group.
        group: a group of new_group(), or None for all ranks.

    Raises:
        MismatchError: the ranks' optimizers differ; raised on every rank.
        UsageError: the optimizer was wrapped with shard=True.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> dd.broadcast_optimizer_state(torch.optim.AdamW(model.parameters()))
    """
    from dualdist.ddp.optimizer import require_whole_state

    require_whole_state(optimizer, "broadcast before dd.wrap_optimizer, or load a checkpoint")
    broadcast_state.broadcast_optimizer_state(group_or_world(group), optimizer, root)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm, over all parameters, is at most `max_norm`.

    This is torch.nn.utils.clip_grad_norm_, which is right between backward() and step(), also with shard=True: every
    rank has all reduced gradients then, and finds the same norm without communication.

    Args:
        parameters: parameters whose gradients were reduced.
        max_norm: the largest norm to allow.
        norm_type: the p of the p-norm; inf for the largest absolute value.
        error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite.
        foreach: torch's argument of this name.

    Returns:
        The norm before the scaling, a tensor without dimensions.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> norm = dd.clip_grad_norm_(model.parameters(), 1.0)
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@disable_compile
def check_consistency(
    model: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Tensor]] = (),
    *,
    optimizer: torch.optim.Optimizer | None = None,
    buffers: bool = False,
    group: Group | None = None,
) -> None:
    """Raise DriftError on every rank unless all ranks hold bit-identical parameters.

    Every rank of the group calls this. Only hashes of 32 bytes are exchanged.

    Args:
        model: a module, a state_dict, or named tensors; of the same names and shapes on every rank.
        optimizer: compare its class, the options of its groups, such as the learning rate, and its state; of a sharded
            one the class and options.
        buffers: compare buffers, too, such as the running statistics of batch normalization, which are each rank's own.
        group: a group of new_group(), or None for all ranks.

    Raises:
        DriftError: names the first option that differs, with its values, or the first parameter, the ranks that differ
            from the others, by how much, and NaN or infinite values. Equal bits are equal, also for NaN.
        MismatchError: the ranks passed different names or shapes.

    Example:
        >>> dd.check_consistency(torch.nn.Linear(2, 1))
    """
    from dualdist.ddp.optimizer import is_sharded

    all_state = not is_sharded(optimizer)
    members = group_or_world(group)
    consistency.check_consistency(members, model, optimizer, has_all_state=all_state, buffers=buffers)


@disable_compile
def slow_ranks(*, group: Group | None = None) -> SlowRanks:
    """Return statistics on which ranks the others waited for since the last call; every rank of the group calls this.

    The first call starts the measurement; with DUALDIST_SLOW_RANKS=1 init() does, and rank 0 prints a table in
    shutdown(). Only waits of the host are counted, not those of a GPU's stream.

    Args:
        group: a group of new_group(), or None for all ranks.

    Returns:
        The same SlowRanks on every rank, which prints as a table. `slowest` is the rank that the others waited for
        most, or None; `caused_s[rank]` the seconds that each of the others waited for that rank, on average;
        `waited_s[rank]` the seconds that it waited.

    Example:
        >>> dd.slow_ranks().slowest is None
        True
    """
    from dualdist.trace import stragglers

    return stragglers.slow_ranks(group_or_world(group))


@disable_compile
def barrier(*, group: Group | None = None, timeout_s: float | None = None) -> None:
    """Wait until every rank of the group has called this; does not wait for other operations under way.

    Args:
        group: a group of new_group(), or None for all ranks.
        timeout_s: the seconds that this rank waits, as where rank 0 works for long before it comes; None for the
            timeout_s of init(). Ranks may differ.

    Raises:
        CollectiveTimeoutError: a rank did not call this within timeout_s; raised on every waiting rank.
        UsageError: timeout_s is no number of seconds above 0.

    Example:
        >>> dd.barrier()
    """
    if timeout_s is not None:
        check_limit(timeout_s)
    collectives.barrier(group_or_world(group), timeout_s)


@disable_compile
def join(*, group: Group | None = None) -> int:
    """Take part in the other ranks' operations with zeros until every rank has called this, like DDP's Join.

    Call it after the loop where ranks have different numbers of batches. Until all have joined, this rank contributes
    zeros to the others' allreduces and gradient reductions; a mean still divides by the number of all ranks. The other
    ranks' calls of anything else raise MismatchError there. Ranks that joined early did not step, so afterwards call
    broadcast_parameters() from the returned rank.

    Args:
        group: a group of new_group(), or None for all ranks.

    Returns:
        The rank that joined last.

    Raises:
        UsageError: an asynchronous operation is still under way on this rank.
        UnsupportedError: a collective library of an accelerator, as NCCL, moves the tensors.

    Example:
        >>> last = dd.join()
        >>> dd.broadcast_parameters(torch.nn.Linear(2, 1), root=last)
    """
    from dualdist.ddp import join as ddp_join

    return ddp_join.join(group_or_world(group))
