"""Tensors as collectives take them: which can be sent, their dtype and shape in requests, and their bytes.

And tensors in nested dicts, lists and tuples, such as a state_dict(): find, extract and reinsert them.

Note [checked before sent]: check_tensor() alone decides which tensors can be sent, for every public function, before
this rank sends anything. What it refuses on one rank is an error on every rank (refusals.py), and the
ranks remain in step.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped  # private to torch
from torch.autograd import forward_ad

from dualdist.errors import UnsupportedError, UsageError
from dualdist.utils.suggest import type_name

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
NO_DISPATCH = torch.Tensor.__torch_dispatch__
WAIT = "trigger_wait"  # a method of AsyncCollectiveTensor, which stands for the result of a functional collective
NAME = "_dualdist_name"  # an attribute, since torch cannot swap a tensor that is weakly referenced


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values without autograd; a lazy conjugate or negative (z.conj()) is resolved in a copy."""
    return tensor.detach().resolve_conj().resolve_neg()


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    return plain_values(tensor.detach().clone())


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements in one contiguous dimension, to work on; a single contiguous tensor is not copied.

    Outside of inference mode torch changes no tensor that was made in it, so that one is copied.
    """
    if len(tensors) == 1:
        flat = plain_values(tensors[0]).contiguous().view(-1)
        return flat.clone() if flat.is_inference() and not torch.is_inference_mode_enabled() else flat
    return torch.cat([plain_values(tensor).reshape(-1) for tensor in tensors])


def copy_to_(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result into `tensor`, unless it was made in the memory of `tensor`."""
    if result.data_ptr() != tensor.data_ptr():
        with torch.inference_mode(tensor.is_inference() or torch.is_inference_mode_enabled()):
            tensor.detach().copy_(result.view(tensor.shape))


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return True for a tensor of torch.func.grad, vmap or jvp, or of forward-mode differentiation."""
    if is_wrapped(tensor):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def check_tensor(
    given: object, what: str = "the tensor", *, is_written: bool = False, takes_sparse: bool = False
) -> torch.Tensor:
    """Return a tensor that can be sent: Note [checked before sent].

    Args:
        given: what the program passed.
        what: names it in errors.
        is_written: a result will be written to it, element by element.
        takes_sparse: sparse layouts can be sent, too.

    Raises:
        UsageError: it is no tensor, has no values, or its elements share memory.
        UnsupportedError: it is of a kind whose values cannot be sent.
    """
    if not isinstance(given, torch.Tensor):
        raise UsageError(f"{what} is {type_name(given)}: expected a tensor, not {type_name(given)}")
    if torch.nn.parameter.is_lazy(given):
        raise UsageError(f"{what} has no values yet: run a forward first")
    if is_transformed(given):
        raise UnsupportedError(
            f"{what} is inside of torch.func.grad, vmap, jvp or another transformation, where ranks cannot exchange "
            "tensors: call this outside of it; gradients of backward() flow through dualdist's functions"
        )
    if type(given).__torch_dispatch__ is not NO_DISPATCH and not hasattr(given, WAIT):
        kind = type_name(given)
        raise UnsupportedError(f"{what} is {kind}, made of other tensors: pass those, as to_local() of a DTensor")
    if given.is_nested:
        raise UnsupportedError(f"{what} is nested: pass the tensors of which it is made, as by unbind()")
    if given.is_quantized:
        raise UnsupportedError(f"{what} is quantized, of {given.dtype}: pass int_repr(), and its scale")
    if given.is_meta:
        raise UsageError(f"{what} is on the meta device and has no values: create it on another device")
    if given.layout is not torch.strided and not (takes_sparse and (given.is_sparse or "sparse" in f"{given.layout}")):
        raise UnsupportedError(f"{what} has the layout {given.layout}, which cannot be sent: convert it to a dense one")
    if is_written and given.layout is torch.strided and _shares_elements(given):
        raise UsageError(
            f"{what} has elements that share memory, as in an expanded tensor, so that no result can be written to "
            "it: pass tensor.contiguous()"
        )
    return given


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Return True unless each dimension's stride steps over all elements of those with smaller strides."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    end = 0  # the place of the last element so far, counted from the first
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += stride * (size - 1)
    return False


def own_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of an expanded tensor with each element once."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.detach()[tuple(slice(0, 1) if stride == 0 and size > 1 else slice(None) for stride, size in strides)]


def check_tensors(tensors: Sequence[torch.Tensor], *, is_written: bool = False) -> Sequence[torch.Tensor]:
    """Return the tensors; raise UsageError or UnsupportedError unless they can be sent together."""
    if not tensors:
        raise UsageError("a grouped operation takes at least one tensor")
    for number, tensor in enumerate(tensors):
        check_tensor(
            tensor, f"tensor {number} of {len(tensors)}" if len(tensors) > 1 else "the tensor", is_written=is_written
        )
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
        if isinstance(value, torch.nn.Parameter) and not hasattr(value, NAME):
            setattr(value, NAME, name)


def forget_names(params: Iterable[torch.Tensor]) -> None:
    """Forget the names of parameters, which a rank that joins the others has not seen yet."""
    for param in params:
        if hasattr(param, NAME):
            delattr(param, NAME)


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
    """Stands for a dense tensor, by its index, in a structure that is sent without those."""

    index: int


def find_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a structure with their names, as "model.0.weight"."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from find_tensors(item, f"{name}.{key}" if name else f"{key}")


def extract_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Append the structure's dense tensors to the list, shared ones once, and return it with TensorSlots instead.

    Sparse tensors stay in it, in host memory: it is pickled with them.
    """
    slots: dict[object, TensorSlot] = {}

    def extract(tensor: torch.Tensor) -> TensorSlot | torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor.detach().cpu()
        key = storage_key(tensor)
        if key not in slots:
            slots[key] = TensorSlot(len(tensors))
            tensors.append(tensor.detach())
        return slots[key]

    return map_nested(value, torch.Tensor, extract)


def storage_key(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors with the same memory and layout; the object's id if it has no memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return id(tensor)
    start = tensor.data_ptr() if tensor.numel() else 0
    if not start:  # such as on the meta device
        return id(tensor)
    return start, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def insert_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the structure with its slots replaced by the tensors."""
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
