"""The validated arguments of wrap_optimizer that affect the reduction of gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from dualdist.collectives.arguments import Reduction, check_reduction
from dualdist.ddp.compression import AnyCompressor, CastCompression, ErrorFeedback, compressor_name
from dualdist.errors import UsageError
from dualdist.utils.suggest import require_choice

GradientOp = Literal["mean", "sum", "adasum"]

# A small first bucket starts the first transfer early; the size of the others is DDP's. Gradients that would not fill
# two first buckets share one: another transfer costs more than it overlaps.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class ReducerConfig:
    """The arguments of wrap_optimizer that affect the reduction; the same on every rank."""

    op: GradientOp = "mean"
    compressor: AnyCompressor | None = None
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    check_every: int | None = None
    gradient_as_bucket_view: bool = True  # of this rank; the ranks need not agree
    compares_start: bool = True  # compare the ranks' parameters in the first reduction
    reduction: Reduction | None = None  # None until the optimizer is wrapped: that of the group
    shard: bool = False  # divide the optimizer's state between the ranks

    @property
    def description(self) -> str:
        """Text that ranks compare."""
        wire = self.compressor and (
            self.compressor.dtype if isinstance(self.compressor, CastCompression) else compressor_name(self.compressor)
        )
        checks = "" if self.check_every is None else f" check_every={self.check_every}"
        return (
            f"op={self.op} compression={wire} gradient_predivide_factor={self.gradient_predivide_factor} "
            f"sparse_as_dense={self.sparse_as_dense} bytes={self.first_bucket_bytes}, {self.bucket_bytes} "
            f"reduction={self.reduction} shard={self.shard}{checks}"
        )


def bucket_bytes(name: str, mebibytes: float) -> int:
    """Convert the argument `name` from MiB to bytes."""
    if not 0 < mebibytes < float("inf"):
        raise UsageError(f"{name}={mebibytes}: expected a size in MiB, above 0")
    return max(1, int(mebibytes * 2**20))


def wire_dtype(dtype: torch.dtype, config: ReducerConfig) -> torch.dtype | None:
    """Return the dtype in which gradients are sent; None if a custom compressor decides."""
    if config.compressor is None:
        return dtype
    if isinstance(config.compressor, CastCompression):
        return config.compressor.dtype if dtype.is_floating_point else dtype
    return None


def resolve_config(config: ReducerConfig, size: int, reduction: Reduction) -> ReducerConfig:
    """Return the configuration for a group of this size; raise UsageError unless its values fit together.

    `reduction` is the group's own, for a configuration that names none.
    """
    require_choice(config.op, ("mean", "sum", "adasum"), "op", " for gradients")
    if config.op == "adasum" and (size & (size - 1) or config.gradient_predivide_factor != 1.0):
        raise UsageError(
            f"op 'adasum' needs a power of two ranks, not {size}, and gradient_predivide_factor=1.0, not "
            f"{config.gradient_predivide_factor}"
        )
    if not config.gradient_predivide_factor > 0:
        raise UsageError(f"gradient_predivide_factor={config.gradient_predivide_factor}: expected a number above 0")
    every = config.check_every
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise UsageError(f"check_every={every!r}: expected the number of steps between two checks, 1 or more")
    if config.shard and config.op == "adasum":
        raise UsageError(
            "shard=True with op='adasum', for which every rank steps on all parameters: choose one of the two"
        )
    if config.op == "adasum" and isinstance(config.compressor, ErrorFeedback):
        raise UsageError(
            f"op='adasum' with compression={config.compressor}: Adasum combines steps, and what is not sent of a step "
            "cannot be added to the next one; choose one of the two"
        )
    reduction = config.reduction or reduction
    check_reduction(reduction, config.op)
    if reduction == "ordered" and config.compressor is not None:
        raise UsageError(
            "reduction='ordered' with compression: what is compressed is added in the format in which it is sent; "
            "choose one of the two"
        )
    return replace(config, reduction=reduction)
