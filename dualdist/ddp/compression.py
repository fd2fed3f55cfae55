"""Gradient compression: the format in which gradients are sent."""

from __future__ import annotations

import re
from dataclasses import dataclass
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


# "powersgd" and "powersgd:4", "topk" and "topk:0.05".
WITH_FEEDBACK = re.compile(r"(powersgd)(?::([0-9]+))?|topk(?::([0-9]*\.?[0-9]+))?")
CASTS = {"fp16": CastCompression(torch.float16), "bf16": CastCompression(torch.bfloat16)}


@dataclass(frozen=True)
class ErrorFeedback:
    """Send a part of each gradient; what is not sent is added to the next one. See ddp/error_feedback.py.

    The first `warmup_steps` reductions send all.
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise UsageError(f"warmup_steps={self.warmup_steps!r}: expected a number of steps, 0 or more")


@dataclass(frozen=True)
class PowerSGD(ErrorFeedback):
    """Send two factors of a matrix (n, m), of (n, rank) and (m, rank) elements; matrices that are no larger whole."""

    rank: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rank, int) or self.rank < 1:
            raise UsageError(f"rank={self.rank!r}: expected the rank of the matrices that are sent, 1 or more")


@dataclass(frozen=True)
class TopK(ErrorFeedback):
    """Send the largest elements of each gradient, ceil(ratio * elements) of them, with their positions."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ratio, (int, float)) or not 0 < self.ratio <= 1:
            raise UsageError(f"ratio={self.ratio!r}: expected the part of the elements to send, above 0 and up to 1")


class Compression:
    """Compression of gradients with error feedback, for `compression=` of wrap_optimizer().

    A rank sends a part of each gradient, and adds the residual, which it has not sent, to its next gradient.
    save_checkpoint() saves the residuals of all ranks. On another number of ranks, load_checkpoint() divides them among
    the ranks. Residuals are in the optimizer's wrapper: wrap the optimizer before load_checkpoint().

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(8, 8).parameters(), lr=0.1)
        >>> optimizer = dd.wrap_optimizer(optimizer, compression=dd.Compression.powersgd(rank=2, warmup_steps=10))
    """

    @staticmethod
    def powersgd(rank: int = 1, *, warmup_steps: int = 0) -> PowerSGD:
        """Return low-rank compression (PowerSGD, Vogels et al., NeurIPS 2019), with the last factors as a start.

        A gradient of shape (n, ...) is taken as a matrix of n rows and m columns, and sent as (n + m) * rank elements.
        Vectors, and matrices that have no more elements than that, are sent whole.

        Args:
            rank: the rank of the matrices that are sent, 1 or more.
            warmup_steps: how many reductions send the whole gradients first.
        """
        return PowerSGD(warmup_steps, rank)

    @staticmethod
    def topk(ratio: float = 0.01, *, warmup_steps: int = 0) -> TopK:
        """Return compression to the elements of largest magnitude, ceil(ratio * elements) of each gradient.

        Each element is sent with its position, of 4 bytes; every rank gets those of all ranks.

        Args:
            ratio: the part of the elements to send, above 0 and up to 1.
            warmup_steps: how many reductions send the whole gradients first.
        """
        return TopK(warmup_steps, ratio)


AnyCompressor = GradientCompressor | ErrorFeedback


def resolve_compressor(compression: str | AnyCompressor | None) -> AnyCompressor | None:
    """Return the compressor for wrap_optimizer's argument `compression`."""
    if isinstance(compression, str):
        if form := WITH_FEEDBACK.fullmatch(compression):
            return PowerSGD(rank=int(form[2] or 1)) if form[1] else TopK(ratio=float(form[3] or 0.01))
        if compression not in CASTS:
            raise UsageError(
                f"compression {compression!r}: expected one of {', '.join(CASTS)}, powersgd:RANK, topk:RATIO, one of "
                "dd.Compression, or an object with compress(tensor) and decompress(tensor, ctx)"
            )
        return CASTS[compression]
    if compression is None or isinstance(compression, ErrorFeedback):
        return compression
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise UsageError(f"compression {compression!r} has no compress(tensor) and decompress(tensor, ctx)")
    return compression


def compressor_name(compressor: AnyCompressor) -> str:
    """Return the text by which ranks compare compressors."""
    if isinstance(compressor, ErrorFeedback):
        return repr(compressor)
    kind = compressor if isinstance(compressor, type) else type(compressor)
    return kind.__name__
