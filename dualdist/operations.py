"""The collectives on tensors that a training script calls; each delegates to its description in the session."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from dualdist.collectives.arguments import as_list, as_tensor
from dualdist.collectives.compile import disable_compile
from dualdist.session import group_or_world

if TYPE_CHECKING:
    from typing import TypeAlias, TypedDict

    import torch
    from torch import Tensor
    from typing_extensions import Unpack

    from dualdist.collectives.group import Group
    from dualdist.collectives.reductions import Op
    from dualdist.collectives.work import Collective, Handle

    Splits: TypeAlias = Sequence[int] | Tensor
    Async: TypeAlias = Literal[True]
    Sync: TypeAlias = Literal[False]

    class Common(TypedDict, total=False):
        """The keywords that every collective takes."""

        name: str | None
        group: Group | None

    class Scaled(Common, total=False):
        """The keywords of a reduction."""

        prescale: float
        postscale: float


T = TypeVar("T")


def _call(collective: Collective[T], async_op: bool) -> T | Handle[T]:
    return collective.start() if async_op else collective.run()


def _trace_allreduce(
    tensor: Tensor, op: Op = "mean", *, group: Group | None = None, async_op: bool = False, **options: Any
) -> Tensor | None:
    """Trace an allreduce for torch.compile; return None if it cannot follow."""
    from dualdist import traced_operations

    if async_op:
        return None
    return traced_operations.trace(traced_operations.allreduce, group_or_world(group), tensor, op, **options)


@overload
def allreduce(tensor: Tensor, op: Op = ..., *, async_op: Async, **options: Unpack[Scaled]) -> Handle[Tensor]: ...
@overload
def allreduce(tensor: Tensor, op: Op = ..., *, async_op: Sync = ..., **options: Unpack[Scaled]) -> Tensor: ...
@partial(disable_compile, unless=_trace_allreduce)
def allreduce(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Reduce a tensor over all ranks into a new tensor; every rank of the group calls this.

    Gradients flow through "mean" and "sum": the backward pass reduces the ranks' gradients in the same way.

    Args:
        tensor: of the same shape and dtype on every rank; any numeric dtype. Of booleans, "sum" and "max" are "or",
            "product" and "min" are "and". A sparse COO tensor gives the coalesced sum or mean.
        op: "mean" (the sum divided by the number of ranks; floating point only), "sum", "min", "max", "product", or
            "adasum" (Maleki et al., MLSys 2021; the number of ranks must be a power of two).
        name: identifies the call in errors and between ranks: asynchronous operations of different names may begin in
            another order on another rank. If None, calls are numbered.
        group: a group of new_group(), or None for all ranks.
        prescale: the tensor is multiplied by this before the reduction.
        postscale: the result is multiplied by this.
        async_op: return a handle at once; leave `tensor` unchanged until its wait(). No gradient flows.

    Returns:
        A tensor of the same shape, or with async_op=True a handle whose wait() returns it.

    Raises:
        MismatchError: the ranks passed different shapes, dtypes, ops or names; raised on every rank.
        CollectiveTimeoutError: a rank did not call this within the timeout_s of init().
        UsageError: an argument is invalid.

    Example:
        >>> dd.allreduce(torch.tensor([1.0, 2.0]), postscale=2.0)
        tensor([2., 4.])
    """
    from dualdist.collectives import collectives, fast_allreduce

    if async_op:
        return collectives.allreduce(group_or_world(group), as_tensor(tensor), op, name, prescale, postscale).start()
    return fast_allreduce.allreduce(group_or_world(group), tensor, op, name, prescale, postscale)


@overload
def allreduce_(tensor: Tensor, op: Op = ..., *, async_op: Async, **options: Unpack[Scaled]) -> Handle[Tensor]: ...
@overload
def allreduce_(tensor: Tensor, op: Op = ..., *, async_op: Sync = ..., **options: Unpack[Scaled]) -> Tensor: ...
@disable_compile
def allreduce_(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Reduce a tensor over all ranks in place; no gradient flows.

    Arguments and errors are those of allreduce(). After MismatchError the tensor is unchanged.

    Returns:
        `tensor` itself, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> tensor = torch.ones(2)
        >>> dd.allreduce_(tensor, op="sum") is tensor
        True
    """
    from dualdist.collectives import collectives, fast_allreduce

    if async_op:
        given = as_tensor(tensor)
        return collectives.allreduce(group_or_world(group), given, op, name, prescale, postscale, in_place=True).start()
    return fast_allreduce.allreduce(group_or_world(group), tensor, op, name, prescale, postscale, in_place=True)


@overload
def grouped_allreduce(
    tensors: Sequence[Tensor], op: Op = ..., *, async_op: Async, **options: Unpack[Scaled]
) -> Handle[list[Tensor]]: ...
@overload
def grouped_allreduce(
    tensors: Sequence[Tensor], op: Op = ..., *, async_op: Sync = ..., **options: Unpack[Scaled]
) -> list[Tensor]: ...
@disable_compile
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> list[torch.Tensor] | Handle[list[torch.Tensor]]:
    """Reduce several tensors over all ranks, in one message per dtype; all of them or none.

    Args:
        tensors: as many on every rank. The other arguments and the errors are those of allreduce().

    Returns:
        A list of new tensors, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> dd.grouped_allreduce([torch.ones(2), torch.tensor([3])], op="sum")
        [tensor([1., 1.]), tensor([3])]
    """
    from dualdist.collectives.collectives import allreduce

    return _call(allreduce(group_or_world(group), as_list(tensors), op, name, prescale, postscale), async_op)


@overload
def grouped_allreduce_(
    tensors: Sequence[Tensor], op: Op = ..., *, async_op: Async, **options: Unpack[Scaled]
) -> Handle[list[Tensor]]: ...
@overload
def grouped_allreduce_(
    tensors: Sequence[Tensor], op: Op = ..., *, async_op: Sync = ..., **options: Unpack[Scaled]
) -> list[Tensor]: ...
@disable_compile
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> list[torch.Tensor] | Handle[list[torch.Tensor]]:
    """Reduce several tensors over all ranks in place; no gradient flows.

    Arguments and errors are those of grouped_allreduce(). After MismatchError the tensors are unchanged.

    Returns:
        A list of `tensors`, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> tensors = [torch.ones(2), torch.zeros(1)]
        >>> dd.grouped_allreduce_(tensors)[0] is tensors[0]
        True
    """
    from dualdist.collectives.collectives import allreduce

    members = as_list(tensors)
    return _call(allreduce(group_or_world(group), members, op, name, prescale, postscale, in_place=True), async_op)


@overload
def allgather(tensor: Tensor, *, async_op: Async, **options: Unpack[Common]) -> Handle[Tensor]: ...
@overload
def allgather(tensor: Tensor, *, async_op: Sync = ..., **options: Unpack[Common]) -> Tensor: ...
@disable_compile
def allgather(
    tensor: torch.Tensor, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """Concatenate the rows of all ranks, in rank order: (n, *s) -> (sum of all n, *s).

    The backward pass returns the mean over ranks of the gradients for this rank's rows.

    Args:
        tensor: n may differ between ranks, s and the dtype may not. A tensor without dimensions counts as one row.
        name, group, async_op: as for allreduce().

    Returns:
        The same tensor on every rank, or with async_op=True a handle whose wait() returns it.

    Raises:
        MismatchError: the ranks passed different row shapes or dtypes; raised on every rank.

    Example:
        >>> dd.allgather(torch.tensor([[1, 2]]))  # (1, 2) on each of two ranks gives (2, 2) on both
        tensor([[1, 2]])
    """
    from dualdist.collectives.collectives import allgather

    return _call(allgather(group_or_world(group), as_tensor(tensor), name), async_op)


@overload
def grouped_allgather(
    tensors: Sequence[Tensor], *, async_op: Async, **options: Unpack[Common]
) -> Handle[list[Tensor]]: ...
@overload
def grouped_allgather(
    tensors: Sequence[Tensor], *, async_op: Sync = ..., **options: Unpack[Common]
) -> list[Tensor]: ...
@disable_compile
def grouped_allgather(
    tensors: Sequence[torch.Tensor], *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> list[torch.Tensor] | Handle[list[torch.Tensor]]:
    """Gather several tensors from all ranks in one message; all of them or none.

    Args:
        tensors: as many on every rank. The other arguments and the errors are those of allgather().

    Returns:
        A list of new tensors, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> dd.grouped_allgather([torch.ones(1), torch.tensor([True])])
        [tensor([1.]), tensor([True])]
    """
    from dualdist.collectives.collectives import allgather

    return _call(allgather(group_or_world(group), as_list(tensors), name), async_op)


@overload
def broadcast(tensor: Tensor, root: int = ..., *, async_op: Async, **options: Unpack[Common]) -> Handle[Tensor]: ...
@overload
def broadcast(tensor: Tensor, root: int = ..., *, async_op: Sync = ..., **options: Unpack[Common]) -> Tensor: ...
@disable_compile
def broadcast(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """Return root's tensor on every rank; every rank of the group calls this.

    The backward pass returns to root the mean over ranks of the gradients, to the others zero.

    Args:
        tensor: of the same shape and dtype on every rank.
        root: a rank of the job that is in the group.
        name, group, async_op: as for allreduce().

    Returns:
        A new tensor, or with async_op=True a handle whose wait() returns it.

    Raises:
        MismatchError: the ranks passed different shapes, dtypes or roots; raised on every rank.
        UsageError: root is not in the group.

    Example:
        >>> dd.broadcast(torch.tensor([7, 8]), root=0)
        tensor([7, 8])
    """
    from dualdist.collectives.collectives import broadcast

    return _call(broadcast(group_or_world(group), tensor, root, name), async_op)


@overload
def broadcast_(tensor: Tensor, root: int = ..., *, async_op: Async, **options: Unpack[Common]) -> Handle[Tensor]: ...
@overload
def broadcast_(tensor: Tensor, root: int = ..., *, async_op: Sync = ..., **options: Unpack[Common]) -> Tensor: ...
@disable_compile
def broadcast_(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """Copy root's tensor to every rank in place; no gradient flows.

    Arguments and errors are those of broadcast().

    Returns:
        `tensor` itself, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> tensor = torch.ones(2)
        >>> dd.broadcast_(tensor) is tensor
        True
    """
    from dualdist.collectives.collectives import broadcast

    return _call(broadcast(group_or_world(group), tensor, root, name, in_place=True), async_op)


@overload
def alltoall(tensor: Tensor, splits: None = ..., *, async_op: Async, **options: Unpack[Common]) -> Handle[Tensor]: ...
@overload
def alltoall(tensor: Tensor, splits: None = ..., *, async_op: Sync = ..., **options: Unpack[Common]) -> Tensor: ...
@overload
def alltoall(
    tensor: Tensor, splits: Splits, *, async_op: Async, **options: Unpack[Common]
) -> Handle[tuple[Tensor, Tensor]]: ...
@overload
def alltoall(
    tensor: Tensor, splits: Splits, *, async_op: Sync = ..., **options: Unpack[Common]
) -> tuple[Tensor, Tensor]: ...
@disable_compile
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Any:
    """Send rows to each rank and return the rows that came, in rank order: (n, *s) -> (m, *s).

    The backward pass returns gradients to where the rows came from.

    Args:
        tensor: s and the dtype are the same on every rank.
        splits: the next splits[i] rows of `tensor` go to rank i. If None, equal parts.
        name, group, async_op: as for allreduce().

    Returns:
        The received rows; with `splits` a pair of the rows and of how many came from each rank, (size,). With
        async_op=True a handle whose wait() returns that.

    Raises:
        MismatchError: the ranks passed different row shapes or dtypes; raised on every rank.
        UsageError: `splits` do not add up to n, or without splits n is not divisible by the size.

    Example:
        >>> dd.alltoall(torch.arange(4))  # of two ranks each keeps two and sends two
        tensor([0, 1, 2, 3])
    """
    from dualdist.collectives.collectives import alltoall

    collective = alltoall(group_or_world(group), tensor, splits, name)
    return _call(collective.map(lambda pair: pair[0]) if splits is None else collective, async_op)


@overload
def reducescatter(tensor: Tensor, op: Op = ..., *, async_op: Async, **options: Unpack[Scaled]) -> Handle[Tensor]: ...
@overload
def reducescatter(tensor: Tensor, op: Op = ..., *, async_op: Sync = ..., **options: Unpack[Scaled]) -> Tensor: ...
@disable_compile
def reducescatter(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Reduce a tensor over all ranks and return this rank's share of the rows: (n, *s) -> (n/size, *s).

    The first ranks get one row more if n is not divisible by the size. The backward pass returns the gradients of all
    shares; with "sum" times the number of ranks, as Horovod does.

    Args:
        tensor: of the same shape, with at least one dimension, and dtype on every rank.
        op, name, group, prescale, postscale, async_op: as for allreduce(), without "adasum".

    Returns:
        A new tensor, or with async_op=True a handle whose wait() returns it.

    Raises:
        MismatchError: the ranks passed different shapes, dtypes or ops; raised on every rank.

    Example:
        >>> dd.reducescatter(torch.ones(3, 1), op="sum")  # of two ranks the first gets two rows
        tensor([[1.],
                [1.],
                [1.]])
    """
    from dualdist.collectives.collectives import reducescatter

    return _call(reducescatter(group_or_world(group), as_tensor(tensor), op, name, prescale, postscale), async_op)


@overload
def grouped_reducescatter(
    tensors: Sequence[Tensor], op: Op = ..., *, async_op: Async, **options: Unpack[Scaled]
) -> Handle[list[Tensor]]: ...
@overload
def grouped_reducescatter(
    tensors: Sequence[Tensor], op: Op = ..., *, async_op: Sync = ..., **options: Unpack[Scaled]
) -> list[Tensor]: ...
@disable_compile
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> list[torch.Tensor] | Handle[list[torch.Tensor]]:
    """Reduce several tensors and return this rank's share of the rows of each; all of them or none.

    Args:
        tensors: as many on every rank. The other arguments and the errors are those of reducescatter().

    Returns:
        A list of new tensors, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> dd.grouped_reducescatter([torch.ones(1), torch.zeros(1)])
        [tensor([1.]), tensor([0.])]
    """
    from dualdist.collectives.collectives import reducescatter

    return _call(reducescatter(group_or_world(group), as_list(tensors), op, name, prescale, postscale), async_op)


@overload
def scatter(
    tensor: Tensor | None, root: int = ..., splits: Splits | None = ..., *, async_op: Async, **options: Unpack[Common]
) -> Handle[Tensor]: ...
@overload
def scatter(
    tensor: Tensor | None,
    root: int = ...,
    splits: Splits | None = ...,
    *,
    async_op: Sync = ...,
    **options: Unpack[Common],
) -> Tensor: ...
@disable_compile
def scatter(
    tensor: torch.Tensor | None,
    root: int = 0,
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Give each rank its share of the rows of root's tensor: root's (n, *s) -> (n/size, *s).

    The backward pass returns the gradients of all rows to root if its tensor requires one; then every rank must run it.

    Args:
        tensor: root's tensor; ignored on the other ranks, where None will do.
        root: a rank of the job that is in the group.
        splits: the next splits[i] rows go to rank i; ignored on ranks other than root. If None, even shares, of which
            the first ranks get one row more if n is not divisible by the size.
        name, group, async_op: as for allreduce().

    Returns:
        This rank's rows, of root's dtype and device type, or with async_op=True a handle whose wait() returns them.

    Raises:
        UsageError: root's tensor or splits are invalid; raised on every rank.

    Example:
        >>> dd.scatter(torch.arange(3) if dd.rank() == 0 else None)
        tensor([0, 1, 2])
    """
    from dualdist.collectives.collectives import scatter

    return _call(scatter(group_or_world(group), tensor, root, splits, name), async_op)


@overload
def gather(tensor: Tensor, root: int = ..., *, async_op: Async, **options: Unpack[Common]) -> Handle[Tensor]: ...
@overload
def gather(tensor: Tensor, root: int = ..., *, async_op: Sync = ..., **options: Unpack[Common]) -> Tensor: ...
@disable_compile
def gather(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """Concatenate the rows of all ranks on root, in rank order: (n, *s) -> (sum of all n, *s).

    The backward pass returns root's gradients to where the rows came from if some rank's tensor requires one. Every
    rank must then run it: the others, for instance, that of the sum of their empty result.

    Args:
        tensor: n may differ between ranks, s and the dtype may not. A tensor without dimensions counts as one row.
        root: a rank of the job that is in the group.
        name, group, async_op: as for allreduce().

    Returns:
        On root all rows, on the other ranks none, (0, *s); or with async_op=True a handle whose wait() returns them.

    Raises:
        MismatchError: the ranks passed different row shapes, dtypes or roots; raised on every rank.

    Example:
        >>> dd.gather(torch.tensor([dd.rank()]))
        tensor([0])
    """
    from dualdist.collectives.collectives import gather

    return _call(gather(group_or_world(group), tensor, root, name), async_op)
