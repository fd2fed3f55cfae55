"""Graph breaks: torch.compile ends its graph before a function that it cannot trace, and continues after it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
# Loaded where something is compiled, and by torch's optimizers; loading it takes a second.
COMPILER = "torch._dynamo"
WHY = (
    "between ranks, torch.compile(fullgraph=True) follows dd.allreduce and hvd.allreduce only, on the native backend, "
    "of a dense tensor, by sum, mean, min, max or product (where gradients are wanted, by sum or mean), without "
    "async_op or compression; Horovod's engine is no part of torch, so that its operations cannot be followed: leave "
    "fullgraph out"
)


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
        from dualdist.collectives.dynamo import outside

        if unless is not None and torch.compiler.is_compiling():
            result = unless(*args, **kwargs)
            if result is not None:
                return result
        return outside(function, args, kwargs)

    return call  # type: ignore[return-value]


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


outside: Callable[..., Any]


def __getattr__(name: str) -> Any:
    """Create `outside`, which calls a function outside of the graph, when something is compiled."""
    if name != "outside":
        raise AttributeError(name)
    import torch

    globals()[name] = outside = torch.compiler.disable(_call, reason=WHY)
    return outside
