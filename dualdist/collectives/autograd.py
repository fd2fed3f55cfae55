"""The collectives with gradients through them, as Horovod defines these: what a rank gets back for what it gave.

Horovod takes the mean over ranks where a mathematician takes the sum (allgather, broadcast): losses are mostly means
over the whole batch, so that gradients keep the size they have in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dualdist.collectives import collectives
from dualdist.collectives.arguments import name_of, root_of
from dualdist.collectives.group import Group
from dualdist.collectives.reductions import Op, scale_
from dualdist.errors import UnsupportedError

Backward = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class AwaitedResult(Protocol):
    """Something under way, or that has arrived."""

    def wait(self) -> Any:
        """A tensor, or several."""


def wants_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd follows any of the tensors now."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def with_gradient(
    tensors: Sequence[torch.Tensor], forward: Callable[[Sequence[torch.Tensor]], AwaitedResult], backward: Backward
) -> Any:
    """forward's result, several as a tuple, through which gradients flow back.

    `backward` turns the gradients of the results into those of the tensors, both without what has none: integers and
    booleans. It runs on every rank, whatever that rank's tensors want, so it leaves out nothing but by dtype; and where
    second derivatives are wanted autograd follows it.
    """
    return _Through.apply(forward, backward, *tensors)  # type: ignore[no-untyped-call]


class _Through(torch.autograd.Function):
    """An operation between ranks, given by two functions."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: torch.Tensor) -> Any:
        ctx.backward_of = backward
        ctx.takes = [_has_gradient(tensor) for tensor in tensors]
        ctx.set_materialize_grads(True)
        result = forward([tensor.detach() for tensor in tensors]).wait()
        results = [result] if isinstance(result, torch.Tensor) else result
        ctx.gives = [_has_gradient(tensor) for tensor in results]
        ctx.mark_non_differentiable(*(tensor for tensor in results if not _has_gradient(tensor)))
        return result if isinstance(result, torch.Tensor) else tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given = [gradient.contiguous() for gradient, is_one in zip(gradients, ctx.gives, strict=True) if is_one]
        back = iter(ctx.backward_of(given))
        return (None, None, *(next(back) if takes else None for takes in ctx.takes))


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _linear(op: Op) -> None:
    if op not in ("mean", "sum"):
        raise UnsupportedError(f"no gradient flows through a reduction by {op!r}: use 'mean' or 'sum', or detach()")


def allreduce(
    group: Group, tensor: torch.Tensor, op: Op, name: str | None, prescale: float, postscale: float
) -> torch.Tensor:
    """Back flows the same reduction of the ranks' gradients."""
    name = name_of(group, "sparse_allreduce" if tensor.is_sparse else "allreduce", name)

    def backward(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        _linear(op)
        return [allreduce(group, gradients[0], op, back_of(name), prescale, postscale)]

    found: torch.Tensor = with_gradient(
        [tensor], lambda given: collectives.allreduce(group, given[0], op, name, prescale, postscale), backward
    )
    return found


def grouped_allreduce(
    group: Group, tensors: Sequence[torch.Tensor], op: Op, name: str | None, prescale: float, postscale: float
) -> list[torch.Tensor]:
    """Back flows the same reduction of the ranks' gradients."""
    name = name_of(group, "grouped_allreduce", name)

    def backward(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        _linear(op)
        return grouped_allreduce(group, gradients, op, back_of(name), prescale, postscale)

    return list(
        with_gradient(
            tensors, lambda given: collectives.grouped_allreduce(group, given, op, name, prescale, postscale), backward
        )
    )


def allgather(group: Group, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    """Back flows the mean over ranks of the gradients for this rank's rows."""
    name = name_of(group, "allgather", name)
    shapes = [tensor.shape]
    found: torch.Tensor = with_gradient(
        [tensor],
        lambda given: collectives.allgather(group, given[0], name),
        lambda gradients: _own_rows(group, gradients, shapes, back_of(name)),
    )
    return found


def grouped_allgather(group: Group, tensors: Sequence[torch.Tensor], name: str | None) -> list[torch.Tensor]:
    """Back flows the mean over ranks of the gradients for this rank's rows."""
    name = name_of(group, "grouped_allgather", name)
    shapes = [tensor.shape for tensor in tensors if _has_gradient(tensor)]
    return list(
        with_gradient(
            tensors,
            lambda given: collectives.grouped_allgather(group, given, name),
            lambda gradients: _own_rows(group, gradients, shapes, back_of(name)),
        )
    )


def _own_rows(
    group: Group, gradients: Sequence[torch.Tensor], shapes: Sequence[torch.Size], name: str
) -> list[torch.Tensor]:
    means = grouped_allreduce(group, gradients, "mean", name, 1.0, 1.0)
    counts = [shape[0] if shape else 1 for shape in shapes]
    table = collectives.allgather(group, torch.tensor([counts], device="cpu"), f"{name}.rows").wait()
    starts = table[: group.rank].sum(0).tolist()
    return [
        mean[start : start + count].reshape(shape)
        for mean, start, count, shape in zip(means, starts, counts, shapes, strict=True)
    ]


def broadcast(group: Group, tensor: torch.Tensor, root: int, name: str | None) -> torch.Tensor:
    """Back flows to root the mean over ranks, to the others zero."""
    root, _ = root_of(group, root)
    name = name_of(group, "broadcast", name)

    def backward(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        mean = allreduce(group, gradients[0], "mean", back_of(name), 1.0, 1.0)
        # Zeros that depend on the mean: second derivatives ask all ranks for theirs.
        return [
            mean if group.ranks[group.rank] == root else mean.masked_fill(torch.ones_like(mean, dtype=torch.bool), 0)
        ]

    found: torch.Tensor = with_gradient(
        [tensor], lambda given: collectives.broadcast(group, given[0], root, name), backward
    )
    return found


def alltoall(
    group: Group, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, name: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Back flow the gradients to where the rows came from."""
    name = name_of(group, "alltoall", name)
    rows, received = with_gradient(
        [tensor],
        lambda given: collectives.alltoall(group, given[0], splits, name),
        lambda gradients: [alltoall(group, gradients[0], received, back_of(name))[0]],
    )
    return rows, received


def reducescatter(
    group: Group, tensor: torch.Tensor, op: Op, name: str | None, prescale: float, postscale: float
) -> torch.Tensor:
    """Back flow the gradients of all shares, as many times as there are ranks where the operation is a sum."""
    name = name_of(group, "reducescatter", name)
    found: torch.Tensor = with_gradient(
        [tensor],
        lambda given: collectives.reducescatter(group, given[0], op, name, prescale, postscale),
        lambda gradients: _all_shares(group, gradients, op, prescale * postscale, back_of(name)),
    )
    return found


def grouped_reducescatter(
    group: Group, tensors: Sequence[torch.Tensor], op: Op, name: str | None, prescale: float, postscale: float
) -> list[torch.Tensor]:
    """Back flow the gradients of all shares, as many times as there are ranks where the operation is a sum."""
    name = name_of(group, "grouped_reducescatter", name)
    return list(
        with_gradient(
            tensors,
            lambda given: collectives.grouped_reducescatter(group, given, op, name, prescale, postscale),
            lambda gradients: _all_shares(group, gradients, op, prescale * postscale, back_of(name)),
        )
    )


def _all_shares(
    group: Group, gradients: Sequence[torch.Tensor], op: Op, factor: float, name: str
) -> list[torch.Tensor]:
    _linear(op)
    factor *= group.size if op == "sum" else 1
    scaled = [scale_(gradient.clone(), factor) for gradient in gradients]
    return grouped_allgather(group, scaled, name)


def back_of(name: str) -> str:
    """For what flows back through an operation; it takes no number, for ranks that want no gradient do not begin it."""
    return f"{name}.backward"
