"""allreduce as one operator of torch's, which torch.compile puts into its graphs and does not look into.

When a graph runs, the operator does what allreduce does where nothing is compiled: the ranks agree first, so that they
may compile at different times, and some not at all. What is settled while a graph is traced cannot be agreed on: ranks
compile again whenever their own shapes change, and one that asked the others then would meet them inside a graph.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from dualdist import session
from dualdist.collectives import collectives
from dualdist.collectives.reductions import Op

WORLD = -1


@torch.library.custom_op("dualdist::allreduce", mutates_args=())
def allreduce(tensor: torch.Tensor, op: str, name: str, group: int, prescale: float, postscale: float) -> torch.Tensor:
    """collectives.allreduce; `name` may be empty, `group` is the place in the session's list, or WORLD."""
    current = session.current()
    chosen = current.world if group == WORLD else current.groups[group]
    return collectives.allreduce(chosen, tensor, cast(Op, op), name, prescale, postscale).wait()


@allreduce.register_fake
def _(tensor: torch.Tensor, op: str, name: str, group: int, prescale: float, postscale: float) -> torch.Tensor:
    return torch.empty_like(tensor)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.op, ctx.name, ctx.group, ctx.prescale, ctx.postscale = inputs


def _back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
    name = f"{ctx.name}.backward" if ctx.name else ""
    found = allreduce(gradient, ctx.op, name, ctx.group, ctx.prescale, ctx.postscale)
    return found, None, None, None, None, None


allreduce.register_autograd(_back, setup_context=_remember)
