"""Graph breaks: torch.compile ends its graph before a function that it cannot trace, and continues after it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dualdist.utils.suggest import explain_call

F = TypeVar("F", bound=Callable[..., Any])
# Loaded with torch._dynamo: where something is compiled, and by torch's optimizers; loading it takes a second.
COMPILER = "torch._dynamo.eval_frame"
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
        if not torch.compiler.is_compiling():
            if torch._C._functorch.peek_interpreter_stack() is not None:
                with torch._C._DisableFuncTorch():  # in torch.func.grad our buffers would be transformed, too
                    return _call(call, args, kwargs)
            if COMPILER not in sys.modules:
                try:
                    return function(*args, **kwargs)
                except TypeError as error:
                    raise explain_call(call, args, kwargs, error) from error.__cause__
        from dualdist.collectives.dynamo import outside

        if unless is not None and torch.compiler.is_compiling():
            result = unless(*args, **kwargs)
            if result is not None:
                return result
        return outside(call, args, kwargs)

    return call  # type: ignore[return-value]


def _call(public: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return public.__wrapped__(*args, **kwargs)
    except TypeError as error:
        raise explain_call(public, args, kwargs, error) from error.__cause__


outside: Callable[..., Any]


def __getattr__(name: str) -> Any:
    """Create `outside`, which calls a function outside of the graph, when something is compiled."""
    if name != "outside":
        raise AttributeError(name)
    import torch

    globals()[name] = outside = torch.compiler.disable(_call, reason=WHY)
    with contextlib.suppress(ImportError):  # private to torch: tests/unit/test_torch_private_names.py
        from torch._dynamo.eval_frame import skip_code

        # All wrapped functions share this code. It is not worth compiling, and torch does so 8 times at most.
        skip_code(disable_compile(_call).__code__)
    return outside
