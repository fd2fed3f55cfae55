"""The tensors that operations take: which may travel, how they are told in words, and how they lie in memory."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import torch

from dualdist.errors import UnsupportedError, UsageError


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """What is in the tensor, without autograd; a sign that torch has put off to turn (z.conj()) is turned in a copy."""
    return tensor.detach().resolve_conj().resolve_neg()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    require_tensor(tensor)
    return values_of(tensor.detach().clone())


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements in one contiguous row: those of a single contiguous tensor themselves, others copied."""
    if len(tensors) == 1:
        return values_of(tensors[0]).contiguous().view(-1)
    return torch.cat([values_of(tensor).reshape(-1) for tensor in tensors])


def put_back(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give the tensor its result, unless that was made in the tensor's own memory."""
    if result.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(result.view(tensor.shape))


def require_tensor(given: object) -> None:
    """UsageError for anything else."""
    if not isinstance(given, torch.Tensor):
        raise UsageError(f"expected a tensor, not a {type(given).__name__}")


def checked(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors, if they can travel together."""
    if not tensors:
        raise UsageError("a grouped operation takes at least one tensor")
    for tensor in tensors:
        require_tensor(tensor)
        if tensor.layout is not torch.strided:
            raise UnsupportedError(f"a tensor of layout {tensor.layout} cannot travel this way: convert it to dense")
        if tensor.is_quantized:
            raise UnsupportedError(f"a {tensor.dtype} tensor cannot travel: send tensor.int_repr() and its scale")
    if len({tensor.device for tensor in tensors}) > 1:
        raise UsageError(f"tensors on several devices in one operation: {sorted({str(t.device) for t in tensors})}")
    return tensors


def require_own_memory(tensor: torch.Tensor) -> None:
    """UsageError where several elements share one place in memory, which cannot be written element by element."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError("an expanded tensor cannot be written in place: pass tensor.contiguous()")


def spec(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Dtype and shape in words: "float32(17, 3)"."""
    return f"{str(dtype).removeprefix('torch.')}{tuple(shape)}"


def spec_of(tensor: torch.Tensor, *, but_rows: bool = False) -> str:
    """Dtype and shape in words, "float32(*, 3)" where the number of rows may differ."""
    if not but_rows:
        return spec(tensor.dtype, tensor.shape)
    return f"{spec(tensor.dtype, ())[:-1]}{', '.join(['*', *map(str, tensor.shape[1:])])})"


def spec_from(words: str) -> tuple[torch.dtype, tuple[int, ...]]:
    name, _, shape = words.partition("(")
    return getattr(torch, name), ast.literal_eval(f"({shape}")


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with at least one dimension."""
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Bytes as a tensor; torch views them in place only where they lie as the dtype wants."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(*shape)
