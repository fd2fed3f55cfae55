"""Tensors in nested dicts, lists and tuples, such as a state_dict(): extract and reinsert them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorSlot:
    """Stands for a tensor, by its index, in a structure that is sent without its tensors."""

    index: int


def extract_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Append the structure's tensors to the list, shared ones once, and return it with TensorSlots instead."""
    slots: dict[object, TensorSlot] = {}

    def extract(tensor: torch.Tensor) -> TensorSlot:
        key = _storage_key(tensor)
        if key not in slots:
            slots[key] = TensorSlot(len(tensors))
            tensors.append(tensor.detach())
        return slots[key]

    return map_nested(value, torch.Tensor, extract)


def _storage_key(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors with the same memory and layout; the object's id if it has no memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return id(tensor)
    start = tensor.data_ptr() if tensor.numel() else 0
    if not start:  # such as on the meta device
        return id(tensor)
    return start, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def insert_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the structure with its TensorSlots replaced by the tensors."""
    return map_nested(value, TensorSlot, lambda slot: tensors[slot.index])


def map_nested(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of the structure with change() applied to each instance of `kind`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # a module's state_dict has its modules' versions as an attribute
        for key, item in value.items():
            changed[key] = map_nested(item, kind, change)  # not update(), which adds up the counts of a Counter
        return changed
    if type(value) in (list, tuple):
        return type(value)([map_nested(item, kind, change) for item in value])
    return value
