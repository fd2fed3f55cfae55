"""The operations on tensors that a training script calls: each finds the open session and hands over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from dualdist.collectives.arguments import as_list
from dualdist.collectives.compile import disable_compile
from dualdist.session import current
from dualdist.session import group_or_world as _group

if TYPE_CHECKING:
    import torch

    from dualdist.collectives.group import Group
    from dualdist.collectives.reductions import Op
    from dualdist.collectives.work import Handle

T = TypeVar("T")


def _traced_allreduce(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> torch.Tensor | None:
    """What torch.compile follows in place of allreduce, if it can."""
    from dualdist import traced_operations
    from dualdist.collectives.reductions import is_traceable

    if async_op or not is_traceable(_group(group).backend, tensor, op):
        return None
    place = traced_operations.WORLD if group is None or group is current().world else current().groups.index(group)
    found: torch.Tensor = traced_operations.allreduce(tensor, op, name or "", place, float(prescale), float(postscale))
    return found


@overload
def allreduce(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def allreduce(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[torch.Tensor]: ...
@partial(disable_compile, unless=_traced_allreduce)
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
    """A new tensor with the reduction of each element over all ranks; every rank passes the same shape and dtype.

    `op` is "mean" (the sum, then divided by the number of ranks; floating point only), "sum", "min", "max", "product",
    or "adasum" (Maleki et al., MLSys 2021; the number of ranks is a power of two). Any dtype of numbers will do; of
    booleans "sum" and "max" are "or", "product" and "min" are "and". The tensor is multiplied by `prescale` before, the
    result by `postscale` after. A sparse COO tensor gives the coalesced sum or mean.

    With async_op=True returns a Handle at once, whose wait() gives the tensor; the caller leaves `tensor` alone until
    then. Operations of other names may come in between, on each rank in another order. Else gradients flow back
    through "mean" and "sum": the same reduction of the ranks' gradients.

    MismatchError on every rank where shapes, dtypes, operations or names differ.

    >>> dd.allreduce(torch.tensor([1.0, 2.0]), postscale=2.0)
    tensor([2., 4.])
    """
    from dualdist.collectives import autograd, collectives, fast_allreduce

    if async_op:
        return collectives.allreduce(_group(group), tensor, op, name, prescale, postscale).begin()
    if autograd.wants_gradient([tensor]):
        return autograd.allreduce(_group(group), tensor, op, name, prescale, postscale)
    return fast_allreduce.allreduce(_group(group), tensor, op, name, prescale, postscale)


@overload
def allreduce_(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def allreduce_(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[torch.Tensor]: ...
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
    """allreduce in place: `tensor` itself holds the reduction afterwards, and is returned; no gradient flows.

    Arguments and errors as allreduce's; after MismatchError the tensor is as it was.

    >>> tensor = torch.ones(2)
    >>> dd.allreduce_(tensor, op="sum") is tensor
    True
    """
    from dualdist.collectives import collectives, fast_allreduce

    if async_op:
        return collectives.allreduce_(_group(group), tensor, op, name, prescale, postscale).begin()
    return fast_allreduce.allreduce(_group(group), tensor, op, name, prescale, postscale, in_place=True)


@overload
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> list[torch.Tensor]: ...
@overload
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[list[torch.Tensor]]: ...
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
    """allreduce of each tensor, all of them or none, in one message for each dtype.

    Every rank passes the same number of tensors. Arguments and errors as allreduce's.

    >>> dd.grouped_allreduce([torch.ones(2), torch.tensor([3])], op="sum")
    [tensor([1., 1.]), tensor([3])]
    """
    from dualdist.collectives import autograd, collectives

    tensors = as_list(tensors)
    if not async_op and autograd.wants_gradient(tensors):
        return autograd.grouped_allreduce(_group(group), tensors, op, name, prescale, postscale)
    return _now_or_later(collectives.grouped_allreduce(_group(group), tensors, op, name, prescale, postscale), async_op)


@overload
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> list[torch.Tensor]: ...
@overload
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[list[torch.Tensor]]: ...
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
    """grouped_allreduce in place: the tensors themselves hold the reductions afterwards; no gradient flows.

    Arguments and errors as allreduce's; after MismatchError the tensors are as they were.

    >>> tensors = [torch.ones(2), torch.zeros(1)]
    >>> dd.grouped_allreduce_(tensors)[0] is tensors[0]
    True
    """
    from dualdist.collectives import collectives

    return _now_or_later(
        collectives.grouped_allreduce_(_group(group), as_list(tensors), op, name, prescale, postscale), async_op
    )


@overload
def allgather(
    tensor: torch.Tensor, *, name: str | None = None, group: Group | None = None, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def allgather(
    tensor: torch.Tensor, *, name: str | None = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
@disable_compile
def allgather(
    tensor: torch.Tensor, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """Everybody's rows in rank order: (n, *s) -> (sum of all n, *s). n may differ between ranks, s and dtype may not.

    A tensor without dimensions counts as one row. Back flows the mean over ranks of the gradients for this rank's rows.
    MismatchError on every rank where the shapes do not fit.

    >>> dd.allgather(torch.tensor([[1, 2]]))  # (1, 2) on each of two ranks gives (2, 2) on both
    tensor([[1, 2]])
    """
    from dualdist.collectives import autograd, collectives

    if not async_op and autograd.wants_gradient([tensor]):
        return autograd.allgather(_group(group), tensor, name)
    return _now_or_later(collectives.allgather(_group(group), tensor, name), async_op)


@overload
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> list[torch.Tensor]: ...
@overload
def grouped_allgather(
    tensors: Sequence[torch.Tensor], *, name: str | None = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[list[torch.Tensor]]: ...
@disable_compile
def grouped_allgather(
    tensors: Sequence[torch.Tensor], *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> list[torch.Tensor] | Handle[list[torch.Tensor]]:
    """allgather of each tensor, all of them or none, in one message.

    Every rank passes the same number of tensors. MismatchError on every rank where they do not fit.

    >>> dd.grouped_allgather([torch.ones(1), torch.tensor([True])])
    [tensor([1.]), tensor([True])]
    """
    from dualdist.collectives import autograd, collectives

    tensors = as_list(tensors)
    if not async_op and autograd.wants_gradient(tensors):
        return autograd.grouped_allgather(_group(group), tensors, name)
    return _now_or_later(collectives.grouped_allgather(_group(group), tensors, name), async_op)


@overload
def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def broadcast(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
@disable_compile
def broadcast(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """A new tensor with root's values; every rank passes the same shape and dtype. `root` is a rank of the job.

    Back flows to root the mean over ranks of the gradients, to the others zero. MismatchError on every rank where
    shapes, dtypes or roots differ; UsageError where root is no rank of the group.

    >>> dd.broadcast(torch.tensor([7, 8]), root=0)
    tensor([7, 8])
    """
    from dualdist.collectives import autograd, collectives

    if not async_op and autograd.wants_gradient([tensor]):
        return autograd.broadcast(_group(group), tensor, root, name)
    return _now_or_later(collectives.broadcast(_group(group), tensor, root, name), async_op)


@overload
def broadcast_(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def broadcast_(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
@disable_compile
def broadcast_(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """broadcast in place: `tensor` itself holds root's values afterwards, and is returned; no gradient flows.

    Arguments and errors as broadcast's.

    >>> tensor = torch.ones(2)
    >>> dd.broadcast_(tensor) is tensor
    True
    """
    from dualdist.collectives import collectives

    return _now_or_later(collectives.broadcast_(_group(group), tensor, root, name), async_op)


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[True],
) -> Handle[torch.Tensor]: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[True],
) -> Handle[tuple[torch.Tensor, torch.Tensor]]: ...
@disable_compile
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Any:
    """The rows that the ranks sent here, in rank order; with splits also how many came from each: (n, *s) -> (m, *s).

    Of the tensor's rows, the next splits[i] go to rank i; without splits, equal parts. With splits the result is a pair
    of the rows and of their numbers (size,). Gradients flow back to where the rows came from.

    MismatchError on every rank where dtypes or shapes of a row differ; UsageError where splits do not add up to the
    rows, or without splits the rows do not divide.

    >>> dd.alltoall(torch.arange(4))  # of two ranks each keeps two and sends two
    tensor([0, 1, 2, 3])
    """
    from dualdist.collectives import autograd, collectives

    if not async_op and autograd.wants_gradient([tensor]):
        found = autograd.alltoall(_group(group), tensor, splits, name)
        return found[0] if splits is None else found
    if splits is None:
        return _now_or_later(collectives.alltoall_evenly(_group(group), tensor, name), async_op)
    return _now_or_later(collectives.alltoall(_group(group), tensor, splits, name), async_op)


@overload
def reducescatter(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def reducescatter(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[torch.Tensor]: ...
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
    """This rank's share of the rows of the reduction: (n, *s) -> (n/size, *s), the first ranks take the remainder.

    Every rank passes the same shape and dtype. `op`, `prescale`, `postscale` and the errors are those of allreduce.
    Back flow the gradients of all shares; with "sum", times the number of ranks, as Horovod does.

    >>> dd.reducescatter(torch.ones(3, 1), op="sum")  # of two ranks the first gets two rows
    tensor([[1.],
            [1.],
            [1.]])
    """
    from dualdist.collectives import autograd, collectives

    if not async_op and autograd.wants_gradient([tensor]):
        return autograd.reducescatter(_group(group), tensor, op, name, prescale, postscale)
    return _now_or_later(collectives.reducescatter(_group(group), tensor, op, name, prescale, postscale), async_op)


@overload
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> list[torch.Tensor]: ...
@overload
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[list[torch.Tensor]]: ...
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
    """reducescatter of each tensor, all of them or none.

    Every rank passes the same number of tensors. Arguments and errors as reducescatter's.

    >>> dd.grouped_reducescatter([torch.ones(1), torch.zeros(1)])
    [tensor([1.]), tensor([0.])]
    """
    from dualdist.collectives import autograd, collectives

    tensors = as_list(tensors)
    if not async_op and autograd.wants_gradient(tensors):
        return autograd.grouped_reducescatter(_group(group), tensors, op, name, prescale, postscale)
    return _now_or_later(
        collectives.grouped_reducescatter(_group(group), tensors, op, name, prescale, postscale),
        async_op,
    )


def _now_or_later(handle: Handle[T], async_op: bool) -> T | Handle[T]:
    return handle.begin() if async_op else handle.wait()


@overload
def scatter(
    tensor: torch.Tensor | None,
    root: int = 0,
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def scatter(
    tensor: torch.Tensor | None,
    root: int = 0,
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[True],
) -> Handle[torch.Tensor]: ...
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
    """The rows of root's tensor that are for this rank: root's (n, *s) -> (n/size, *s), the first ranks take the rest.

    What the other ranks pass as `tensor` and `splits` does not count: None will do. With splits the next splits[i] rows
    go to rank i. dtype, device and *s are root's. To root flow back the gradients of all rows, if its tensor wants one;
    every rank must then run the backward. UsageError on every rank where root's tensor or splits will not do.

    >>> dd.scatter(torch.arange(3) if dd.rank() == 0 else None)
    tensor([0, 1, 2])
    """
    from dualdist.collectives import gather_scatter

    if async_op:
        return gather_scatter.scatter(_group(group), tensor, root, splits, name).begin()
    return gather_scatter.scatter_through(_group(group), tensor, root, splits, name)


@overload
def gather(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def gather(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
@disable_compile
def gather(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """On root everybody's rows in rank order, (n, *s) -> (sum of all n, *s); on the other ranks no rows, (0, *s).

    n may differ between ranks, s and dtype may not. A tensor without dimensions counts as one row. Root's gradients
    flow back to where the rows came from, if some rank's tensor wants one; every rank must then run the backward, the
    others for instance that of their result's sum. MismatchError on every rank where the shapes do not fit.

    >>> dd.gather(torch.tensor([dd.rank()]))
    tensor([0])
    """
    from dualdist.collectives import gather_scatter

    if async_op:
        return gather_scatter.gather(_group(group), tensor, root, name).begin()
    return gather_scatter.gather_through(_group(group), tensor, root, name)
