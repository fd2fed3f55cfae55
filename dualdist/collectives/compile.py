"""Keeps torch.compile out of what it cannot follow: it ends its graph before such a function, and goes on after it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
# Loaded wherever something is compiled, and by torch's optimizers; it takes a second.
COMPILER = "torch._dynamo"
WHY = (
    "between ranks, torch.compile(fullgraph=True) follows dd.allreduce only, on the native backend, of a dense tensor, "
    "by sum, mean, min, max or product (where gradients are wanted, by sum or mean), without async_op; Horovod's "
    "engine is no part of torch, so that its operations cannot be followed: leave fullgraph out"
)


def disable_compile(function: F, unless: Callable[..., Any] | None = None) -> F:
    """The function, into which torch.compile does not look; with fullgraph=True it says why.

    `unless`, given the same arguments, is what torch.compile follows in its place, where that is not None.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if COMPILER not in sys.modules:
            return function(*args, **kwargs)
        import torch

        if unless is not None and torch.compiler.is_compiling():
            result = unless(*args, **kwargs)
            if result is not None:
                return result
        return _outside_graph()(function, args, kwargs)

    return call  # type: ignore[return-value]


@functools.cache
def _outside_graph() -> Callable[..., Any]:
    """Return a function that calls another one outside of torch.compile's graph; torch is imported here only."""
    import torch

    disabled: Callable[..., Any] = torch.compiler.disable(_call, reason=WHY)
    return disabled


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)
