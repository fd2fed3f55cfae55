"""Protocols that a backend implements: tensors are moved between ranks here, everything else is written on top."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from dualdist.errors import CollectiveError, CollectiveTimeoutError, RankLostError
from dualdist.topology import RankLocation, Topology

ReduceOp = Literal["sum", "min", "max", "product"]
# The region of buffers without reserved memory.
UNRESERVED = -1
# For backends that copy a tensor without reducing it with another.
ALL_DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))
# In lower-case errors of transports when a wait times out, and when a rank has ended.
TIMED_OUT = ("timed out", "timeout")
PEER_LOST = (
    "shut down",
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
)


class Store(Protocol):
    """A key-value store that all ranks of a job reach, through which they exchange addresses before tensors move."""

    address: str  # by which this rank reached it
    endpoint: str  # the address and port, for messages

    def set(self, key: str, value: str) -> None:
        """Make `value` visible to every rank under `key`."""

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for `key` and return its value; raise TimeoutError, or RendezvousError if the store is gone."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0, atomically between ranks, and return the new value."""

    def has(self, key: str) -> bool:
        """Return True if `key` is set, without waiting."""

    def disconnect(self) -> None:
        """Close this process's connections to the store, so that threads waiting for an answer return."""


@dataclass(frozen=True)
class InitContext:
    """Arguments that a backend is started with.

    Before rendezvous (BackendSpec.start_early) there are no `locations`, no `store` and no `interface`, the topology
    may still be inferred, and `device` is the kind only.
    """

    topology: Topology
    environ: MutableMapping[str, str]
    transport: str  # requested by DUALDIST_TRANSPORT, or ""
    device: torch.device
    timeout_s: float
    key: str  # prefix of this session's keys in the store
    locations: Sequence[RankLocation] = ()  # in rank order
    store: Store | None = None  # None if there is one rank
    interface: str | None = None  # network interface towards the other nodes; None if there are none


class Work(Protocol):
    """A running operation."""

    def done(self) -> bool:
        """Return True if wait() would return at once."""

    def wait(self) -> torch.Tensor:
        """Finish the operation and return its result; raise CollectiveError. On CUDA only the current stream waits."""


@dataclass(frozen=True)
class Epilogue:
    """A function applied in place to the first `count` elements of a result, one chunk at a time."""

    count: int
    apply: Callable[[torch.Tensor], object]


class Buffer(Protocol):
    """Memory for one tensor that is reduced repeatedly."""

    values: torch.Tensor  # flat; this rank's input of the next reduction
    memory: torch.Tensor  # owns the storage of `values`: the same object for all buffers in the same memory
    applies_epilogue: bool  # else the caller does, on the result

    def allreduce(self, op: ReduceOp, name: str, epilogue: Epilogue) -> Work:
        """Start to reduce the values over all ranks.

        The result is in `values`. It is read-only where ranks share the memory, and valid until the next reduction
        starts.
        """


@dataclass(frozen=True)
class AdoptedGroup:
    """A backend over process groups that the program has set up.

    `set_locations` is called with the ranks' locations, once they are known, before the backend is duplicated.
    """

    backend: Backend
    store: Store
    topology: Topology
    set_locations: Callable[[Sequence[RankLocation]], None]


class LazyDescription:
    """The description of an operation for error messages, formatted when needed."""

    def __init__(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        self._operation = kind, name, tensor

    def __str__(self) -> str:
        kind, name, tensor = self._operation
        return f"{kind} {name!r} of {str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


class Backend(Protocol):
    """Moves tensors between `size` ranks. Every rank calls the same methods in the same order with the same names.

    Tensors passed in are contiguous, and the caller leaves them unchanged until the work is done. `name` is unique
    among running operations. A backend raises dualdist's exceptions only, without naming the operation: callers add it.
    """

    name: str
    transport: str
    ranks: tuple[int, ...]  # the job's ranks that this backend connects, ascending
    rank: int  # this process's index among them, -1 if it is none of them
    size: int
    timeout_s: float  # for operations that start from now on
    supported_reduce_dtypes: frozenset[torch.dtype]  # of allreduce_; callers convert tensors of other dtypes
    traceable: bool  # torch.compile may keep an allreduce in its graph
    done_means_all_started: bool  # an allreduce_ is done(), without wait(), once all ranks have started it

    @property
    def is_open(self) -> bool:
        """Return True until close()."""

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        """Replace `buffer` on every rank by the reduction over all ranks."""

    def allgather(self, tensor: torch.Tensor, name: str) -> Work:
        """Concatenate tensors of equal shape in rank order: (n, *s) -> (size*n, *s)."""

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Work:
        """Replace `buffer` on every rank by that of index `root` in `ranks`."""

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> Work:
        """Send the next sent[i] elements of a flat tensor to each rank i; the result has received[i] from rank i."""

    def reserve(self, nbytes: int, device: torch.device) -> int:
        """Reserve a region for buffers of `nbytes` on every rank, which all call this; return its number, the same on
        all, or UNRESERVED.
        """

    def buffer(self, region: int, number: int, count: int, dtype: torch.dtype, device: torch.device) -> Buffer | None:
        """Return buffer `number` of a region, uninitialised; None if there is no memory for another one.

        Number 0 always exists. Each rank chooses the number for every reduction without asking the others.
        """

    def release(self, region: int) -> None:
        """Stop using a region, on every rank. Tensors that still refer to its memory stay readable."""

    def duplicate(self, key: str) -> Backend:
        """Connect the same ranks again, so that operations on the new backend do not queue behind this one's."""

    def subgroup(self, ranks: Sequence[int], key: str) -> Backend:
        """Connect some of the job's ranks; every rank of this backend calls this, and members or not get a backend."""

    def built_with(self) -> dict[str, int]:
        """Return for gloo, mpi and nccl: 0 if missing, else the version (NCCL's as a number) or 1."""

    def close(self) -> None:
        """Disconnect; no operation may be running on any rank. Every rank of the job closes a subgroup."""


def storage_uses(tensor: torch.Tensor) -> int:
    """Count the tensors in the same storage."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


class PrivateBuffer:
    """A Buffer in this rank's own memory, reduced in place."""

    applies_epilogue = False

    def __init__(self, values: torch.Tensor, allreduce_: Callable[[torch.Tensor, ReduceOp, str], Work]) -> None:
        self.values = self.memory = values
        self._allreduce_ = allreduce_

    def allreduce(self, op: ReduceOp, name: str, epilogue: Epilogue) -> Work:
        return self._allreduce_(self.values, op, name)


class PrivateBuffers:
    """Base class of a backend whose ranks share no memory: implements reserve, buffer and release."""

    @abstractmethod
    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        """See Backend.allreduce_."""

    def reserve(self, nbytes: int, device: torch.device) -> int:
        return UNRESERVED

    def buffer(self, region: int, number: int, count: int, dtype: torch.dtype, device: torch.device) -> PrivateBuffer:
        return PrivateBuffer(torch.empty(count, dtype=dtype, device=device), self.allreduce_)

    def release(self, region: int) -> None:
        """Release nothing."""


class CompletedWork:
    """Work whose result is known when it starts."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._result


def timeout_error(timeout_s: float) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(f"not all ranks arrived within {timeout_s:g} s")


def peer_error(text: str, shown: str, timeout_s: float) -> CollectiveError | None:
    """Return the exception for a transport's error in lower case if another rank is lost or late, else None."""
    if any(word in text for word in PEER_LOST):
        return RankLostError(f"another rank ended or its connection broke ({shown})")
    return timeout_error(timeout_s) if any(word in text for word in TIMED_OUT) else None
