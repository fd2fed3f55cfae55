"""Graph breaks: torch.compile ends its graph before a function that it cannot trace, and continues after it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
# Loaded where something is compiled, and by torch's optimizers; loading it takes a second.
COMPILER = "torch._dynamo"


def disable_compile(function: F, unless: Callable[..., Any] | None = None) -> F:
    """Keep torch.compile from tracing a function; with fullgraph=True it raises an error with the reason.

    Args:
        function: called outside of the graph.
        unless: called with the same arguments while torch.compile traces; its result is used unless it is None.
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
