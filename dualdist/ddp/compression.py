"""What gradients become on the wire."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from dualdist.errors import UsageError


class GradientCompressor(Protocol):
    """A pair of functions of one's own: what compress() returns is summed over all ranks, then decompressed."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What to send for a gradient, of the same shape on every rank, and what decompress() needs to know."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The gradient again, in its own shape and dtype, from the sum (or mean) of what was sent."""


class CastCompression:
    """Floats travel in a smaller dtype; other dtypes as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor.to(self.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


CASTS = {"fp16": CastCompression(torch.float16), "bf16": CastCompression(torch.bfloat16)}


def resolve_compressor(compression: str | GradientCompressor | None) -> GradientCompressor | None:
    """What a caller means by its `compression` argument."""
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
