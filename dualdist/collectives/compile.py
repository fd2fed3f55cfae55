"""Keeps torch.compile out of what it cannot follow: it ends its graph before such a function, and goes on after it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
# Loaded wherever something is compiled, and by torch's optimizers; it takes a second.
COMPILER = "torch._dynamo"


def disable_compile(function: F, unless: Callable[..., Any] | None = None) -> F:
    """The function, into which torch.compile does not look; with fullgraph=True it says why.

    `unless`, given the same arguments, is what torch.compile follows in its place, where that is not None.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        # First, because a graph that has looked at sys.modules guards each of its thousands of entries.
        if not torch.compiler.is_compiling() and COMPILER not in sys.modules:
            return function(*args, **kwargs)
        from dualdist.collectives.graph_break import outside

        if unless is not None and torch.compiler.is_compiling():
            result = unless(*args, **kwargs)
            if result is not None:
                return result
        return outside(function, args, kwargs)

    return call  # type: ignore[return-value]
