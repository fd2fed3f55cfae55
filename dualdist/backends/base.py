"""Protocols that a backend implements: tensors are moved between ranks here, everything else is written on top.

registry.py is how a backend makes itself known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from dualdist.errors import CollectiveError, CollectiveTimeoutError, RankLostError
from dualdist.topology import RankLocation, Topology

# The transports' ops; "mean" only where Backend.mean_devices says so.
ReduceOp = Literal["sum", "min", "max", "product", "mean"]
# Of the allreduce of a bucket: its optimizer, layout and index, and its elements without the flags.
BUCKET_NAME = re.compile(r"gradients\.\d+\.\d+\.(\d+)/(\d+)(\.scatter|\.gather)?")
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


@dataclass(frozen=True)
class InitContext:
    """Arguments that a backend is started with.

    Before rendezvous (BackendSpec.start_early) there are no `locations`, no `store` and no `interface`, the topology
    may still be inferred, and `device` is the kind only. `sets_default_group`: native also sets torch.distributed's
    default group up, for DDP and others.
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
    sets_default_group: bool = True


class Work(Protocol):
    """A running operation."""

    def done(self) -> bool:
        """Return True if wait() would return at once."""

    def wait(self) -> torch.Tensor:
        """Finish the operation and return its result; raise CollectiveError. On CUDA only the current stream waits."""


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
        dtype = str(tensor.dtype).removeprefix("torch.")
        if bucket := BUCKET_NAME.fullmatch(name):
            of_dtype = "" if bucket[3] else f" of {dtype}"  # else bytes are sent: Note [rank order]
            return f"reduction of gradients, bucket {bucket[1]} of {bucket[2]} elements{of_dtype}"
        return f"{kind} {name!r} of {dtype}{tuple(tensor.shape)}"


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
    mean_devices: frozenset[str]  # of floats that allreduce_ takes the mean of, as fast as the sum
    rank_order_devices: frozenset[str]  # of floats that allreduce_ adds and multiplies in the order of ranks

    @property
    def is_open(self) -> bool:
        """Return True until close()."""

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None) -> Work:
        """Replace `buffer` on every rank by the reduction over all ranks; of another tensor, if one is given."""

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Work:
        """Concatenate tensors of equal shape in rank order, (n, *s) -> (size*n, *s); in `output`, if one is given."""

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Work:
        """Replace `buffer` on every rank by that of index `root` in `ranks`."""

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> Work:
        """Send the next sent[i] elements of a flat tensor to each rank i; the result has received[i] from rank i."""

    def duplicate(self, key: str) -> Backend:
        """Connect the same ranks again, so that operations on the new backend do not queue behind this one's."""

    def subgroup(self, ranks: Sequence[int], key: str) -> Backend:
        """Connect some of the job's ranks; every rank of this backend calls this, and members or not get a backend."""

    def built_with(self) -> dict[str, int]:
        """Return for gloo, mpi and nccl: 0 if missing, else the version (NCCL's as a number) or 1."""

    def close(self) -> None:
        """Disconnect; no operation may be running on any rank. Every rank of the job closes a subgroup."""


class ReceiveWork(Work, Protocol):
    """A running receive."""

    def source(self) -> int:
        """Return the index of the rank that sent, once wait() has returned."""


@runtime_checkable
class PointToPoint(Protocol):
    """A backend that also moves tensors between two ranks, and whose subgroup() only the members need to call."""

    def connect_peers(self) -> None:
        """Prepare send() and receive_(); every rank calls this."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        """Send a contiguous tensor to the rank of index `to`."""

    def receive_(self, buffer: torch.Tensor, source: int | None, tag: int) -> ReceiveWork:
        """Fill a contiguous tensor by what the rank of index `source`, or any, sends with this tag."""


class ForwardingBackend:
    """A backend over another one; subclasses move the tensors. Duplicates and subgroups are those of the other one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name, self.transport, self.traceable = backend.name, backend.transport, backend.traceable
        self.ranks, self.rank, self.size = backend.ranks, backend.rank, backend.size
        self.supported_reduce_dtypes = backend.supported_reduce_dtypes
        self.done_means_all_started = backend.done_means_all_started
        self.mean_devices = backend.mean_devices
        self.rank_order_devices = backend.rank_order_devices
        self.duplicate, self.subgroup = backend.duplicate, backend.subgroup
        self.built_with, self.close = backend.built_with, backend.close

    @property
    def timeout_s(self) -> float:
        return self._backend.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._backend.timeout_s = value

    @property
    def is_open(self) -> bool:
        return self._backend.is_open


def gathered(tensor: torch.Tensor, size: int, output: torch.Tensor | None) -> torch.Tensor:
    """Return where an allgather of `tensor` puts its result: in `output`, if one is given."""
    return tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:])) if output is None else output


def filled(buffer: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    """Return the buffer, with the values of `source` if one is given."""
    return buffer if source is None else buffer.copy_(source)


class CompletedWork:
    """Work whose result is known when it starts."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._result


class ConvertedWork:
    """Work whose wait() returns `convert` of the result: mostly its copy in another tensor."""

    def __init__(self, work: Work, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._work = work
        self._convert = convert

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> torch.Tensor:
        return self._convert(self._work.wait())


def timeout_error(timeout_s: float) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(f"not all ranks arrived within {timeout_s:g} s")


def peer_error(text: str, shown: str, timeout_s: float) -> CollectiveError | None:
    """Return the exception for a transport's error in lower case if another rank is lost or late, else None."""
    if any(word in text for word in PEER_LOST):
        return RankLostError(f"another rank called dd.shutdown() or ended, or its connection broke ({shown})")
    return timeout_error(timeout_s) if any(word in text for word in TIMED_OUT) else None
