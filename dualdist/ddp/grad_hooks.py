"""How a reducer hears of a parameter's gradients, and who else does: Note [who keeps whom]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dualdist.ddp.reducer import Reducer


class GradHook:
    """Tells a reducer that autograd has finished one of its parameters' gradients."""

    __slots__ = ("_number", "reducer")

    def __init__(self, reducer: Reducer, number: int) -> None:
        self.reducer = reducer
        self._number = number

    def __call__(self, param: torch.Tensor) -> None:
        self.reducer.on_grad_ready(param, self._number)


def released() -> None:
    """In place of a reference to a parameter that is somebody else's now."""


def owner_of(param: torch.Tensor) -> Reducer | None:
    """Who reduces the parameter's gradients."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    return next((hook.reducer for hook in hooks if isinstance(hook, GradHook)), None)


def remove_hooks(param: torch.Tensor, reducer: Reducer | None = None) -> None:
    """No reducer, or not this one, hears of the parameter's gradients."""
    hooks = param._post_accumulate_grad_hooks or {}
    for key, hook in list(hooks.items()):
        if isinstance(hook, GradHook) and reducer in (None, hook.reducer):
            del hooks[key]
