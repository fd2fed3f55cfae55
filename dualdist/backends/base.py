"""What a backend is: a few tensor moves and a stop. Everything that a user calls is written once on top of these."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

ReduceOp = Literal["sum", "min", "max", "product"]


class Store(Protocol):
    """A key-value store that all ranks of a job reach: how they exchange addresses before they can move tensors."""

    address: str  # under which this rank reached it

    def set(self, key: str, value: str) -> None:
        """Make `value` visible to every rank under `key`."""

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for `key` and return its value; raises TimeoutError, or RendezvousError if the store is gone."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0 and return the new value; atomic between ranks."""

    def has(self, key: str) -> bool:
        """Whether `key` is set, without waiting."""


class Work(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Whether wait() would return at once."""

    def wait(self) -> torch.Tensor:
        """Finish the operation and return its result; raises CollectiveError. On CUDA only the current stream waits."""


class Names:
    """Numbers the operations that the caller left unnamed; alike on all ranks, which call in the same order."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def next(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{kind}.{self._counts[kind]}"


def describe(kind: str, name: str, tensor: torch.Tensor) -> str:
    """An operation in the words of an error."""
    return f"{kind} {name!r} of {str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


class Backend(Protocol):
    """Moves tensors between `size` ranks. Every rank calls the same methods in the same order with the same names.

    Tensors given are contiguous, and stay untouched by the caller until the work is done. `name` is unique among the
    operations under way. Errors that leave a backend are dualdist's own.
    """

    name: str
    transport: str
    rank: int
    size: int
    names: Names
    reducers: list[Any]  # weak references to those of this session, in the order in which every rank made them
    is_open: bool  # until close()

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        """Replace `buffer` on every rank by the reduction over all ranks."""

    def allgather(self, tensor: torch.Tensor, name: str) -> Work:
        """Concatenate equal shapes in rank order: (n, *s) -> (size*n, *s)."""

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Work:
        """Replace `buffer` on every rank by root's."""

    def close(self) -> None:
        """Leave the job in order: nothing may be under way on any rank."""
