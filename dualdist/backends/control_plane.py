"""Exchange of bytes and pickled objects over a backend; every rank makes the same calls in the same order.

No request is compared first, as dualdist/collectives does it; `check_same_tensors` compares tensors that will be sent.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from dualdist.backends.base import Backend, Work
from dualdist.errors import MismatchError

T = TypeVar("T")

# A row of the first allgather: the payload's length in 4 bytes, then as much as fits; the rest follows in a second one.
ROW_BYTES = 512
LENGTH_BYTES = 4
INLINE_BYTES = ROW_BYTES - LENGTH_BYTES


class ControlAllgather:
    """An allgather of bytes of different lengths, which starts when this is created."""

    def __init__(self, backend: Backend, payload: bytes, name: str) -> None:
        self._backend = backend
        self._payload = payload
        self._name = name
        self._payloads: list[bytes] | None = None
        row = len(payload).to_bytes(LENGTH_BYTES, "little") + payload[:INLINE_BYTES].ljust(INLINE_BYTES, b"\0")
        self._work: Work = backend.allgather(_tensor(row), name)

    def done(self) -> bool:
        """Return True if the first message, mostly the only one, has arrived from every rank."""
        return self._work.done()

    def all_equal(self) -> bool:
        """Return True if the payloads of all ranks are equal."""
        return all(payload == self._payload for payload in self.wait())

    def suffixes(self, prefix: bytes) -> list[bytes] | None:
        """Return what follows `prefix` in each payload; None unless all have this prefix and the same length."""
        length, payloads = len(self._payload), self.wait()
        if any(len(payload) != length or not payload.startswith(prefix) for payload in payloads):
            return None
        return [payload[len(prefix) :] for payload in payloads]

    def wait(self) -> list[bytes]:
        """Return the payloads of all ranks, in rank order."""
        if self._payloads is None:
            self._payloads = self._read()
        return self._payloads

    def _read(self) -> list[bytes]:
        data = self._work.wait().numpy().tobytes()
        rows = [data[start : start + ROW_BYTES] for start in range(0, len(data), ROW_BYTES)]
        lengths = [int.from_bytes(row[:LENGTH_BYTES], "little") for row in rows]
        payloads = [row[LENGTH_BYTES : LENGTH_BYTES + length] for row, length in zip(rows, lengths, strict=True)]
        longest = max(lengths) - INLINE_BYTES
        if longest <= 0:
            return payloads
        rest = self._backend.allgather(
            _tensor(self._payload[INLINE_BYTES:].ljust(longest, b"\0")), f"{self._name}.rest"
        )
        data = rest.wait().numpy().tobytes()
        return [
            payload + data[rank * longest : rank * longest + max(0, length - INLINE_BYTES)]
            for rank, (payload, length) in enumerate(zip(payloads, lengths, strict=True))
        ]


def allgather_object(backend: Backend, obj: T, name: str) -> list[T]:
    """Return the objects of all ranks, pickled, in rank order."""
    return [pickle.loads(data) for data in ControlAllgather(backend, pickle.dumps(obj), name).wait()]


def broadcast_object(backend: Backend, obj: T, root: int, name: str) -> T:
    """Return root's object, pickled, on every rank."""
    data = pickle.dumps(obj if backend.rank == root else None)
    received: T = pickle.loads(ControlAllgather(backend, data, name).wait()[root])
    return received


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view, for operations that only move data."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a dimension of size 1 may have any stride
    return flat.view(torch.uint8)


def allgather_bytes(backend: Backend, data: torch.Tensor, sizes: Sequence[int], name: str) -> torch.Tensor:
    """Concatenate the bytes of all ranks in rank order; rank i has sizes[i]."""
    longest = max(sizes)
    if longest == 0:
        return data.new_empty(0)
    padded = data
    if len(data) < longest:
        padded = data.new_zeros(longest)
        padded[: len(data)] = data
    gathered = backend.allgather(padded, name).wait()
    if len(set(sizes)) == 1:
        return gathered
    return torch.cat([block[:size] for block, size in zip(gathered.split(longest), sizes, strict=True)])


def check_same_tensors(
    backend: Backend, tensors: Sequence[tuple[str, torch.Tensor]], root: int, name: str, settings: str = ""
) -> None:
    """Raise MismatchError on every rank unless all have the same settings and tensors of the same names and shapes."""
    manifest = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    digest = hashlib.sha256("\n".join([settings, *manifest]).encode()).hexdigest()
    if len(set(allgather_object(backend, digest, name))) == 1:
        return
    manifests = allgather_object(backend, (settings, manifest), f"{name}.manifest")
    expected_settings, expected = manifests[root]
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


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpickle(data: torch.Tensor) -> Any:
    """Unpickle the object in a tensor of bytes."""
    return pickle.loads(data.cpu().numpy().tobytes())
