"""The backend over MPI, by mpi4py: for machines whose MPI knows their network, under launchers that start MPI.

Note [two ways to reduce]: MPI's blocking allreduce of large tensors is quicker than its nonblocking one, but knows no
time limit: a thread makes that call. Small tensors do not repay the way to the thread and back; they begin without
blocking, and MPI is asked until they are done. MPI matches operations on a communicator by their order, which the
thread does not keep with other calls, so it has a communicator of its own. Best of 20, 2 ranks on 2 cores, 8 bytes and
25 MiB: Open MPI 4.1.8 1.2 us and 6.1 ms blocking, 1.9 us and 15.7 ms nonblocking, by the thread 4.9 us; Open MPI 5.0.11
1.0 us and 5.9 ms, 1.9 us and 15.0 ms; MPICH 4.3.2 1.4 us and 8.3 ms, 2.0 us and 9.5 ms.

Note [patience]: a thread inside MPI's call spins. Where it has no core of its own, it takes the time from the program
and, as the other rank spins too, waits for it longer: then the program waits a while before it goes on computing. It
must not wait for ever, for another rank may need it elsewhere first (in SyncBatchNorm, with a bucket not full yet).
Step of ResNet-18 over that of DDP, 2 ranks on 2 cores, medians of two jobs: nonblocking 1.05, thread alone 0.93 and
0.96, thread when backward has ended 0.88 and 0.87, with patience 0.86 and 0.85, waiting for ever 0.86 and 0.86.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import torch

from dualdist.backends.base import ReduceOp, Work
from dualdist.backends.buffers import PlainBuffers
from dualdist.backends.mpi import world as mpi_world
from dualdist.backends.mpi.work import (
    BYTES_PER_S,
    CLOSED,
    DATATYPES,
    HostStagedWork,
    MpiBlockingCall,
    MpiCalls,
    MpiRequest,
)
from dualdist.backends.single import EVERY_DTYPE, CompletedWork
from dualdist.errors import (
    CollectiveTimeoutError,
    DualdistError,
    NotInitializedError,
    RendezvousError,
    UnsupportedError,
)
from dualdist.topology import Topology
from dualdist.utils.deadline import call_within
from dualdist.utils.machine import machine_cores, usable_cores

T = TypeVar("T")

# From so many bytes on the thread makes the call: Note [two ways to reduce].
LARGE_BYTES = 128 << 10
# Elements, or bytes, of one call: before version 4, MPI counts in 32 bits.
MAX_COUNT = (1 << 31) - 1
# How long a program waits for the thread: Note [patience].
WAIT_BUDGET_S = 0.02


class MpiBackend(PlainBuffers):
    """Moves tensors over two communicators of the same ranks: Note [two ways to reduce].

    There are none where there is nobody to talk to, or this process is no member.
    """

    name = "mpi"
    transport = "mpi"
    traceable = False
    done_means_all_started = True

    def __init__(
        self, mpi: MpiCalls | None, comms: tuple[Any, ...], ranks: Sequence[int], rank: int, timeout_s: float
    ) -> None:
        self.mpi: Any = mpi
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self.supported_reduce_dtypes = frozenset(DATATYPES) if self.size > 1 else EVERY_DTYPE
        self.is_open = True
        self.under_way: set[MpiRequest | MpiBlockingCall] = set()
        self._comms = comms
        self._calls: queue.SimpleQueue[MpiBlockingCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._children: list[MpiBackend] = []

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        return self._moved(buffer, lambda given: self._allreduce(given, self.mpi.ops[op]), in_place=True)

    def _allreduce(self, buffer: torch.Tensor, op: Any) -> Work:
        mpi, pieces, (asked, called) = self.mpi, split_calls(buffer), self._comms
        if mpi.is_concurrent and (buffer.nbytes >= LARGE_BYTES or buffer.is_cuda):
            return self._call(
                lambda: [called.Allreduce(mpi.api.IN_PLACE, mpi.elements(piece), op) for piece in pieces], buffer
            )
        return self._ask(
            lambda: [asked.Iallreduce(mpi.api.IN_PLACE, mpi.elements(piece), op) for piece in pieces], buffer, buffer
        )

    def allgather(self, tensor: torch.Tensor, name: str) -> Work:
        return self._moved(tensor, self._allgather)

    def _allgather(self, tensor: torch.Tensor) -> Work:
        mpi, comm = self.mpi, self._comms[0]
        output = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        if tensor.nbytes <= MAX_COUNT:
            return self._ask(lambda: [comm.Iallgather(mpi.bytes(tensor), mpi.blocks(output))], output, tensor)
        blocks = output.chunk(self.size)
        blocks[self.rank].copy_(tensor)
        return self._ask(
            lambda: [
                comm.Ibcast(mpi.bytes(piece), root) for root, block in enumerate(blocks) for piece in split_calls(block)
            ],
            output,
            tensor,
        )

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Work:
        return self._moved(buffer, lambda given: self._broadcast(given, root), in_place=True)

    def _broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        mpi, comm = self.mpi, self._comms[0]
        return self._ask(lambda: [comm.Ibcast(mpi.bytes(piece), root) for piece in split_calls(buffer)], buffer, buffer)

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> Work:
        return self._moved(tensor, lambda given: self._alltoall(given, sent, received), is_alike=False)

    def _alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        """MPI's own counts distances in 32 bits, which one rank may exceed alone: messages between pairs do not."""
        mpi, comm = self.mpi, self._comms[0]
        output = tensor.new_empty(sum(received))
        given, taken = tensor.split(list(sent)), output.split(list(received))
        taken[self.rank].copy_(given[self.rank])
        others = [place for place in range(self.size) if place != self.rank]

        def begin() -> list[Any]:
            return [
                *(comm.Irecv(mpi.bytes(piece), other) for other in others for piece in split_calls(taken[other])),
                *(comm.Isend(mpi.bytes(piece), other) for other in others for piece in split_calls(given[other])),
            ]

        return self._ask(begin, output, tensor)

    def channel(self, key: str) -> MpiBackend:
        return self._child(self.ranks, self.rank, lambda comm: comm.Dup())

    def subgroup(self, ranks: Sequence[int], key: str) -> MpiBackend:
        mine = self.ranks[self.rank]
        if mine not in ranks:
            return MpiBackend(None, (), ranks, -1, self.timeout_s)
        places = [self.ranks.index(rank) for rank in ranks]

        def create(comm: Any) -> Any:
            with freeing(comm.Get_group()) as everybody, freeing(everybody.Incl(places)) as members:
                return comm.Create_group(members)

        return self._child(ranks, list(ranks).index(mine), create)

    def built_with(self) -> dict[str, int]:
        return {"gloo": 0, "mpi": 1, "nccl": 0}

    def close(self) -> None:
        self.is_open = False
        atexit.unregister(self.at_exit)
        for child in self._children:
            child.close()
        self._children.clear()
        self._calls.put(None)
        if self._comms and not self.under_way:  # else MPI still needs them
            comms = self._comms
            self._within(lambda: [comm.Free() for comm in comms], "could not leave a communicator")
        self._comms = ()

    def at_exit(self) -> None:
        """A process that ends without close() waits for the others no longer than in an operation."""
        mpi_world.end_within(self.timeout_s, self.mpi.api)

    def _child(self, ranks: Sequence[int], rank: int, create: Callable[[Any], Any]) -> MpiBackend:
        comms = self._within(lambda: self._created(create), "could not make a communicator") if self._comms else ()
        child = MpiBackend(self.mpi, comms, ranks, rank, self.timeout_s)
        self._children.append(child)
        return child

    def open(self, world: Any) -> None:
        """Make communicators of the program's, which stays as it is."""
        self._comms = (world, world)
        self._comms = self._within(lambda: self._created(lambda comm: comm.Dup()), "could not make a communicator")

    def _created(self, create: Callable[[Any], Any]) -> tuple[Any, ...]:
        comms = tuple(create(comm) for comm in self._comms)
        for comm in comms:
            comm.Set_errhandler(self.mpi.api.ERRORS_RETURN)
        return comms

    def _within(self, call: Callable[[], T], what: str) -> T:
        """call(), which may block in MPI, within the time limit."""

        def locked() -> T:
            with self.mpi.calls():
                return call()

        def error() -> DualdistError:
            return CollectiveTimeoutError(f"{what} within {self.timeout_s:g} s: another rank does not answer")

        return call_within(self.timeout_s, locked, error)

    def _moved(
        self,
        tensor: torch.Tensor,
        start: Callable[[torch.Tensor], Work],
        *,
        in_place: bool = False,
        is_alike: bool = True,
    ) -> Work:
        """start() with a tensor that MPI can reach; what moves nothing on any rank is done already."""
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        if self.size == 1 or (is_alike and tensor.numel() == 0):
            return CompletedWork(tensor if in_place else torch.cat([tensor] * self.size))
        if not tensor.is_cuda:
            return start(tensor)
        if self.mpi.takes_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
            return start(tensor)
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        return HostStagedWork(start(copy), tensor, in_place=in_place)

    def _ask(self, begin: Callable[[], list[Any]], result: torch.Tensor, given: torch.Tensor) -> Work:
        with self.mpi.calls():
            requests = begin()
            return (
                MpiRequest(self, requests, result, given) if requests else CompletedWork(result)
            )  # as far as this rank goes

    def _call(self, call: Callable[[], object], result: torch.Tensor) -> MpiBlockingCall:
        if self._thread is None:
            self._thread = threading.Thread(target=self._make_calls, name="dualdist-mpi", daemon=True)
            self._thread.start()
        work = MpiBlockingCall(self, call, result)
        self._calls.put(work)
        if self.mpi.patience_s:
            work.is_over_within(min(self.mpi.patience_s + result.nbytes / BYTES_PER_S, self.timeout_s))
        return work

    def _make_calls(self) -> None:
        while (work := self._calls.get()) is not None:
            work.make()


def split_calls(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensor in pieces that MPI can count the bytes of; none where there is nothing."""
    if 0 < tensor.nbytes <= MAX_COUNT:
        return (tensor,)
    return tensor.view(-1).split(MAX_COUNT // tensor.element_size()) if tensor.nbytes else ()


@contextlib.contextmanager
def freeing(group: Any) -> Iterator[Any]:
    """One of MPI's groups of processes, for the block."""
    try:
        yield group
    finally:
        group.Free()


def wait_budget_s(cores: int, cores_of_machine: int, local_size: int, threads: int) -> float:
    """How long a program waits for the thread, not at all where each rank has a core for it: Note [patience].

    Ranks that may use all cores of the machine share them.
    """
    own = cores // local_size if cores == cores_of_machine else cores
    return 0.0 if own > threads else WAIT_BUDGET_S


def start(topology: Topology, environ: MutableMapping[str, str], timeout_s: float) -> MpiBackend:
    """Start MPI, unless it runs already; one rank needs none where its launcher has none. MPI ends with the process."""
    if not topology.mpi:
        if topology.size > 1:
            raise UnsupportedError(
                f"the backend mpi was asked for, but MPI was not started by {topology.launcher}: use mpirun, mpiexec, "
                "horovodrun --mpi or srun --mpi=pmix, or choose another backend"
            )
        return MpiBackend(None, (), [0], 0, timeout_s)

    def error() -> DualdistError:
        return RendezvousError(
            f"rank {topology.rank} waited {timeout_s:g} s in MPI for all {topology.size} ranks: "
            "did one of them end, or never call dd.init()?"
        )

    api = call_within(timeout_s, lambda: mpi_world.start(topology, environ), error)
    cores = usable_cores(), machine_cores()
    mpi = MpiCalls(api, wait_budget_s(*cores, topology.local_size, torch.get_num_threads()))
    backend = MpiBackend(mpi, (), range(topology.size), topology.rank, timeout_s)
    backend.open(api.COMM_WORLD)
    atexit.register(backend.at_exit)
    return backend
