"""scatter and gather as a training script calls them: each finds the open session and hands over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from dualdist.collectives.compile import uncompiled
from dualdist.session import group_or_world as _group

if TYPE_CHECKING:
    import torch

    from dualdist.collectives.group import Group
    from dualdist.collectives.work import Handle


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
@uncompiled
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
@uncompiled
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
