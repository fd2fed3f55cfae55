"""Gradient compression: the format in which gradients are sent."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from dualdist.errors import UsageError


class GradientCompressor(Protocol):
    """A user's compression: the results of compress() are summed over all ranks, then decompressed."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, of the same shape on every rank, and a context for decompress()."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the gradient, in its own shape and dtype, from the sum or mean of the compressed tensors."""


class CastCompression:
    """Send floating-point tensors in a smaller dtype, others as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor.to(self.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


CASTS = {"fp16": CastCompression(torch.float16), "bf16": CastCompression(torch.bfloat16)}


def resolve_compressor(compression: str | GradientCompressor | None) -> GradientCompressor | None:
    """Return the compressor for wrap_optimizer's argument `compression`."""
    if isinstance(compression, str):
        if compression not in CASTS:
            raise UsageError(
                f"compression {compression!r}: expected one of {', '.join(CASTS)}, or an object with "
                "compress(tensor) and decompress(tensor, ctx)"
            )
        return CASTS[compression]
    if compression is not None and not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise UsageError(f"compression {compression!r} has no compress(tensor) and decompress(tensor, ctx)")
    return compression


def compressor_name(compressor: GradientCompressor) -> str:
    kind = compressor if isinstance(compressor, type) else type(compressor)
    return kind.__name__
