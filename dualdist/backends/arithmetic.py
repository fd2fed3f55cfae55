"""The arithmetic of reductions, done the same way on every backend, so that all of them round alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from dualdist.errors import UsageError
from dualdist.utils.suggest import require_choice

# The transports' ops; "mean" only where Backend.mean_devices says so.
ReduceOp = Literal["sum", "min", "max", "product", "mean"]
# The callers' ops; "integer mean" is Horovod's average of integers.
Op = Literal["mean", "sum", "min", "max", "product", "adasum", "integer mean"]
OPS = ("mean", "sum", "min", "max", "product", "adasum")

# The wider dtype in which a transport reduces a dtype that it lacks. The result is the same: integers wrap around alike
# when they are narrowed again, and a sum of two small floats is rounded once either way.
WIDER = {
    torch.bool: torch.uint8,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
    torch.complex32: torch.complex64,
}
# Unsigned 64-bit integers are reduced as signed ones; for their order the top bit is flipped.
TOP_BIT = -(1 << 63)
# Note [NaN]: the minimum or maximum of numbers and NaN is NaN, as with torch.maximum. Gloo and MPI compare by "<", so
# that their result depends on the order of ranks. So floats are reduced as integers in the same order: their bits,
# which for a negative float are flipped below the sign. Both ends of that order are NaN. This costs no message.
ORDERED = {torch.float32: (torch.int32, (1 << 31) - 1), torch.float64: (torch.int64, (1 << 63) - 1)}
INTEGERS = frozenset(
    (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)
)
# Dtypes of numbers that can be added.
NUMBERS = INTEGERS.union(WIDER, (torch.float32, torch.float64, torch.complex64, torch.complex128))
# Dtypes in which torch cannot compute.
STORED_ONLY = frozenset(
    dtype for dtype in WIDER if (dtype.is_floating_point and dtype.itemsize == 1) or dtype == torch.complex32
)
LINEAR = ("mean", "sum")
# The op that stands for another one of booleans, whose sum would overflow in 8 bits.
LOGIC: dict[ReduceOp, ReduceOp] = {"sum": "max", "product": "min"}
LOCAL_OPS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raise UsageError unless numbers of this dtype can be reduced by `op`."""
    if op == "integer mean" and dtype in INTEGERS:
        return
    if op not in OPS:
        require_choice(op, OPS, "op")
    if op in ("mean", "adasum") and not (dtype.is_floating_point or (dtype.is_complex and op == "mean")):
        raise UsageError(f"the {op} of {dtype} is not a {dtype}: convert the tensor first, or use op='sum'")
    if op in ("min", "max") and dtype.is_complex:
        raise UsageError(f"op {op!r}: complex numbers have no order")
    if dtype not in NUMBERS:
        raise UsageError(f"{dtype} holds no numbers that can be added: convert the tensor first")


def check_scales(scales: tuple[float, float], dtype: torch.dtype) -> None:
    """Raise UsageError unless numbers of this dtype can be multiplied by both factors."""
    if dtype == torch.bool and scales != (1.0, 1.0):
        raise UsageError(f"prescale {scales[0]}, postscale {scales[1]}: booleans have no multiples, convert them first")


def wire_op(op: Op) -> ReduceOp:
    """Return the op of the transport."""
    if op == "min" or op == "max" or op == "product":
        return op
    return "sum"  # a mean is divided afterwards; Adasum does not use it


def divide_(total: torch.Tensor, size: int) -> torch.Tensor:
    """Turn a sum over ranks into their mean, in place. Done nowhere else, so that all backends round alike."""
    if size == 1:
        return total
    if total.dtype in STORED_ONLY:
        return total.copy_(total.to(WIDER[total.dtype]).div_(size))
    # Where 1/size is a power of two, multiplying by it is faster and gives the same bits.
    return total.mul_(1 / size) if total.is_floating_point() and size & (size - 1) == 0 else total.div_(size)


def divide(total: torch.Tensor, size: int, mean: torch.Tensor) -> None:
    """Write the result of divide_() to `mean`."""
    if total.is_floating_point() and size & (size - 1) == 0:
        torch.mul(total, 1 / size, out=mean)
    else:
        torch.div(total, size, out=mean)


def scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place as Horovod: integers in float64, truncated; 8-bit floats in float32."""
    if factor == 1.0:
        return tensor
    if tensor.dtype in INTEGERS:
        return tensor.copy_((tensor.double() * factor).to(tensor.dtype))
    if tensor.dtype in STORED_ONLY:
        return tensor.copy_(tensor.to(WIDER[tensor.dtype]) * factor)
    return tensor.mul_(factor)


def finalize_(reduced: torch.Tensor, op: Op, size: int, postscale: float) -> torch.Tensor:
    """Turn the sum of the transport into the result, in place: divide if it is a mean, and scale.

    Means of integers are truncated once. They are divided: Horovod multiplies by 1/size, which is slightly less, so
    that its mean of 49 ones is 0.
    """
    if op == "integer mean":
        return reduced.copy_((reduced.double() * postscale / size).to(reduced.dtype))
    return scale_(divide_(reduced, size) if op == "mean" else reduced, postscale)


def ordered(floats: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return integers in the order of the floats, with NaN at the end that `op` selects: Note [NaN]."""
    bits, top = ORDERED[floats.dtype]
    nan = top if op == "max" else -top - 1
    whole = floats.view(bits)
    return torch.where(torch.isnan(floats), nan, torch.where(whole < 0, whole ^ top, whole))


def unordered(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Invert ordered()."""
    _, top = ORDERED[dtype]
    return torch.where(whole < 0, whole ^ top, whole).view(dtype)


def reduce_rows(rows: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduce in rank order, (size, *s) -> (*s); small dtypes are rounded once, at the end, after a mean's division."""
    dtype = rows.dtype
    if dtype == torch.bool:
        op = LOGIC.get(op, op)
    if dtype == torch.uint64:
        flip = TOP_BIT if op in ("min", "max") else 0
        return reduce_rows(rows.view(torch.int64) ^ flip, op).bitwise_xor(flip).view(torch.uint64)
    wide = rows.to(WIDER[dtype]) if dtype in WIDER else rows
    combine = LOCAL_OPS["sum" if op == "mean" else op]
    total = wide[0].clone()
    for row in wide[1:]:
        combine(total, row, out=total)
    return (divide_(total, len(rows)) if op == "mean" else total).to(dtype)
