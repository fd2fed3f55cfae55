"""Operations between ranks, written once on top of a backend's few moves."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch

from dualdist.backends.base import Backend, ReduceOp, Work
from dualdist.errors import MismatchError, UsageError

Op = Literal["mean", "sum", "min", "max", "product"]
OPS = ("mean", "sum", "min", "max", "product")

T = TypeVar("T")


class Handle(Generic[T]):
    """An operation under way; wait() finishes it and returns its result, every time it is called."""

    def __init__(self, work: Work | None, finish: Callable[[], T]) -> None:
        self._work = work
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._finish is None or self._work is None or self._work.done()

    def wait(self) -> T:
        """The result; raises CollectiveError where the operation failed."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def divide_(total: torch.Tensor, size: int) -> torch.Tensor:
    """Make a sum over ranks their mean, in place. Done nowhere else, so that all backends round alike."""
    return total.div_(size)


def allreduce(backend: Backend, tensor: torch.Tensor, op: Op, name: str | None) -> Handle[torch.Tensor]:
    """The reduction over all ranks in a new tensor, shape as given."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    return allreduce_(backend, result, op, name)


def allreduce_(backend: Backend, tensor: torch.Tensor, op: Op, name: str | None) -> Handle[torch.Tensor]:
    """The reduction over all ranks in place of the tensor."""
    if op not in OPS:
        raise UsageError(f"op {op!r}: expected one of {', '.join(OPS)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UsageError(
            f"the mean of {tensor.dtype} is not a {tensor.dtype}: convert the tensor first, or use op='sum'"
        )
    values = tensor.detach()
    buffer = values.contiguous()
    reduce_op: ReduceOp = "sum" if op == "mean" else op
    work = None
    if buffer.numel():
        work = backend.allreduce_(buffer, reduce_op, name or backend.names.next("allreduce"))

    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        if op == "mean":
            divide_(buffer, backend.size)
        if buffer is not values:
            values.copy_(buffer)
        return tensor

    return Handle(work, finish)


def allgather(backend: Backend, tensor: torch.Tensor, name: str | None) -> Handle[torch.Tensor]:
    """Everybody's rows in rank order: (n_rank, *s) -> (sum of n_rank, *s); n may differ between ranks."""
    name = name or backend.names.next("allgather")
    rows = tensor.detach().contiguous()
    if rows.dim() == 0:
        rows = rows.reshape(1)
    counts = _row_counts(backend, rows, name)
    most = max(counts)
    if most == 0 or (rows[0:1].numel() == 0 and rows.shape[0] > 0):
        empty = rows.new_empty((sum(counts), *rows.shape[1:]))
        return Handle(None, lambda: empty)
    padded = rows
    if len(rows) < most:
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: len(rows)] = rows
    work = backend.allgather(padded, name)

    def finish() -> torch.Tensor:
        gathered = work.wait()
        if len(set(counts)) == 1:
            return gathered
        blocks = gathered.split(most)
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    return Handle(work, finish)


def _row_counts(backend: Backend, rows: torch.Tensor, name: str) -> list[int]:
    """How many rows each rank has; MismatchError on every rank where the shapes of the rows differ."""
    if rows.dim() > 8:
        raise UsageError(f"allgather {name!r}: a tensor of {rows.dim()} dimensions, expected at most 8")
    shape = torch.full((1, 9), -1, dtype=torch.int64)
    shape[0, : rows.dim()] = torch.tensor(rows.shape)
    shapes = backend.allgather(shape, f"{name}.shape").wait()
    if any(not torch.equal(other[1:], shape[0, 1:]) for other in shapes):
        listed = [tuple(int(n) for n in other if n >= 0) for other in shapes]
        raise MismatchError(
            f"allgather {name!r}: the ranks passed shapes {listed}, which may differ in the first dimension only"
        )
    return [int(count) for count in shapes[:, 0]]


def broadcast_(backend: Backend, tensor: torch.Tensor, root: int, name: str | None) -> Handle[torch.Tensor]:
    """Root's values in place of the tensor's on every rank; the shape is the same on every rank."""
    checked_root(backend, root)
    values = tensor.detach()
    buffer = values.contiguous()
    work = backend.broadcast_(buffer, root, name or backend.names.next("broadcast")) if buffer.numel() else None

    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        if buffer is not values:
            values.copy_(buffer)
        return tensor

    return Handle(work, finish)


def checked_root(backend: Backend, root: int) -> None:
    """UsageError where root is no rank."""
    if not 0 <= root < backend.size:
        raise UsageError(f"root={root}: expected a rank, 0 to {backend.size - 1}")


def barrier(backend: Backend) -> None:
    """Every rank has called this when it returns."""
    backend.allreduce_(torch.zeros(1), "sum", backend.names.next("barrier")).wait()


def broadcast_object(backend: Backend, obj: T, root: int, name: str | None = None) -> T:
    """Root's object, pickled, on every rank."""
    checked_root(backend, root)
    name = name or backend.names.next("broadcast_object")
    payload = _pickled(obj) if backend.rank == root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([payload.numel()])
    backend.broadcast_(length, root, f"{name}.length").wait()
    if backend.rank == root:
        backend.broadcast_(payload, root, name).wait()
        return obj
    received = torch.empty(int(length), dtype=torch.uint8)
    backend.broadcast_(received, root, name).wait()
    return _unpickled(received)  # type: ignore[no-any-return]


def allgather_object(backend: Backend, obj: T, name: str | None = None) -> list[T]:
    """Everybody's object, pickled, in rank order."""
    name = name or backend.names.next("allgather_object")
    payload = _pickled(obj)
    lengths = backend.allgather(torch.tensor([payload.numel()]), f"{name}.length").wait().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    gathered = backend.allgather(padded, name).wait().split(max(lengths))
    return [_unpickled(block[:length]) for block, length in zip(gathered, lengths, strict=True)]


def check_same_tensors(backend: Backend, tensors: Sequence[tuple[str, torch.Tensor]], root: int) -> None:
    """MismatchError on every rank unless all ranks hold the same names, shapes and dtypes."""
    manifest = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    digest = hashlib.sha256("\n".join(manifest).encode()).hexdigest()
    name = backend.names.next("check")
    if len(set(allgather_object(backend, digest, name))) == 1:
        return
    manifests = allgather_object(backend, manifest, f"{name}.manifest")
    expected = manifests[root]
    rank = next(rank for rank, other in enumerate(manifests) if other != expected)
    only_here = sorted(set(manifests[rank]) - set(expected))[:3]
    only_root = sorted(set(expected) - set(manifests[rank]))[:3]
    raise MismatchError(
        f"rank {rank} and root {root} do not hold the same tensors: rank {rank} has {only_here}, root has {only_root} "
        "(at most three shown); build the same model on every rank"
    )


def _pickled(obj: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.numpy().tobytes())
