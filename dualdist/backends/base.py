"""Protocols that a backend implements: tensors are moved between ranks here, everything else is written on top.

registry.py is how a backend makes itself known.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.operation import Operation
from dualdist.errors import CollectiveError, CollectiveTimeoutError, RankLostError
from dualdist.topology import RankLocation, Topology

# The dtypes of a backend that copies a tensor without reducing it with another.
ALL_DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))
# Words in errors of transports, in lower case, when a wait times out, and when a rank has ended.
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


class Message(Operation[list[bytes]]):
    """An allgather of bytes of different lengths, which may carry the elements of a small tensor, too.

    Attributes:
        is_equal: all ranks sent the same few bytes and as large a tensor; known once advance() has returned True.
    """

    is_equal = False

    @abstractmethod
    def reduce_payloads(self, tensor: torch.Tensor, op: ReduceOp, *, in_place: bool) -> torch.Tensor:
        """Return the reduction of the ranks' tensors, if is_equal; `tensor` is this rank's."""


class Messenger(Protocol):
    """A transport for messages that is faster than allgather()."""

    message: Callable[[bytes, torch.Tensor | None], Message]
    """Begins an allgather of bytes of any length, and of the elements of a small contiguous tensor."""

    payload_bytes: int
    """The largest such tensor, the same on all ranks."""

    def close(self) -> None:
        """Disconnect."""


@dataclass(frozen=True)
class AdoptedGroup:
    """A backend over process groups that the program has set up.

    `set_locations` is called with the ranks' locations, once they are known, before the backend is duplicated.
    """

    backend: Backend
    store: Store
    topology: Topology
    set_locations: Callable[[Sequence[RankLocation]], None]


class Backend(Protocol):
    """Moves tensors between `size` ranks. Every rank calls the same methods in the same order with the same names.

    A method begins an operation, which its caller advances, one after the other in the order of the calls. Tensors
    passed in are contiguous, and the caller leaves them unchanged until the operation is done. `name` is unique among
    running operations. A backend raises dualdist's exceptions only, without naming the operation: callers add it.
    A tensor on an accelerator: the operation is done once it is queued, and the current stream waits for its result.
    Implementations inherit from this class.
    """

    name: str
    transport: str
    ranks: tuple[int, ...]  # the job's ranks that this backend connects, ascending
    rank: int  # this process's index among them, -1 if it is none of them
    size: int
    timeout_s: float  # of duplicate() and subgroup(), which wait for the other ranks
    is_open: bool  # until close()
    supported_reduce_dtypes: frozenset[torch.dtype]  # of allreduce_; callers convert tensors of other dtypes
    # The types of devices whose tensors it takes, None for all; others go through host memory, see staging.py.
    devices: frozenset[str] | None = None
    in_program_order: bool = False  # operations begin in the program's thread, in the order of its calls
    traceable: bool = False  # torch.compile may keep an allreduce in its graph
    mean_devices: frozenset[str] = frozenset()  # of floats that allreduce_ takes the mean of, as fast as the sum
    rank_order_devices: frozenset[str] = frozenset()  # of floats that allreduce_ adds and multiplies in rank order
    messenger: Messenger | None = None  # in the same order as the operations
    # Seconds that a program waits for an operation that it has just begun: Note [wait budget] in wait_budget.py.
    wait_budget_s: float = 0.0
    # Called by any thread with the error of an operation that a device does not end in time, and its name.
    on_late: Callable[[CollectiveError, str], None] | None = None

    @abstractmethod
    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> Operation[torch.Tensor]:
        """Replace `buffer` on every rank by the reduction over all ranks; of another tensor, if one is given."""

    @abstractmethod
    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Operation[torch.Tensor]:
        """Concatenate tensors of equal shape in rank order, (n, *s) -> (size*n, *s); in `output`, if one is given."""

    @abstractmethod
    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Operation[torch.Tensor]:
        """Replace `buffer` on every rank by that of index `root` in `ranks`."""

    @abstractmethod
    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str
    ) -> Operation[torch.Tensor]:
        """Send the next sent[i] elements of a flat tensor to each rank i; the result has received[i] from rank i."""

    @abstractmethod
    def duplicate(self, key: str) -> Backend:
        """Connect the same ranks again, so that CPU tensors on the new backend do not queue behind this one's."""

    @abstractmethod
    def subgroup(self, ranks: Sequence[int], key: str) -> Backend:
        """Connect some of the job's ranks; every rank of this backend calls this, and members or not get a backend."""

    def lost_ranks(self) -> Sequence[int]:
        """Return the job's ranks that are known to have ended; called from time to time while an operation waits."""
        return ()

    def abandon(self) -> None:
        """Break what connects this rank to the others, so that they wait for it no longer, if the transport can."""
        return None

    def built_with(self) -> dict[str, int]:
        """Return for gloo, mpi and nccl: 0 if missing, else the version (NCCL's as a number) or 1."""
        return {"gloo": 0, "mpi": 0, "nccl": 0}

    @abstractmethod
    def close(self) -> None:
        """Disconnect; no operation may be running on any rank. Every rank of the job closes a subgroup."""


class Receive(Operation[torch.Tensor]):
    """A running receive."""

    @abstractmethod
    def source(self) -> int:
        """Return the index of the rank that sent, once advance() has returned True."""


@runtime_checkable
class PointToPoint(Protocol):
    """A backend that also moves tensors between two ranks, and whose subgroup() only the members need to call."""

    def connect_peers(self) -> None:
        """Prepare send() and receive_(); every rank calls this."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Operation[torch.Tensor]:
        """Send a contiguous tensor to the rank of index `to`."""

    def receive_(self, buffer: torch.Tensor, source: int | None, tag: int) -> Receive:
        """Fill a contiguous tensor by what the rank of index `source`, or any, sends with this tag."""


def gathered(tensor: torch.Tensor, size: int, output: torch.Tensor | None) -> torch.Tensor:
    """Return where an allgather of `tensor` puts its result: in `output`, if one is given."""
    return tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:])) if output is None else output


def filled(buffer: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    """Return the buffer, with the values of `source` if one is given."""
    return buffer if source is None else buffer.copy_(source)


def timeout_error(timeout_s: float) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(f"not all ranks arrived within {timeout_s:g} s")


def peer_error(text: str, shown: str) -> CollectiveError | None:
    """Return the exception for a transport's error in lower case if another rank is lost or late, else None."""
    if any(word in text for word in PEER_LOST):
        return RankLostError(f"another rank called dd.shutdown() or ended, or its connection broke ({shown})")
    if any(word in text for word in TIMED_OUT):
        return CollectiveTimeoutError(f"not all ranks arrived in time ({shown})")
    return None
