"""Collectives of tensors; each runs its description in collectives/collectives.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, cast, overload

from torch import Tensor
from typing_extensions import Unpack

from dualdist.backends.arithmetic import Op
from dualdist.collectives import collectives, fast_allreduce, traced_allreduce
from dualdist.collectives.arguments import Reduction, as_list, as_tensor
from dualdist.collectives.dynamo import disable_compile
from dualdist.collectives.group import Group
from dualdist.collectives.handle import Collective, Handle
from dualdist.session import find_group, group_or_world

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Counts: TypeAlias = Sequence[int] | Tensor
Splits: TypeAlias = Counts | None
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
    reduction: Reduction | None


_allreduce_operator: Callable[..., Tensor]


def __getattr__(name: str) -> Any:
    """Define the operator of allreduce when something is compiled, because that takes milliseconds."""
    if name != "_allreduce_operator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = operator = traced_allreduce.define_allreduce("dualdist::allreduce", find_group)
    return operator


def _call(collective: Collective[T], async_op: bool) -> T | Handle[T]:
    return collective.start() if async_op else collective.run()


def _reduction(op: Op, *, group: Group | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of the description of a reduction, without the tensors."""
    return {"group": group_or_world(group), "op": op, **options}


def _like(model: F) -> Callable[[Callable[..., Any]], F]:
    """Give a function the signature of `model`, for type checkers and help(); torch.compile does not trace it."""

    def decorate(function: Callable[..., Any]) -> F:
        call: Any = disable_compile(function)
        call.__signature__ = inspect.signature(model)
        return cast(F, call)

    return decorate


def _trace_allreduce(
    tensor: Tensor, op: Op = "mean", *, group: Group | None = None, async_op: bool = False, **options: Any
) -> Tensor | None:
    """Trace an allreduce for torch.compile; return None if it cannot follow."""
    from dualdist.operations.tensors import _allreduce_operator  # torch.compile runs an import while it traces

    if async_op:
        return None
    return traced_allreduce.trace(_allreduce_operator, group_or_world(group), tensor, op, **options)


@overload
def allreduce(tensor: Tensor, op: Op = ..., *, async_op: Async, **options: Unpack[Scaled]) -> Handle[Tensor]: ...
@overload
def allreduce(tensor: Tensor, op: Op = ..., *, async_op: Sync = ..., **options: Unpack[Scaled]) -> Tensor: ...
@partial(disable_compile, unless=_trace_allreduce)
def allreduce(
    tensor: Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    reduction: Reduction | None = None,
    async_op: bool = False,
) -> Tensor | Handle[Tensor]:
    """Reduce a tensor over all ranks into a new tensor; every rank of the group calls this.

    Gradients flow through "mean" and "sum": the backward pass reduces the ranks' gradients in the same way.

    Args:
        tensor: has the same shape and dtype on every rank; any numeric dtype. For booleans, "sum" and "max" are
            "or", "product" and "min" are "and". A sparse COO tensor gives the coalesced sum or mean.
        op: "mean" (the sum divided by the number of ranks; floating point only), "sum", "min", "max", "product", or
            "adasum" (Maleki et al., MLSys 2021; the number of ranks must be a power of two).
        name: identifies the call in errors and between ranks: asynchronous operations of different names may begin in
            another order on another rank. If None, calls are numbered.
        group: a group of new_group(), or None for all ranks.
        prescale: the tensor is multiplied by this before the reduction.
        postscale: the result is multiplied by this.
        reduction: "ordered" adds in the order of ranks, element by element: the result has the same bits on every
            backend, transport and number of hosts. Numbers below 32 bits are added in float32 and rounded once.
            "unordered" adds as the transport does. If None, DUALDIST_REDUCTION, else "unordered".
        async_op: return a handle at once; leave `tensor` unchanged until its wait(). No gradient flows.

    Returns:
        A tensor of the same shape, or with async_op=True a handle whose wait() returns it.

    Raises:
        MismatchError: the ranks passed different shapes, dtypes, ops, names or reductions; raised on every rank.
        CollectiveTimeoutError: a rank did not call this within the timeout_s of init().
        UsageError: an argument is invalid, or "adasum" was to be "ordered".

    Example:
        >>> dd.allreduce(torch.tensor([1.0, 2.0]), postscale=2.0)
        tensor([2., 4.])
    """
    scales, members = (prescale, postscale), group_or_world(group)
    if async_op:
        return collectives.allreduce(members, as_tensor(tensor), op, name, *scales, reduction=reduction).start()
    return fast_allreduce.allreduce(members, tensor, op, name, *scales, reduction=reduction)


@_like(allreduce)
def allreduce_(tensor: Tensor, op: Op = "mean", *, async_op: bool = False, **options: Any) -> Any:
    """Reduce a tensor over all ranks in place; no gradient flows.

    Arguments and errors are those of allreduce(). After MismatchError the tensor is unchanged.

    Returns:
        `tensor` itself, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> tensor = torch.ones(2)
        >>> dd.allreduce_(tensor, op="sum") is tensor
        True
    """
    group = group_or_world(options.pop("group", None))
    if async_op:
        return collectives.allreduce(group, as_tensor(tensor), op, in_place=True, **options).start()
    return fast_allreduce.allreduce(group, tensor, op, in_place=True, **options)


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
    tensors: Sequence[Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    reduction: Reduction | None = None,
    async_op: bool = False,
) -> list[Tensor] | Handle[list[Tensor]]:
    """Reduce several tensors over all ranks, in one message per dtype; all of them or none.

    Args:
        tensors: the same number on every rank. The other arguments and the errors are those of allreduce().

    Returns:
        A list of new tensors, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> dd.grouped_allreduce([torch.ones(2), torch.tensor([3])], op="sum")
        [tensor([1., 1.]), tensor([3])]
    """
    scales = prescale, postscale
    collective = collectives.allreduce(group_or_world(group), as_list(tensors), op, name, *scales, reduction=reduction)
    return _call(collective, async_op)


@_like(grouped_allreduce)
def grouped_allreduce_(tensors: Sequence[Tensor], op: Op = "mean", *, async_op: bool = False, **options: Any) -> Any:
    """Reduce several tensors over all ranks in place; no gradient flows.

    Arguments and errors are those of grouped_allreduce(). After MismatchError the tensors are unchanged.

    Returns:
        A list of `tensors`, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> tensors = [torch.ones(2), torch.zeros(1)]
        >>> dd.grouped_allreduce_(tensors)[0] is tensors[0]
        True
    """
    arguments = _reduction(op, **options)
    return _call(collectives.allreduce(tensors=as_list(tensors), in_place=True, **arguments), async_op)


@overload
def allgather(tensor: Tensor, *, async_op: Async, **options: Unpack[Common]) -> Handle[Tensor]: ...
@overload
def allgather(tensor: Tensor, *, async_op: Sync = ..., **options: Unpack[Common]) -> Tensor: ...
@disable_compile
def allgather(
    tensor: Tensor, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> Tensor | Handle[Tensor]:
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
    return _call(collectives.allgather(group_or_world(group), as_tensor(tensor), name), async_op)


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
    tensors: Sequence[Tensor], *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> list[Tensor] | Handle[list[Tensor]]:
    """Gather several tensors from all ranks in one message; all of them or none.

    Args:
        tensors: the same number on every rank. The other arguments and the errors are those of allgather().

    Returns:
        A list of new tensors, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> dd.grouped_allgather([torch.ones(1), torch.tensor([True])])
        [tensor([1.]), tensor([True])]
    """
    return _call(collectives.allgather(group_or_world(group), as_list(tensors), name), async_op)


@overload
def broadcast(tensor: Tensor, root: int = ..., *, async_op: Async, **options: Unpack[Common]) -> Handle[Tensor]: ...
@overload
def broadcast(tensor: Tensor, root: int = ..., *, async_op: Sync = ..., **options: Unpack[Common]) -> Tensor: ...
@disable_compile
def broadcast(
    tensor: Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> Tensor | Handle[Tensor]:
    """Return root's tensor on every rank; every rank of the group calls this.

    The backward pass returns to root the mean over ranks of the gradients, to the others zero.

    Args:
        tensor: has the same shape and dtype on every rank.
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
    return _call(collectives.broadcast(group_or_world(group), tensor, root, name), async_op)


@_like(broadcast)
def broadcast_(
    tensor: Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> Any:
    """Copy root's tensor to every rank in place; no gradient flows.

    Arguments and errors are those of broadcast().

    Returns:
        `tensor` itself, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> tensor = torch.ones(2)
        >>> dd.broadcast_(tensor) is tensor
        True
    """
    return _call(collectives.broadcast(group_or_world(group), tensor, root, name, in_place=True), async_op)


@overload
def alltoall(tensor: Tensor, splits: None = ..., *, async_op: Async, **options: Unpack[Common]) -> Handle[Tensor]: ...
@overload
def alltoall(tensor: Tensor, splits: None = ..., *, async_op: Sync = ..., **options: Unpack[Common]) -> Tensor: ...
@overload
def alltoall(
    tensor: Tensor, splits: Counts, *, async_op: Async, **options: Unpack[Common]
) -> Handle[tuple[Tensor, Tensor]]: ...
@overload
def alltoall(
    tensor: Tensor, splits: Counts, *, async_op: Sync = ..., **options: Unpack[Common]
) -> tuple[Tensor, Tensor]: ...
@disable_compile
def alltoall(
    tensor: Tensor,
    splits: Splits = None,
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
    collective = collectives.alltoall(group_or_world(group), tensor, splits, name)
    return _call(collective.map(lambda pair: pair[0]) if splits is None else collective, async_op)


@_like(allreduce)
def reducescatter(tensor: Tensor, op: Op = "mean", *, async_op: bool = False, **options: Any) -> Any:
    """Reduce a tensor over all ranks and return this rank's share of the rows: (n, *s) -> (n/size, *s).

    The first ranks get one row more if n is not divisible by the size. The backward pass returns the gradients of all
    shares; with "sum" times the number of ranks, as Horovod does.

    Args:
        tensor: has the same dtype and shape, of at least one dimension, on every rank.
        op, name, group, prescale, postscale, async_op: as for allreduce(), without "adasum".
        reduction: rows are added in rank order in any case; an "ordered" mean of numbers below 32 bits is rounded once,
            after the division.

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
    return _call(collectives.reducescatter(tensors=as_tensor(tensor), **_reduction(op, **options)), async_op)


@_like(grouped_allreduce)
def grouped_reducescatter(tensors: Sequence[Tensor], op: Op = "mean", *, async_op: bool = False, **options: Any) -> Any:
    """Reduce several tensors and return this rank's share of the rows of each; all of them or none.

    Args:
        tensors: the same number on every rank. The other arguments and the errors are those of reducescatter().

    Returns:
        A list of new tensors, or with async_op=True a handle whose wait() returns it.

    Example:
        >>> dd.grouped_reducescatter([torch.ones(1), torch.zeros(1)])
        [tensor([1.]), tensor([0.])]
    """
    return _call(collectives.reducescatter(tensors=as_list(tensors), **_reduction(op, **options)), async_op)


@overload
def scatter(
    tensor: Tensor | None, root: int = ..., splits: Splits = ..., *, async_op: Async, **options: Unpack[Common]
) -> Handle[Tensor]: ...
@overload
def scatter(
    tensor: Tensor | None, root: int = ..., splits: Splits = ..., *, async_op: Sync = ..., **options: Unpack[Common]
) -> Tensor: ...
@disable_compile
def scatter(
    tensor: Tensor | None,
    root: int = 0,
    splits: Splits = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Tensor | Handle[Tensor]:
    """Give each rank its share of the rows of root's tensor: root's (n, *s) -> (n/size, *s).

    The backward pass returns the gradients of all rows to root if its tensor requires one; then every rank must run it.

    Args:
        tensor: root's tensor; ignored on the other ranks, where None will do.
        root: a rank of the job that is in the group.
        splits: the next splits[i] rows go to rank i; ignored on ranks other than root. If None, even shares;
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
    return _call(collectives.scatter(group_or_world(group), tensor, root, splits, name), async_op)


@_like(broadcast)
def gather(
    tensor: Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> Any:
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
    return _call(collectives.gather(group_or_world(group), tensor, root, name), async_op)
