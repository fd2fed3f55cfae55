"""Layout: which gradient lies where in which bucket, in a given order; pure functions of shapes and options.

The order is the Reducer's, and the same on all ranks: Note [bucket order] in reducer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualdist.ddp.config import ReducerConfig

# Flags of a whole bucket, by position from the end: no step followed the last reduction; the backward is inside of
# another; the rank sent its gradients, has joined, or discards the reduction.
SKIPPED_STEP, IS_NESTED, CONTRIBUTES, HAS_JOINED, DISCARDS = -5, -4, -3, -2, -1
BUCKET_FLAGS = (SKIPPED_STEP, IS_NESTED, CONTRIBUTES, HAS_JOINED, DISCARDS)


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives the parameter's gradient: its own, or contiguous ones if it has gaps."""
    return torch.empty_like(param, device="meta").stride()


def plan_buckets(
    params: Sequence[torch.Tensor], order: Sequence[int], config: ReducerConfig, groups: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Assign numbered parameters to buckets, given the order in which autograd finishes their gradients.

    A bucket holds one device and one dtype, and is closed by the parameter that fills it. Each of the given groups is
    in separate buckets, one for each device and dtype.
    """
    limits = config.first_bucket_bytes, config.bucket_bytes
    if not groups:
        return _split(params, order, limits)
    numbers, grouped = set(order), {number for group in groups for number in group}
    buckets = _split(params, [number for number in order if number not in grouped], limits)
    for group in groups:
        buckets += _split(params, sorted(numbers.intersection(group), reverse=True), None)
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


@dataclass(frozen=True)
class BucketLayout:
    """The gradients of a bucket, the same on every rank; its `unbucketed` members are reduced separately."""

    name: str
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    unbucketed: frozenset[int] = frozenset()
    numbers: tuple[int, ...] = ()  # of the parameters, in the reducer

    @property
    def counts(self) -> list[int]:
        """The number of elements of each member in the bucket."""
        return [0 if number in self.unbucketed else shape.numel() for number, shape in enumerate(self.shapes)]

    @property
    def length(self) -> int:
        """The number of elements of the buffer: the gradients, two flags for each member, and the bucket's flags."""
        return sum(self.counts) + 2 * len(self.shapes) + len(BUCKET_FLAGS)
