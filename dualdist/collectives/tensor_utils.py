"""Tensors as collectives take them: which can be sent, their dtype and shape in requests, and their bytes.

And tensors in nested dicts, lists and tuples, such as a state_dict(): extract and reinsert them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dualdist.collectives.arguments import as_tensor
from dualdist.errors import UnsupportedError, UsageError

PARAM_NAMES: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values without autograd; a lazy conjugate or negative (z.conj()) is resolved in a copy."""
    return tensor.detach().resolve_conj().resolve_neg()


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    return plain_values(tensor.detach().clone())


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements in one contiguous dimension; a single contiguous tensor is not copied."""
    if len(tensors) == 1:
        return plain_values(tensors[0]).contiguous().view(-1)
    return torch.cat([plain_values(tensor).reshape(-1) for tensor in tensors])


def copy_to_(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result into `tensor`, unless it was made in the memory of `tensor`."""
    if result.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(result.view(tensor.shape))


def check_tensors(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors; raise UsageError or UnsupportedError unless they can be sent together."""
    if not tensors:
        raise UsageError("a grouped operation takes at least one tensor")
    for tensor in tensors:
        if as_tensor(tensor).layout is not torch.strided:
            raise UnsupportedError(f"a tensor of layout {tensor.layout} cannot travel this way: convert it to dense")
        if tensor.is_quantized:
            raise UnsupportedError(f"a {tensor.dtype} tensor cannot travel: send tensor.int_repr() and its scale")
    if len({tensor.device for tensor in tensors}) > 1:
        raise UsageError(f"tensors on several devices in one operation: {sorted({str(t.device) for t in tensors})}")
    return tensors


def named_pairs(given: Any, caller: str) -> list[tuple[str, Any]]:
    """Return the items of a state_dict or of named tensors; raise UsageError for tensors without names."""
    pairs = list(given.items() if isinstance(given, Mapping) else given if isinstance(given, Iterable) else [given])
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError(
            f"{caller} takes a module, a state_dict or named tensors: pass model or model.named_parameters(), not "
            "model.parameters()"
        )
    return pairs


def remember_names(pairs: Iterable[tuple[str, Any]]) -> None:
    """Remember the names of parameters, by which wrap_optimizer pairs those of the ranks."""
    for name, value in pairs:
        if isinstance(value, torch.nn.Parameter) and value not in PARAM_NAMES:
            PARAM_NAMES[value] = name


def require_own_memory(tensor: torch.Tensor) -> None:
    """Raise UsageError if elements share memory, as in an expanded tensor: it cannot be written element by element."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError("an expanded tensor cannot be written in place: pass tensor.contiguous()")


def spec(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return dtype and shape as text: "float32(17, 3)"."""
    return f"{str(dtype).removeprefix('torch.')}{tuple(shape)}"


def spec_of(tensor: torch.Tensor, *, any_rows: bool = False) -> str:
    """Return dtype and shape as text: "float32(*, 3)" where the number of rows may differ between ranks."""
    if not any_rows:
        return spec(tensor.dtype, tensor.shape)
    return f"{spec(tensor.dtype, ())[:-1]}{', '.join(['*', *map(str, tensor.shape[1:])])})"


def spec_from(text: str) -> tuple[torch.dtype, tuple[int, ...]]:
    name, _, shape = text.partition("(")
    return getattr(torch, name), ast.literal_eval(f"({shape}")


def with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with at least one dimension."""
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def row_nbytes(rows: torch.Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return bytes as a tensor; they are copied if they are not aligned for the dtype."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(*shape)


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
