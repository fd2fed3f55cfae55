"""Which gradients travel together, in what, and what happens to them on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dualdist.ddp.compression import CastCompression, GradientCompressor
from dualdist.errors import UsageError

GradientOp = Literal["mean", "sum", "adasum"]

# A small first bucket starts the first transfer early; the size of the others is DDP's. Gradients that would not fill
# two first ones travel together: another transfer costs more than it hides.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class ReducerConfig:
    """What happens to gradients on their way; the same on every rank.

    Gradients are divided by `gradient_predivide_factor` before the sum and multiplied by it afterwards, where a sum
    could overflow. With `dense`, sparse gradients are sent as dense ones. With `check_every`, reduced gradients are
    checked for NaN and infinity.
    """

    op: GradientOp = "mean"
    compressor: GradientCompressor | None = None
    gradient_predivide_factor: float = 1.0
    dense: bool = False
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    check_every: int | None = None

    @property
    def words(self) -> str:
        """For the comparison between ranks."""
        wire = self.compressor and (
            self.compressor.dtype if isinstance(self.compressor, CastCompression) else name_of(self.compressor)
        )
        sizes = f"{self.first_bucket_bytes}, {self.bucket_bytes}"
        checks = "" if self.check_every is None else f" check_every={self.check_every}"
        factor = self.gradient_predivide_factor
        config = f"op={self.op} compression={wire} gradient_predivide_factor={factor} sparse_as_dense={self.dense}"
        return f"{config} bytes={sizes}{checks}"


def bucket_bytes(name: str, mebibytes: float) -> int:
    """The size of a bucket, as a caller gives it."""
    if not 0 < mebibytes < float("inf"):
        raise UsageError(f"{name}={mebibytes}: expected a size in MiB, above 0")
    return max(1, int(mebibytes * 2**20))


def wire_dtype(dtype: torch.dtype, config: ReducerConfig) -> torch.dtype | None:
    """In which dtype gradients travel; None where a compressor of the user's own decides."""
    if config.compressor is None:
        return dtype
    if isinstance(config.compressor, CastCompression):
        return config.compressor.dtype if dtype.is_floating_point else dtype
    return None


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """The strides that autograd gives the parameter's gradient: its own, or without gaps where those have some."""
    return torch.empty_like(param, device="meta").stride()


def name_of(compressor: GradientCompressor) -> str:
    kind = compressor if isinstance(compressor, type) else type(compressor)
    return kind.__name__


def plan_buckets(
    params: Sequence[torch.Tensor], order: Sequence[int], config: ReducerConfig, groups: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Which of the numbered parameters travel together, given the order in which autograd finishes them.

    A bucket holds one device and one dtype, and is closed by the parameter that fills it. Of the given groups, each
    travels in buckets of its own, one for each device and dtype.
    """
    limits = config.first_bucket_bytes, config.bucket_bytes
    if not groups:
        return _split(params, order, limits)
    fresh, grouped = set(order), {number for group in groups for number in group}
    buckets = _split(params, [number for number in order if number not in grouped], limits)
    for group in groups:
        buckets += _split(params, sorted(fresh.intersection(group), reverse=True), None)
    return sorted(buckets, key=max, reverse=True)


def _split(
    params: Sequence[torch.Tensor], order: Sequence[int], limits: tuple[int, int] | None
) -> list[tuple[int, ...]]:
    buckets: list[tuple[int, ...]] = []
    open_members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    open_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    if limits is not None and sum(params[number].nbytes for number in order) < 2 * limits[0]:
        limits = None
    for number in order:
        kind = (params[number].device, params[number].dtype)
        open_members.setdefault(kind, []).append(number)
        open_bytes[kind] = open_bytes.get(kind, 0) + params[number].nbytes
        if limits is not None and open_bytes[kind] >= limits[bool(buckets)]:
            buckets.append(tuple(open_members.pop(kind)))
            del open_bytes[kind]
    return buckets + [tuple(members) for members in open_members.values()]


# What a rank says once for a bucket, by the place in it from its end: "these are my gradients", "I have joined", or
# "this ends a round that is dropped".
TAKES_PART, HAS_JOINED, DROPS = -3, -2, -1
BUCKET_FLAGS = (TAKES_PART, HAS_JOINED, DROPS)


@dataclass(frozen=True)
class BucketPlan:
    """Which gradients travel together, the same on every rank; the members `apart` travel by themselves."""

    name: str
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    place: int  # of the buffer, as the line has reserved it
    apart: frozenset[int] = frozenset()

    @property
    def counts(self) -> list[int]:
        """How many elements of each member travel in the bucket."""
        return [0 if number in self.apart else shape.numel() for number, shape in enumerate(self.shapes)]

    @property
    def length(self) -> int:
        """Elements of the whole buffer: behind the gradients two flags for each member, and those for the bucket."""
        return sum(self.counts) + 2 * len(self.shapes) + len(BUCKET_FLAGS)
