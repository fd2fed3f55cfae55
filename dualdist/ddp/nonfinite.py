"""Find NaN and infinite values in gradients, and describe them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from dualdist.utils.suggest import format_ranks

NAN, INFINITE = 1, 2
KIND_NAMES = {NAN: "NaN", INFINITE: "infinite", NAN | INFINITE: "NaN and infinite"}
SHOWN = 5  # gradients, in an error
# For these dtypes a dot product is faster than a sum.
DOT_DTYPES = (torch.float32, torch.float64)


def probe(values: torch.Tensor) -> torch.Tensor:
    """Return a scalar that is not finite if a value is not, and maybe if finite values are too large to add up."""
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if not flat.is_floating_point():
        return flat.new_zeros((), dtype=torch.float32)
    if flat.dtype in DOT_DTYPES and len(flat):
        return torch.dot(flat, flat).float()
    return flat.sum(dtype=torch.float32)


def nonfinite_kinds(grad: torch.Tensor | None) -> int:
    """Return the union of NAN and INFINITE found in the gradient, 0 if it is finite."""
    if grad is None:
        return 0
    values = (grad._values() if grad.is_sparse else grad).detach()
    if values.numel() == 0 or math.isfinite(probe(values).item()):
        return 0
    wide = values if values.dtype.itemsize > 1 else values.float()
    return (NAN if wide.isnan().any() else 0) | (INFINITE if wide.isinf().any() else 0)


def find_suspects(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return True for each tensor that may hold a non-finite value; waits once per device."""
    suspect = [False] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        is_finite = torch.isfinite(torch.stack([probe(tensors[number]) for number in numbers])).tolist()
        for number, finite in zip(numbers, is_finite, strict=True):
            suspect[number] = not finite
    return suspect


def format_nonfinite(kinds_by_name: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> str:
    """List the first gradients with the kinds of non-finite values and the ranks that had them."""
    clauses = []
    for name, kinds in list(kinds_by_name.items())[:SHOWN]:
        with_kind = {
            kind: [rank for rank, own in zip(ranks, kinds, strict=False) if own == kind] for kind in KIND_NAMES
        }
        details = [f"{KIND_NAMES[kind]} on {format_ranks(some)}" for kind, some in with_kind.items() if some]
        if kinds and not details:
            details = ["finite on every rank, but not their sum"]
        clauses.append(f"{name} ({', '.join(details)})" if details else name)
    more = f" and {len(kinds_by_name) - SHOWN} more" if len(kinds_by_name) > SHOWN else ""
    return f"{', '.join(clauses)}{more}"
