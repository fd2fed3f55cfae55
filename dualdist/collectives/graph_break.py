"""Calls outside of a graph of torch.compile; loaded only in programs that compile something."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

WHY = (
    "between ranks, torch.compile(fullgraph=True) follows dd.allreduce and hvd.allreduce only, on the native backend, "
    "of a dense tensor, by sum, mean, min, max or product (where gradients are wanted, by sum or mean), without "
    "async_op or compression; Horovod's engine is no part of torch, so that its operations cannot be followed: leave "
    "fullgraph out"
)


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


outside = torch.compiler.disable(_call, reason=WHY)
