"""The collectives with gradients through them, as Horovod defines these: what a rank gets back for what it gave.

Horovod takes the mean over ranks where a mathematician takes the sum (allgather, broadcast): losses are mostly means
over the whole batch, so that gradients keep the size they have in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dualdist import collectives
from dualdist.errors import UnsupportedError
from dualdist.group import Group, Handle
from dualdist.reductions import Op, scale_

T = TypeVar("T")


def wants_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd follows any of the tensors now."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def with_gradient(
    tensors: Sequence[torch.Tensor],
    forward: Callable[[Sequence[torch.Tensor]], Handle[T]],
    backward: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> T:
    """forward's result, through which gradients flow back by `backward`, from one per result to one per tensor."""
    several: list[type] = []

    def start(given: Sequence[torch.Tensor]) -> Handle[T]:
        handle = forward(given)
        several.append(type(handle.wait()))
        return handle

    results = _Through.apply(start, backward, *tensors)  # type: ignore[no-untyped-call]
    return list(results) if several == [list] else results  # type: ignore[return-value]


class _Through(torch.autograd.Function):
    """An operation between ranks, given by two functions."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: torch.Tensor) -> Any:
        ctx.backward_of = backward
        ctx.set_materialize_grads(True)
        result = forward([tensor.detach() for tensor in tensors]).wait()
        integers = [r for r in _several(result) if not (r.is_floating_point() or r.is_complex())]
        ctx.mark_non_differentiable(*integers)
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *ctx.backward_of([gradient.contiguous() for gradient in gradients]))


def _several(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _linear(op: Op) -> None:
    if op not in ("mean", "sum"):
        raise UnsupportedError(f"no gradient flows through a reduction by {op!r}: use 'mean' or 'sum', or detach()")


def allreduce(
    group: Group, tensor: torch.Tensor, op: Op, name: str | None, prescale: float, postscale: float
) -> torch.Tensor:
    """Back flows the same reduction of the ranks' gradients."""

    def backward(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        _linear(op)
        return [collectives.allreduce(group, gradients[0], op, None, prescale, postscale).wait()]

    return with_gradient(
        [tensor], lambda given: collectives.allreduce(group, given[0], op, name, prescale, postscale), backward
    )


def grouped_allreduce(
    group: Group, tensors: Sequence[torch.Tensor], op: Op, name: str | None, prescale: float, postscale: float
) -> list[torch.Tensor]:
    """Back flows the same reduction of the ranks' gradients."""

    def backward(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        _linear(op)
        return collectives.grouped_allreduce(group, gradients, op, None, prescale, postscale).wait()

    return with_gradient(
        tensors, lambda given: collectives.grouped_allreduce(group, given, op, name, prescale, postscale), backward
    )


def allgather(group: Group, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    """Back flows the mean over ranks of the gradients for this rank's rows."""
    return with_gradient(
        [tensor],
        lambda given: collectives.allgather(group, given[0], name),
        lambda gradients: _own_rows(group, gradients, [tensor]),
    )


def grouped_allgather(group: Group, tensors: Sequence[torch.Tensor], name: str | None) -> list[torch.Tensor]:
    """Back flows the mean over ranks of the gradients for this rank's rows."""
    return with_gradient(
        tensors,
        lambda given: collectives.grouped_allgather(group, given, name),
        lambda gradients: _own_rows(group, gradients, tensors),
    )


def _own_rows(group: Group, gradients: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    means = collectives.grouped_allreduce(group, gradients, "mean").wait()
    counts = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]
    table = collectives.allgather(group, torch.tensor([counts], device="cpu")).wait()
    starts = table[: group.rank].sum(0).tolist()
    return [
        mean[start : start + count].reshape(tensor.shape)
        for mean, start, count, tensor in zip(means, starts, counts, tensors, strict=True)
    ]


def broadcast(group: Group, tensor: torch.Tensor, root: int, name: str | None) -> torch.Tensor:
    """Back flows to root the mean over ranks, to the others zero."""

    def backward(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        mean = collectives.allreduce(group, gradients[0], "mean").wait()
        return [mean if group.ranks[group.rank] == root else torch.zeros_like(mean)]

    return with_gradient([tensor], lambda given: collectives.broadcast(group, given[0], root, name), backward)


def alltoall(
    group: Group, tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, name: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Back flow the gradients to where the rows came from."""
    received: list[torch.Tensor] = []

    def forward(given: Sequence[torch.Tensor]) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
        handle = collectives.alltoall(group, given[0], splits, name)
        received.append(handle.wait()[1])
        return handle

    def backward(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [collectives.alltoall(group, gradients[0], received[0]).wait()[0]]

    return with_gradient([tensor], forward, backward)


def reducescatter(
    group: Group, tensor: torch.Tensor, op: Op, name: str | None, prescale: float, postscale: float
) -> torch.Tensor:
    """Back flow the gradients of all shares, as many times as there are ranks where the operation is a sum."""
    return with_gradient(
        [tensor],
        lambda given: collectives.reducescatter(group, given[0], op, name, prescale, postscale),
        lambda gradients: _all_shares(group, gradients, op, prescale * postscale),
    )


def grouped_reducescatter(
    group: Group, tensors: Sequence[torch.Tensor], op: Op, name: str | None, prescale: float, postscale: float
) -> list[torch.Tensor]:
    """Back flow the gradients of all shares, as many times as there are ranks where the operation is a sum."""
    return with_gradient(
        tensors,
        lambda given: collectives.grouped_reducescatter(group, given, op, name, prescale, postscale),
        lambda gradients: _all_shares(group, gradients, op, prescale * postscale),
    )


def _all_shares(group: Group, gradients: Sequence[torch.Tensor], op: Op, factor: float) -> list[torch.Tensor]:
    _linear(op)
    factor *= group.size if op == "sum" else 1
    scaled = [scale_(gradient.clone(), factor) for gradient in gradients]
    return collectives.grouped_allgather(group, scaled).wait()
