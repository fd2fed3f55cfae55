"""Tensors in nested dicts, lists and tuples, as state_dict() returns them, apart from what they stand in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Slot:
    """Stands for the n-th tensor in a structure that is sent without its tensors."""

    index: int


def taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure with its tensors moved to the list."""

    def moved(tensor: torch.Tensor) -> Slot:
        tensors.append(tensor.detach())
        return Slot(len(tensors) - 1)

    return mapped(value, torch.Tensor, moved)


def put_together(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The structure with the tensors in their places."""
    return mapped(value, Slot, lambda slot: tensors[slot.index])


def mapped(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """A structure of the same kinds with `change` of each `kind` in it."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # a module's state_dict carries the versions of its modules as an attribute
        changed.update({key: mapped(item, kind, change) for key, item in value.items()})
        return changed
    if type(value) in (list, tuple):
        return type(value)([mapped(item, kind, change) for item in value])
    return value
