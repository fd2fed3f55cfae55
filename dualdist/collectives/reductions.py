"""What the operations of a reduction do to numbers: the same on every backend, so that all of them round alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from dualdist.backends.base import Backend, ReduceOp, Work
from dualdist.backends.control_plane import ControlAllgather, allgather_bytes, as_bytes
from dualdist.errors import UsageError
from dualdist.utils.suggest import require_choice

# What callers choose; an "integer mean" is what Horovod's scripts get when they average integers.
Op = Literal["mean", "sum", "min", "max", "product", "adasum", "integer mean"]
OPS = ("mean", "sum", "min", "max", "product", "adasum")

# Dtypes in which others are reduced where a transport lacks them; the result is the same, for integers wrap round alike
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
# Sums and products of unsigned 64-bit integers are those of signed ones; their order is, with the top bit turned over.
TOP_BIT = -(1 << 63)
# Note [NaN]: the least or greatest of numbers and NaN is NaN, as torch.maximum has it. Gloo and MPI compare by "<", so
# that there it depends on the order of ranks. Integers have one order everywhere: that of the bits of a float, where
# those of a negative one are turned over below the sign. Both ends of it are NaN. Costs no message.
ORDERED = {torch.float32: (torch.int32, (1 << 31) - 1), torch.float64: (torch.int64, (1 << 63) - 1)}
INTEGERS = frozenset(
    (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)
)
# Those that torch itself does not calculate with.
STORED_ONLY = frozenset(
    dtype for dtype in WIDER if (dtype.is_floating_point and dtype.itemsize == 1) or dtype == torch.complex32
)
LINEAR = ("mean", "sum")
# Of booleans: a sum counts, and a count in 8 bits comes back to 0.
LOGIC: dict[ReduceOp, ReduceOp] = {"sum": "max", "product": "min"}
LOCAL_OPS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def check_op(op: str, dtype: torch.dtype) -> None:
    """UsageError unless numbers of this dtype can be reduced by `op`."""
    if op == "integer mean" and dtype in INTEGERS:
        return
    if op not in OPS:
        require_choice(op, OPS, "op")
    if op in ("mean", "adasum") and not (dtype.is_floating_point or (dtype.is_complex and op == "mean")):
        raise UsageError(f"the {op} of {dtype} is not a {dtype}: convert the tensor first, or use op='sum'")
    if op in ("min", "max") and dtype.is_complex:
        raise UsageError(f"op {op!r}: complex numbers have no order")
    if dtype not in WIDER and dtype not in INTEGERS and dtype not in _LARGE:
        raise UsageError(f"{dtype} holds no numbers that can be added: convert the tensor first")


def check_scales(scales: tuple[float, float], dtype: torch.dtype) -> None:
    """UsageError unless numbers of this dtype can be multiplied by both factors."""
    if dtype == torch.bool and scales != (1.0, 1.0):
        raise UsageError(f"prescale {scales[0]}, postscale {scales[1]}: booleans have no multiples, convert them first")


_LARGE = frozenset((torch.float32, torch.float64, torch.complex64, torch.complex128))


def wire_op(op: Op) -> ReduceOp:
    """What a transport does for the operation."""
    if op == "min" or op == "max" or op == "product":
        return op
    return "sum"  # Adasum has its own way, and a mean is divided afterwards


def divide_(total: torch.Tensor, size: int) -> torch.Tensor:
    """Make a sum over ranks their mean, in place. Done nowhere else, so that all backends round alike."""
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
    """Multiply in place: integers in float64 and cut off towards zero, 8 and 16-bit floats in float32, as Horovod."""
    if factor == 1.0:
        return tensor
    if tensor.dtype in INTEGERS:
        return tensor.copy_((tensor.double() * factor).to(tensor.dtype))
    if tensor.dtype in STORED_ONLY:
        return tensor.copy_(tensor.to(WIDER[tensor.dtype]) * factor)
    return tensor.mul_(factor)


def finalize_(reduced: torch.Tensor, op: Op, size: int, postscale: float) -> torch.Tensor:
    """What a transport has reduced becomes the result, in place: divided where it is a mean, and scaled.

    Means of integers are cut off towards zero, once. They are divided: Horovod multiplies by 1/size, which is a little
    less, so that the mean of 49 ones is 0.
    """
    if op == "integer mean":
        return reduced.copy_((reduced.double() * postscale / size).to(reduced.dtype))
    return scale_(divide_(reduced, size) if op == "mean" else reduced, postscale)


class ConvertedWork:
    """Work on a copy in another dtype, whose result is put back where the caller looks for it."""

    def __init__(self, work: Work, put_back: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._work = work
        self._put_back = put_back

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> torch.Tensor:
        return self._put_back(self._work.wait())


def allreduce_(backend: Backend, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
    """Replace a contiguous buffer of any dtype by its reduction, on whatever dtypes the backend reduces."""
    dtype = buffer.dtype
    if dtype == torch.bool:
        op = LOGIC.get(op, op)
    if dtype in ORDERED and (op == "min" or op == "max"):
        work = backend.allreduce_(ordered(buffer, op), op, name)
        return ConvertedWork(work, lambda found: buffer.copy_(unordered(found, dtype)))
    if dtype in backend.supported_reduce_dtypes and not (dtype.is_floating_point and op in ("min", "max")):
        return backend.allreduce_(buffer, op, name)
    if dtype == torch.uint64:
        return _allreduce_uint64_(backend, buffer, op, name)
    if dtype in WIDER:
        return ConvertedWork(allreduce_(backend, buffer.to(WIDER[dtype]), op, name), buffer.copy_)
    if dtype.is_complex and op == "sum":
        parts = torch.view_as_real(buffer)
        return ConvertedWork(allreduce_(backend, parts, op, name), lambda _: buffer)
    return _gathered_and_reduced_(backend, buffer, op, name)


def ordered(floats: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Integers in the order of the floats; NaN comes where `op` finds it: Note [NaN]."""
    bits, top = ORDERED[floats.dtype]
    nan = top if op == "max" else -top - 1
    whole = floats.view(bits)
    return torch.where(torch.isnan(floats), nan, torch.where(whole < 0, whole ^ top, whole))


def unordered(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats that ordered() was given; both ends are NaN."""
    _, top = ORDERED[dtype]
    return torch.where(whole < 0, whole ^ top, whole).view(dtype)


def _allreduce_uint64_(backend: Backend, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
    signed = buffer.view(torch.int64)
    if op in ("sum", "product"):
        return ConvertedWork(backend.allreduce_(signed, op, name), lambda _: buffer)
    return ConvertedWork(
        backend.allreduce_(signed.bitwise_xor(TOP_BIT), op, name),
        lambda found: signed.copy_(found.bitwise_xor(TOP_BIT)).view(torch.uint64),
    )


def _gathered_and_reduced_(backend: Backend, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
    """For what no transport reduces: everybody's buffer here, and the reduction in rank order."""
    work = backend.allgather(as_bytes(buffer), name)

    def put_back(gathered: torch.Tensor) -> torch.Tensor:
        return buffer.copy_(reduce_rows(gathered.view(buffer.dtype).reshape(backend.size, *buffer.shape), op))

    return ConvertedWork(work, put_back)


def reduce_rows(rows: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """The reduction of equal tensors in rank order: (size, *s) -> (*s), small dtypes rounded once, at the end."""
    dtype = rows.dtype
    if dtype == torch.bool:
        op = LOGIC.get(op, op)
    if dtype == torch.uint64:
        flip = TOP_BIT if op in ("min", "max") else 0
        return reduce_rows(rows.view(torch.int64) ^ flip, op).bitwise_xor(flip).view(torch.uint64)
    wide = rows.to(WIDER[dtype]) if dtype in WIDER else rows
    total = wide[0].clone()
    for row in wide[1:]:
        total = LOCAL_OPS[op](total, row)
    return total.to(dtype)


def adasum_(backend: Backend, flat: torch.Tensor, sizes: Sequence[int], name: str) -> torch.Tensor:
    """Replace each of the tensors that lie in `flat`, `sizes` elements each, by their adaptive sum over all ranks.

    Two gradients a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are orthogonal, their
    mean where they are parallel. Pairs of ranks, then pairs of pairs, and so on (Maleki et al., "Scaling Distributed
    Training with Adaptive Summation", MLSys 2021, equation 3 and section 3.4). Every rank of a block holds the block's
    whole sum, so a step sends the whole buffer to one partner, log2(size) times.
    """
    mine = flat if flat.dtype == torch.float64 else flat.float()
    distance = 1
    while distance < backend.size:
        other = _swapped(backend, mine, backend.rank ^ distance, f"{name}.{distance}")
        lower, upper = (mine, other) if backend.rank & distance == 0 else (other, mine)
        mine = torch.cat([adaptive_sum(a, b) for a, b in zip(lower.split(sizes), upper.split(sizes), strict=True)])
        distance *= 2
    return flat.copy_(mine)


def adaptive_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The pairwise rule of Adasum for two flat tensors; dot products are taken in float64."""
    dot, a_square, b_square = (torch.dot(x.double(), y.double()) for x, y in ((a, b), (a, a), (b, b)))
    zero = torch.zeros_like(dot)
    a_factor = 1 - torch.where(a_square > 0, dot / (2 * a_square), zero)
    b_factor = 1 - torch.where(b_square > 0, dot / (2 * b_square), zero)
    return a * a_factor.to(a.dtype) + b * b_factor.to(b.dtype)


def _swapped(backend: Backend, mine: torch.Tensor, partner: int, name: str) -> torch.Tensor:
    """The partner's tensor, for ours."""
    counts = [mine.nbytes if rank == partner else 0 for rank in range(backend.size)]
    return backend.alltoall(as_bytes(mine), counts, counts, name).wait().view(mine.dtype)


def sparse_sum(
    backend: Backend, mine: torch.Tensor, op: Op, name: str, scales: tuple[float, float] = (1.0, 1.0)
) -> torch.Tensor:
    """Everybody's stored elements in one sparse COO tensor, coalesced: their sum, or mean, over all ranks.

    Its sparse dimensions are as many as everybody's who has any elements, or as few as anybody's.
    """
    mine, counts = _alike(backend, mine.coalesce(), f"{name}.count")
    indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
    if scales[0] != 1.0:
        values = scale_(values.clone(), scales[0])
    rows = [count * indices.shape[1] * indices.element_size() for count in counts]
    sizes = [count * values.shape[1:].numel() * values.element_size() for count in counts]
    all_indices = allgather_bytes(backend, as_bytes(indices), rows, f"{name}.indices").view(indices.dtype)
    all_values = allgather_bytes(backend, as_bytes(values), sizes, f"{name}.values").view(values.dtype)
    total = torch.sparse_coo_tensor(
        all_indices.reshape(-1, indices.shape[1]).t(),
        all_values.reshape(-1, *values.shape[1:]),
        mine.shape,
        device=mine.device,
        check_invariants=False,
    ).coalesce()
    finalize_(total.values(), op, backend.size, scales[1])
    return total


def _alike(backend: Backend, mine: torch.Tensor, name: str) -> tuple[torch.Tensor, list[int]]:
    """The tensor with as many sparse dimensions as on the other ranks, and how many elements each rank has stored."""
    while True:
        said = f"{mine._nnz()} {mine.sparse_dim()}".encode()
        told = [(int(count), int(dim)) for count, dim in map(bytes.split, ControlAllgather(backend, said, name).wait())]
        dims = {dim for count, dim in told if count}
        least = min(dims or [dim for _, dim in told])
        if mine.sparse_dim() != least:
            mine = (
                mine.to_dense().to_sparse(least)
                if mine._nnz()
                else empty_sparse(mine.shape, mine.dtype, mine.device, least)
            ).coalesce()
        if len(dims) <= 1:  # else there may be other elements now
            return mine, [count for count, _ in told]


def empty_sparse(shape: torch.Size, dtype: torch.dtype, device: torch.device, sparse_dim: int = 1) -> torch.Tensor:
    """A sparse COO tensor in which nothing is stored."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[sparse_dim:], dtype=dtype, device=device)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def is_traceable(backend: Backend, tensor: torch.Tensor, op: Op) -> bool:
    """Whether torch.compile can follow an allreduce: where it cannot, it ends its graph, or says why it does not go."""
    if not (backend.traceable and backend.is_open and backend.rank >= 0) or tensor.layout is not torch.strided:
        return False
    return op in LINEAR or (op in LOCAL_OPS and not tensor.requires_grad)
