"""Exchange of bytes and pickled objects over a backend, as stages of an operation; all ranks make the same calls.

No request is compared first, as dualdist/collectives does it; `check_same_tensors` compares tensors that will be sent.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from dualdist.backends.arithmetic import ReduceOp, divide_, reduce_rows
from dualdist.backends.base import Backend, Message
from dualdist.backends.operation import Operation, Stages
from dualdist.errors import DualdistError, MismatchError

T = TypeVar("T")

# A row of the first allgather: the payload's length in 4 bytes, then as much as fits; the rest follows in a second one.
ROW_BYTES = 512
LENGTH_BYTES = 4
INLINE_BYTES = ROW_BYTES - LENGTH_BYTES
PAYLOAD_BYTES = 128  # a tensor of this size fits one row together with a request


def exchange(backend: Backend, data: bytes, name: str, payload: torch.Tensor | None = None) -> Message:
    """Begin an allgather of bytes of different lengths, and of the elements of a small CPU tensor."""
    if backend.messenger is not None:
        return backend.messenger.message(data, payload)
    return AllgatherMessage(backend, data, name, payload)


class AllgatherMessage(Message):
    """A message by the allgather of a backend: one row of each rank, and a second one for what is longer."""

    def __init__(self, backend: Backend, data: bytes, name: str, payload: torch.Tensor | None) -> None:
        self._backend = backend
        self._name = name
        self._length = len(data)
        self._sent = (
            data if payload is None else data + payload.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
        self._rows: list[bytes] = []  # what the ranks sent, as far as it has come
        self._rest: Operation[torch.Tensor] | None = None
        self._has_ended = False
        head = len(self._sent).to_bytes(LENGTH_BYTES, "little") + self._sent[:INLINE_BYTES].ljust(INLINE_BYTES, b"\0")
        self._first = backend.allgather(_tensor(head), name)

    def advance(self, wait_s: float) -> bool:
        if self._has_ended:
            return True
        if self._rest is None:
            if not self._first.advance(wait_s):
                return False
            rows = _rows(self._first.result, self._backend.size)
            lengths = [int.from_bytes(row[:LENGTH_BYTES], "little") for row in rows]
            self._rows = [row[LENGTH_BYTES : LENGTH_BYTES + length] for row, length in zip(rows, lengths, strict=True)]
            longest = max(lengths) - INLINE_BYTES
            if longest > 0:
                self._lengths = lengths
                rest = _tensor(self._sent[INLINE_BYTES:].ljust(longest, b"\0"))
                self._rest = self._backend.allgather(rest, f"{self._name}.rest")
        if self._rest is not None:
            if not self._rest.advance(wait_s):
                return False
            more = _rows(self._rest.result, self._backend.size)
            self._rows = [(row + rest)[:n] for row, rest, n in zip(self._rows, more, self._lengths, strict=True)]
        sent, length = self._sent, self._length
        self.is_equal = all(len(row) == len(sent) and row[:length] == sent[:length] for row in self._rows)
        self._has_ended = True
        return True

    @property
    def result(self) -> list[bytes]:  # type: ignore[override]
        return self._rows

    def reduce_payloads(self, tensor: torch.Tensor, op: ReduceOp, *, in_place: bool) -> torch.Tensor:
        values = torch.frombuffer(bytearray(b"".join(row[self._length :] for row in self._rows)), dtype=tensor.dtype)
        reduced = reduce_rows(values.view(-1, *tensor.shape), "sum" if op == "mean" else op)
        if op == "mean":  # divided after the sum was rounded, as for larger tensors
            divide_(reduced, len(self._rows))
        if not in_place:
            return reduced
        with torch.inference_mode(tensor.is_inference() or torch.is_inference_mode_enabled()):
            tensor.detach().copy_(reduced)  # also where the tensor is a leaf of a graph
        return tensor


def allgather_object(backend: Backend, obj: T, name: str) -> Stages[list[T]]:
    """Return the objects of all ranks, pickled, in rank order."""
    rows = yield exchange(backend, pickle.dumps(obj), name)
    return [pickle.loads(row) for row in rows]


def broadcast_object(backend: Backend, obj: T, root: int, name: str) -> Stages[T]:
    """Return root's object, pickled, on every rank."""
    rows = yield exchange(backend, pickle.dumps(obj if backend.rank == root else None), name)
    received: T = pickle.loads(rows[root])
    return received


def gather_unless_equal(backend: Backend, value: T, name: str) -> Stages[list[T]]:
    """Return [] if all ranks hold the same value of texts, numbers and containers of them, else that of every rank."""
    digests = yield exchange(backend, hashlib.sha256(repr(value).encode()).digest(), name)
    if len(set(digests)) == 1:
        return []
    return (yield from allgather_object(backend, value, f"{name}.values"))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view, for operations that only move data."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a dimension of size 1 may have any stride
    return flat.view(torch.uint8)


def allgather_bytes(backend: Backend, data: torch.Tensor, sizes: Sequence[int], name: str) -> Stages[torch.Tensor]:
    """Concatenate the bytes of all ranks in rank order; rank i has sizes[i]."""
    longest = max(sizes)
    if longest == 0:
        return data.new_empty(0)
    padded = data
    if len(data) < longest:
        padded = data.new_zeros(longest)
        padded[: len(data)] = data
    gathered: torch.Tensor = yield backend.allgather(padded, name)
    if len(set(sizes)) == 1:
        return gathered
    return torch.cat([block[:size] for block, size in zip(gathered.split(longest), sizes, strict=True)])


def check_same_tensors(
    backend: Backend,
    tensors: Sequence[tuple[str, torch.Tensor]],
    root: int,
    name: str,
    settings: str = "",
    *,
    any_order: bool = False,
    refusal: DualdistError | None = None,
) -> Stages[list[int]]:
    """Raise MismatchError on every rank unless all have the same settings and tensors of the same names and shapes.

    A rank with a `refusal` cannot take part: it raises that, and the others MismatchError.

    Returns:
        The positions here of root's tensors, in root's order; with any_order the ranks' orders may differ.
    """
    manifest = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    found = yield from gather_unless_equal(backend, (f"{refusal or ''}", settings, manifest), name)
    if refusal is not None:
        raise refusal
    if not found:
        return [*range(len(tensors))]
    for rank, (text, _, _) in zip(backend.ranks, found, strict=True):
        if text:
            raise MismatchError(f"rank {rank} cannot take part: {text}")
    manifests = [(other_settings, other) for _, other_settings, other in found]
    expected_settings, expected = manifests[root]
    if any_order and len({(other_settings, *sorted(other)) for other_settings, other in manifests}) == 1:
        return [manifest.index(each) for each in expected]
    index = next(index for index, other in enumerate(manifests) if other != manifests[root])
    other_settings, other = manifests[index]
    rank, root_rank = backend.ranks[index], backend.ranks[root]
    if other == expected and other_settings != expected_settings:
        raise MismatchError(
            f"rank {rank} and root {root_rank} differ: {other_settings!r}, root says {expected_settings!r}"
        )
    if sorted(other) == sorted(expected):
        number = next(number for number, (a, b) in enumerate(zip(other, expected, strict=True)) if a != b)
        raise MismatchError(
            f"rank {rank} and root {root_rank} hold the same tensors in another order: at index {number} of "
            f"{len(other)} rank {rank} has {other[number]}, root has {expected[number]}; give all ranks one order"
        )
    only_here = sorted(set(other) - set(expected))[:3]
    only_root = sorted(set(expected) - set(other))[:3]
    raise MismatchError(
        f"rank {rank} and root {root_rank} do not hold the same tensors: rank {rank} has {only_here}, root has "
        f"{only_root} (at most three shown); build the same model on every rank"
    )


def _rows(gathered: torch.Tensor, size: int) -> list[bytes]:
    """Return the bytes of each rank."""
    data = gathered.numpy().tobytes()
    width = len(data) // size
    return [data[start : start + width] for start in range(0, len(data), width)]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpickle(data: torch.Tensor) -> Any:
    """Unpickle the object in a tensor of bytes."""
    return pickle.loads(data.cpu().numpy().tobytes())
