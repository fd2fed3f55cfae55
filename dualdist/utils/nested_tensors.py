"""Tensors in nested dicts, lists and tuples, as state_dict() returns them, apart from what they stand in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorSlot:
    """Stands for the n-th tensor in a structure that is sent without its tensors."""

    index: int


def extract_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure with its tensors moved to the list; what is one tensor in several places is in it once."""
    slots: dict[object, TensorSlot] = {}

    def moved(tensor: torch.Tensor) -> TensorSlot:
        place = _place(tensor)
        if place not in slots:
            slots[place] = TensorSlot(len(tensors))
            tensors.append(tensor.detach())
        return slots[place]

    return map_nested(value, torch.Tensor, moved)


def _place(tensor: torch.Tensor) -> object:
    """What two tensors have in common that are one: their memory, or where there is none, the object."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return id(tensor)
    start = tensor.data_ptr() if tensor.numel() else 0
    if not start:  # as of all on the meta device
        return id(tensor)
    return start, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def insert_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The structure with the tensors in their places."""
    return map_nested(value, TensorSlot, lambda slot: tensors[slot.index])


def map_nested(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """A structure of the same kinds with `change` of each `kind` in it."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # a module's state_dict carries the versions of its modules as an attribute
        for key, item in value.items():
            changed[key] = map_nested(item, kind, change)  # update() would add up what a Counter counts
        return changed
    if type(value) in (list, tuple):
        return type(value)([map_nested(item, kind, change) for item in value])
    return value
