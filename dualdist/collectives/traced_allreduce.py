"""allreduce as an operator of torch, which torch.compile keeps in its graphs and does not look into.

When a graph runs, the operator does what allreduce does in eager mode: the ranks agree first, so they may compile at
different times, and some not at all. Nothing can be agreed on while a graph is traced: a rank compiles again whenever
its own shapes change, and would wait for ranks that are inside a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch

# Private to torch: tests/unit/test_torch_private_names.py.
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from dualdist.backends.arithmetic import LINEAR, LOCAL_OPS, Op
from dualdist.collectives import collectives
from dualdist.collectives.arguments import Reduction
from dualdist.collectives.group import Group


def define_allreduce(
    qualified_name: str,
    find_group: Callable[[int], Group],
    errors: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[..., torch.Tensor]:
    """Register an operator.

    `find_group` returns the group of a number, since a graph cannot hold the group itself; calls run in the context
    that `errors` returns, which may convert exceptions.
    """

    @torch.library.custom_op(qualified_name, mutates_args=())
    def allreduce(
        tensor: torch.Tensor, op: str, name: str, group: int, prescale: float, postscale: float, reduction: str
    ) -> torch.Tensor:
        with errors():
            members, order = find_group(group), cast("Reduction | None", reduction or None)
            return collectives.allreduce(
                members, tensor.detach(), cast(Op, op), name, prescale, postscale, reduction=order
            ).run()

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.op, ctx.name, *ctx.others = inputs

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        name = f"{ctx.name}.backward" if ctx.name else ""
        return allreduce(gradient, ctx.op, name, *ctx.others), *[None] * (2 + len(ctx.others))

    # The other ranks take part also where the result is not used: graphs keep it, and its place among the others.
    _register_effectful_op(allreduce._opoverload, _EffectType.ORDERED)
    allreduce.register_fake(lambda tensor, *_: torch.empty_like(tensor))
    allreduce.register_autograd(backward, setup_context=setup_context)
    return allreduce


def trace(
    operator: Callable[..., torch.Tensor],
    group: Group,
    tensor: torch.Tensor,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    reduction: str | None = None,
) -> torch.Tensor | None:
    """Put `operator` into the graph that is being traced; return None if torch.compile cannot follow this call."""
    backend = group.backend
    if not (backend.traceable and backend.is_open and group.is_member) or tensor.layout is not torch.strided:
        return None
    if op not in LINEAR and (op not in LOCAL_OPS or tensor.requires_grad):
        return None
    return operator(tensor, op, name or "", group.number, float(prescale), float(postscale), reduction or "")
