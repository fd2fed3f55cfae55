"""Moving bytes and objects over a bare backend: every rank calls the same at the same place, and nothing is checked."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from dualdist.backends.base import Backend, Work
from dualdist.errors import MismatchError

T = TypeVar("T")

# A row of an exchange: its length in 4 bytes, then as much as fits; the rest goes in a second message.
ROW_BYTES = 512
LENGTH_BYTES = 4
INLINE_BYTES = ROW_BYTES - LENGTH_BYTES


class ControlAllgather:
    """Every rank's bytes, on every rank; it begins when this is made."""

    def __init__(self, backend: Backend, payload: bytes, name: str) -> None:
        self._backend = backend
        self._payload = payload
        self._name = name
        self._said: list[bytes] | None = None
        row = len(payload).to_bytes(LENGTH_BYTES, "little") + payload[:INLINE_BYTES].ljust(INLINE_BYTES, b"\0")
        self._work: Work = backend.allgather(_tensor(row), name)

    def done(self) -> bool:
        """Whether the first message, mostly the only one, has arrived from every rank."""
        return self._work.done()

    def all_equal(self) -> bool:
        """Whether all ranks are known to have passed the same."""
        return all(payload == self._payload for payload in self.wait())

    def suffixes(self, agreed: bytes) -> list[bytes] | None:
        """What follows `agreed` in what the ranks passed; None where some rank passed anything else."""
        length, said = len(self._payload), self.wait()
        if any(len(payload) != length or not payload.startswith(agreed) for payload in said):
            return None
        return [payload[len(agreed) :] for payload in said]

    def wait(self) -> list[bytes]:
        """What the ranks passed, in rank order."""
        if self._said is None:
            self._said = self._read()
        return self._said

    def _read(self) -> list[bytes]:
        data = self._work.wait().numpy().tobytes()
        rows = [data[start : start + ROW_BYTES] for start in range(0, len(data), ROW_BYTES)]
        lengths = [int.from_bytes(row[:LENGTH_BYTES], "little") for row in rows]
        payloads = [row[LENGTH_BYTES : LENGTH_BYTES + length] for row, length in zip(rows, lengths, strict=True)]
        most = max(lengths) - INLINE_BYTES
        if most <= 0:
            return payloads
        rest = self._backend.allgather(_tensor(self._payload[INLINE_BYTES:].ljust(most, b"\0")), f"{self._name}.rest")
        data = rest.wait().numpy().tobytes()
        return [
            payload + data[rank * most : rank * most + max(0, length - INLINE_BYTES)]
            for rank, (payload, length) in enumerate(zip(payloads, lengths, strict=True))
        ]


def allgather_object(backend: Backend, obj: T, name: str) -> list[T]:
    """Everybody's object, pickled, in rank order."""
    return [pickle.loads(data) for data in ControlAllgather(backend, pickle.dumps(obj), name).wait()]


def broadcast_object(backend: Backend, obj: T, root: int, name: str) -> T:
    """Root's object, pickled, on every rank."""
    mine = pickle.dumps(obj if backend.rank == root else None)
    received: T = pickle.loads(ControlAllgather(backend, mine, name).wait()[root])
    return received


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in one row: what is only moved needs no transport that knows its dtype."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a dimension of size 1 may have any stride
    return flat.view(torch.uint8)


def allgather_bytes(backend: Backend, mine: torch.Tensor, sizes: Sequence[int], name: str) -> torch.Tensor:
    """Everybody's bytes, one after the other; sizes[i] is the number of rank i's."""
    most = max(sizes)
    if most == 0:
        return mine.new_empty(0)
    padded = mine
    if len(mine) < most:
        padded = mine.new_zeros(most)
        padded[: len(mine)] = mine
    gathered = backend.allgather(padded, name).wait()
    if len(set(sizes)) == 1:
        return gathered
    return torch.cat([block[:size] for block, size in zip(gathered.split(most), sizes, strict=True)])


def check_same_tensors(
    backend: Backend, tensors: Sequence[tuple[str, torch.Tensor]], root: int, name: str, words: str = ""
) -> None:
    """MismatchError on every rank unless all ranks hold the same names, shapes and dtypes, and say the same words."""
    manifest = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    digest = hashlib.sha256("\n".join([words, *manifest]).encode()).hexdigest()
    if len(set(allgather_object(backend, digest, name))) == 1:
        return
    said = allgather_object(backend, (words, manifest), f"{name}.manifest")
    expected_words, expected = said[root]
    place = next(place for place, other in enumerate(said) if other != said[root])
    rank, root_rank = backend.ranks[place], backend.ranks[root]
    theirs = said[place][1]
    if theirs == expected and said[place][0] != expected_words:
        raise MismatchError(
            f"rank {rank} and root {root_rank} differ: {said[place][0]!r}, root says {expected_words!r}"
        )
    if sorted(theirs) == sorted(expected):
        number = next(number for number, (a, b) in enumerate(zip(theirs, expected, strict=True)) if a != b)
        raise MismatchError(
            f"rank {rank} and root {root_rank} hold the same tensors in another order: at place {number} of "
            f"{len(theirs)} rank {rank} has {theirs[number]}, root has {expected[number]}; give all ranks one order"
        )
    only_here = sorted(set(theirs) - set(expected))[:3]
    only_root = sorted(set(expected) - set(theirs))[:3]
    raise MismatchError(
        f"rank {rank} and root {root_rank} do not hold the same tensors: rank {rank} has {only_here}, root has "
        f"{only_root} (at most three shown); build the same model on every rank"
    )


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpickle(data: torch.Tensor) -> Any:
    """The object that a row of bytes holds."""
    return pickle.loads(data.cpu().numpy().tobytes())
