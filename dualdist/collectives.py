"""Operations between ranks, written once on top of a backend's few moves."""

from __future__ import annotations

import hashlib
import pickle
import zlib
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
    _require_own_memory(tensor)
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
    rows = tensor.detach()
    if rows.dim() == 0:
        rows = rows.reshape(1)
    counts = _row_counts(backend, rows, name)
    shape = (sum(counts), *rows.shape[1:])
    sizes = [count * _nbytes_of_row(rows) for count in counts]
    most = max(sizes)
    if most == 0:
        empty = rows.new_empty(shape)
        return Handle(None, lambda: empty)
    mine = _as_bytes(rows)
    padded = mine
    if len(mine) < most:
        padded = mine.new_zeros(most)
        padded[: len(mine)] = mine
    work = backend.allgather(padded, name)

    def finish() -> torch.Tensor:
        gathered = work.wait()
        if len(set(sizes)) > 1:
            blocks = gathered.split(most)
            gathered = torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])
        return gathered.view(rows.dtype).reshape(shape)

    return Handle(work, finish)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, in one row: what is only moved needs no transport that knows its dtype."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _nbytes_of_row(rows: torch.Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()


def _row_counts(backend: Backend, rows: torch.Tensor, name: str) -> list[int]:
    """How many rows each rank has; MismatchError on every rank where the rows' shapes or dtypes differ."""
    kind = zlib.crc32(f"{rows.dtype} {tuple(rows.shape[1:])}".encode())
    known = backend.allgather(torch.tensor([[rows.shape[0], kind]]), f"{name}.shape").wait()
    if (known[:, 1] != kind).any():
        listed = allgather_object(backend, (tuple(rows.shape), str(rows.dtype)), f"{name}.shapes")
        raise MismatchError(
            f"allgather {name!r}: the ranks passed {listed}; shapes may differ in the first dimension only, dtypes not"
        )
    return [int(count) for count in known[:, 0]]


def broadcast_(backend: Backend, tensor: torch.Tensor, root: int, name: str | None) -> Handle[torch.Tensor]:
    """Root's values in place of the tensor's on every rank; the shape is the same on every rank."""
    checked_root(backend, root)
    _require_own_memory(tensor)
    values = tensor.detach()
    buffer = values.contiguous()
    work = None
    if buffer.numel():
        work = backend.broadcast_(_as_bytes(buffer), root, name or backend.names.next("broadcast"))

    def finish() -> torch.Tensor:
        if work is not None:
            work.wait()
        if buffer is not values:
            values.copy_(buffer)
        return tensor

    return Handle(work, finish)


def _require_own_memory(tensor: torch.Tensor) -> None:
    """UsageError where several elements share one place in memory, which cannot be written element by element."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError("an expanded tensor cannot be written in place: pass tensor.contiguous()")


def checked_root(backend: Backend, root: int) -> None:
    """UsageError where root is no rank."""
    if not 0 <= root < backend.size:
        raise UsageError(f"root={root}: expected a rank, 0 to {backend.size - 1}")


def barrier(backend: Backend) -> None:
    """Every rank has called this when it returns."""
    backend.allreduce_(torch.zeros(1), "sum", backend.names.next("barrier")).wait()


def broadcast_object(backend: Backend, obj: T, root: int, name: str | None = None) -> T:
    """Root's object, pickled, on every rank; UsageError on every rank where it does not pickle."""
    checked_root(backend, root)
    name = name or backend.names.next("broadcast_object")
    reason, payload = _pickled(obj) if backend.rank == root else ("", torch.empty(0, dtype=torch.uint8))
    length = torch.tensor([-payload.numel() if reason else payload.numel()])
    backend.broadcast_(length, root, f"{name}.length").wait()
    received = payload if backend.rank == root else torch.empty(abs(int(length)), dtype=torch.uint8)
    backend.broadcast_(received, root, name).wait()
    if length < 0:
        raise UsageError(f"{name}: {_unpickled(received)}")
    return obj if backend.rank == root else _unpickled(received)


def allgather_object(backend: Backend, obj: T, name: str | None = None) -> list[T]:
    """Everybody's object, pickled, in rank order; UsageError on every rank where one does not pickle."""
    name = name or backend.names.next("allgather_object")
    reason, payload = _pickled(obj)
    known = backend.allgather(torch.tensor([[payload.numel(), bool(reason)]]), f"{name}.length").wait()
    lengths = known[:, 0].tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    gathered = backend.allgather(padded, name).wait().split(max(lengths))
    objects = [_unpickled(block[:length]) for block, length in zip(gathered, lengths, strict=True)]
    failed = known[:, 1].nonzero().flatten().tolist()
    if failed:
        raise UsageError(f"{name}: on rank {failed[0]}, {objects[failed[0]]}")
    return objects


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


def _pickled(obj: object) -> tuple[str, torch.Tensor]:
    """The object's bytes, or the reason why it has none and the reason's bytes."""
    reason = ""
    try:
        data = pickle.dumps(obj)
    except Exception as error:  # pickling runs the object's own code
        reason = f"a {type(obj).__name__} does not pickle ({error})"
        data = pickle.dumps(reason)
    return reason, torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpickled(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.numpy().tobytes())
