"""What a backend is: a few tensor moves and a stop. Everything that a user calls is written once on top of these."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import weakref

    import torch

    from dualdist.topology import RankLocation, Topology

ReduceOp = Literal["sum", "min", "max", "product"]
# Of a buffer for which nothing was reserved.
UNRESERVED = -1


class Store(Protocol):
    """A key-value store that all ranks of a job reach: how they exchange addresses before they can move tensors."""

    address: str  # under which this rank reached it
    where: str  # the same with the port, for people

    def set(self, key: str, value: str) -> None:
        """Make `value` visible to every rank under `key`."""

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for `key` and return its value; raises TimeoutError, or RendezvousError if the store is gone."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0 and return the new value; atomic between ranks."""

    def has(self, key: str) -> bool:
        """Whether `key` is set, without waiting."""

    def disconnect(self) -> None:
        """End this process's connections to the store, so that a thread that waits for an answer waits no longer."""


@dataclass(frozen=True)
class InitContext:
    """The ranks once they have met: what a backend between them is started from."""

    topology: Topology
    places: Sequence[RankLocation]
    store: Store | None  # at which they met; None where there is one rank
    key: str  # of what the session keeps in the store
    interface: str | None  # towards the other nodes, where there are any and the user has not named one
    environ: MutableMapping[str, str]
    device: torch.device
    timeout_s: float


class Work(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Whether wait() would return at once."""

    def wait(self) -> torch.Tensor:
        """Finish the operation and return its result; raises CollectiveError. On CUDA only the current stream waits."""


@dataclass(frozen=True)
class Epilogue:
    """What is to be done, in place, with the first `count` elements of a result, piece by piece."""

    count: int
    settle: Callable[[torch.Tensor], object]


class Buffer(Protocol):
    """A place for values that are reduced again and again."""

    values: torch.Tensor  # flat; what the next reduction takes from this rank
    settles: bool  # the result itself, piece by piece, while it is in the processor's cache
    rows: weakref.WeakSet[Any]  # for the caller, of whatever lies in the memory of the values
    uses_without_rows: int  # of that memory, by tensors that are neither `values` nor the caller's

    def allreduce(self, op: ReduceOp, name: str, settling: Epilogue) -> Work:
        """Begin to reduce the values. The result lies in `values`, or where ranks share it: nobody may change it then,
        and it lasts until the next reduction begins.
        """


class LazyDescription:
    """An operation in the words of an error, which are found when somebody asks."""

    def __init__(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        self._said = kind, name, tensor

    def __str__(self) -> str:
        kind, name, tensor = self._said
        return f"{kind} {name!r} of {str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


class Backend(Protocol):
    """Moves tensors between `size` ranks. Every rank calls the same methods in the same order with the same names.

    Tensors given are contiguous, and stay untouched by the caller until the work is done. `name` is unique among the
    operations under way. Errors that leave a backend are dualdist's own, and do not name the operation: callers do.
    """

    name: str
    transport: str
    ranks: tuple[int, ...]  # the job's ranks that this backend joins, in ascending order
    rank: int  # this process's place among them, or -1
    size: int
    timeout_s: float  # how long an operation that starts now may wait for the other ranks
    supported_reduce_dtypes: frozenset[
        torch.dtype
    ]  # what allreduce_ takes; whatever else is reduced is converted before
    traceable: bool  # whether torch.compile may keep an allreduce in its graph
    done_means_all_started: bool  # whether an allreduce_ is done, also before wait(), once all ranks have begun it

    @property
    def is_open(self) -> bool:
        """Until close()."""

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        """Replace `buffer` on every rank by the reduction over all ranks."""

    def allgather(self, tensor: torch.Tensor, name: str) -> Work:
        """Concatenate equal shapes in rank order: (n, *s) -> (size*n, *s)."""

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Work:
        """Replace `buffer` on every rank by that of the rank whose place here is `root`."""

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> Work:
        """Send each rank i the next sent[i] elements of a flat tensor; what came, received[i] from rank i."""

    def reserve(self, nbytes: int, device: torch.device) -> int:
        """A place for a buffer of so many bytes on every rank: every rank calls this, and gets the same number."""

    def buffer(self, place: int, number: int, count: int, dtype: torch.dtype, device: torch.device) -> Buffer | None:
        """Buffer `number` at a place that was reserved, its values undefined; not between ranks, each of which chooses
        one for every reduction. Number 0 is always there; None where there is no room for another.
        """

    def drop(self, place: int) -> None:
        """Nobody will use the buffers of the place again, but may still look at what lies there: every rank says so."""

    def channel(self, key: str) -> Backend:
        """Another line between the same ranks, on which operations do not wait behind this one's."""

    def subgroup(self, ranks: Sequence[int], key: str) -> Backend:
        """A line between some of the job's ranks; every rank of the job calls this, and is -1 where it is left out."""

    def built_with(self) -> dict[str, int]:
        """For gloo, mpi and nccl: 0 where it is not there, else its version (NCCL's as a number) or 1."""

    def close(self) -> None:
        """Leave in order: nothing may be under way on any rank. Of a subgroup, every rank of the job calls this."""
