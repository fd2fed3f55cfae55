"""The backend over MPI, by mpi4py: for machines whose MPI knows their network, under launchers that start MPI.

Note [two ways to reduce]: MPI's blocking allreduce of large tensors is quicker than its nonblocking one, on Open MPI by
half, but knows no time limit: a thread makes that call. Small tensors do not repay the way to the thread and back; they
begin without blocking, and MPI is asked until they are done. MPI matches operations on a communicator by their order,
which the thread does not keep with other calls, so it has a communicator of its own.

Note [patience]: a thread inside MPI's call spins. Where it has no core of its own, it takes the time from the program
and, as the other rank spins too, waits for it longer: then the program waits a while before it goes on computing. It
must not wait for ever, for another rank may need it elsewhere first (in SyncBatchNorm, with a bucket not full yet).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import torch

from dualdist import mpi_world
from dualdist.backends.base import ReduceOp, Work
from dualdist.backends.buffers import PlainBuffer
from dualdist.backends.single import EVERY_DTYPE, Finished
from dualdist.deadline import Deadline, call_within
from dualdist.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    DualdistError,
    NotInitializedError,
    RankLostError,
    RendezvousError,
    UnsupportedError,
)
from dualdist.topology import Topology

T = TypeVar("T")

# MPI's names of the dtypes that every MPI reduces by every operation.
DATATYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.uint16: "UINT16_T",
    torch.int32: "INT32_T",
    torch.uint32: "UINT32_T",
    torch.int64: "INT64_T",
    torch.uint64: "UINT64_T",
}
OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}
UNTRACEABLE = (
    "torch.compile(fullgraph=True) cannot follow an operation of MPI, which is no part of torch: "
    "leave fullgraph out, or use the native backend"
)
CLOSED = "this group has been closed: by dd.shutdown(), or by dd.remove_group()"
# From so many bytes on the thread makes the call: Note [two ways to reduce].
LARGE_BYTES = 128 << 10
# Elements, or bytes, of one call: before version 4, MPI counts in 32 bits.
MOST = (1 << 31) - 1
# How long a program waits for the thread: Note [patience].
PATIENCE_S = 0.02
# How a rank waits: it asks, then lets others have the core in between, then sleeps. MPI moves on only when it is asked:
# nobody sleeps while the operation's bytes may still be moving, if at no more than this rate.
ASKS = 200
BUSY_S = 0.005
BYTES_PER_S = 500e6
PAUSE_S = 0.0001
CUDA = 0  # MPICH's MPIX_GPU_SUPPORT_CUDA


class Mpi:
    """MPI as it runs in this process. Calls are kept apart where it was not built to take several at once."""

    def __init__(self, api: Any, patience_s: float) -> None:
        self.api = api
        self.patience_s = patience_s
        self.is_concurrent = api.Query_thread() == api.THREAD_MULTIPLE
        self.takes_cuda = self.is_concurrent and torch.cuda.is_available() and takes_cuda(api.__file__)
        self.datatypes = {dtype: getattr(api, name) for dtype, name in DATATYPES.items()}
        self.ops = {op: getattr(api, name) for op, name in OPS.items()}
        self._lock = contextlib.nullcontext() if self.is_concurrent else threading.RLock()

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """In the block MPI is called, whose errors become ours."""
        try:
            with self._lock:
                yield
        except self.api.Exception as error:
            raise self.translated(error) from error

    def elements(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor whose dtype MPI knows, as mpi4py takes it."""
        return [self._memory(tensor), tensor.numel(), self.datatypes[tensor.dtype]]

    def bytes(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor of any dtype, as mpi4py takes it."""
        return [self._memory(tensor), tensor.nbytes, self.api.BYTE]

    def blocks(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor of any dtype, of which every rank has an equal part."""
        return [self._memory(tensor), self.api.BYTE]

    def _memory(self, tensor: torch.Tensor) -> Any:
        return self.api.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def translated(self, error: Exception) -> DualdistError:
        """Our error for one that MPI raised."""
        api, text = self.api, " ".join(str(error).split())
        kind = error.Get_error_class()  # type: ignore[attr-defined]
        if kind == getattr(api, "ERR_PROC_FAILED", None):
            return RankLostError(f"another rank ended ({text})")
        if kind in (api.ERR_TYPE, api.ERR_OP, api.ERR_COUNT, api.ERR_UNSUPPORTED_OPERATION):
            return UnsupportedError(f"MPI cannot move this ({text})")
        return CollectiveError(f"MPI failed ({text})")


class Asked:
    """Operations that were begun without blocking, and are over when MPI says so."""

    def __init__(self, line: MpiBackend, requests: list[Any], result: torch.Tensor, given: torch.Tensor) -> None:
        self._line = line
        self._requests = requests
        self._result = result
        self._given = given
        self._timeout_s = line.timeout_s
        line.under_way.add(self)  # MPI may write to this memory even after the program has given up waiting
        self._test = requests[0].Test if len(requests) == 1 else lambda: line.mpi.api.Request.Testall(requests)

    def done(self) -> bool:
        if not self._requests:
            return True
        if self._line.mpi.is_concurrent:
            is_over = self._asked()
        else:
            with self._line.mpi.calls():
                is_over = self._asked()
        if is_over:
            self._requests = []
            self._line.under_way.discard(self)
        return is_over

    def _asked(self) -> bool:
        try:
            return bool(self._test())
        except self._line.mpi.api.Exception as error:
            raise self._line.mpi.translated(error) from error

    def wait(self) -> torch.Tensor:
        for _ in range(ASKS):
            if self.done():
                return self._result
        deadline = Deadline(self._timeout_s)
        busy_until = time.monotonic() + BUSY_S + (self._result.nbytes + self._given.nbytes) / BYTES_PER_S
        while not self.done():
            if time.monotonic() < busy_until:
                os.sched_yield()
            elif not self._line.is_open:
                raise NotInitializedError(CLOSED)
            elif deadline.passed():
                raise late(self._timeout_s)
            else:
                deadline.sleep(PAUSE_S)
        return self._result


class Called:
    """An operation that a line's thread makes by a call that blocks."""

    def __init__(self, line: MpiBackend, call: Callable[[], object], result: torch.Tensor) -> None:
        self._line = line
        self._call = call
        self._result = result
        self._timeout_s = line.timeout_s
        self._error: DualdistError | None = None
        self._is_under_way = threading.Lock()
        self._is_under_way.acquire()
        line.under_way.add(self)

    def make(self) -> None:
        """Make the call; the thread does this."""
        try:
            with torch.cuda.device_of(self._result):
                self._call()
        except self._line.mpi.api.Exception as error:
            self._error = self._line.mpi.translated(error)
            self._error.__cause__ = error
        self._line.under_way.discard(self)
        self._is_under_way.release()

    def is_over_within(self, seconds: float) -> bool:
        """Whether the call returns in this time."""
        if not self._is_under_way.acquire(timeout=seconds):
            return False
        self._is_under_way.release()
        return True

    def done(self) -> bool:
        return not self._is_under_way.locked()

    def wait(self) -> torch.Tensor:
        if not self.is_over_within(self._timeout_s):
            raise late(self._timeout_s)
        if self._error is not None:
            raise self._error
        return self._result


class Staged:
    """Work on a copy in the host's memory; the result goes back to the GPU."""

    def __init__(self, work: Work, target: torch.Tensor, *, in_place: bool) -> None:
        self._work = work
        self._target = target
        self._in_place = in_place
        self._is_back = False

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> torch.Tensor:
        if not self._is_back:
            result = self._work.wait()
            if not self._in_place:
                self._target = self._target.new_empty(result.shape)
            self._target.copy_(result, non_blocking=True)
            self._is_back = True
        return self._target


class MpiBackend:
    """Moves tensors over two communicators of the same ranks: Note [two ways to reduce].

    There are none where there is nobody to talk to, or this process is no member.
    """

    name = "mpi"
    transport = "mpi"
    traceable = False

    def __init__(
        self, mpi: Mpi | None, comms: tuple[Any, ...], ranks: Sequence[int], rank: int, timeout_s: float
    ) -> None:
        self.mpi: Any = mpi
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self.reducible = frozenset(DATATYPES) if self.size > 1 else EVERY_DTYPE
        self.is_open = True
        self.under_way: set[Asked | Called] = set()
        self._comms = comms
        self._calls: queue.SimpleQueue[Called | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._children: list[MpiBackend] = []

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> Work:
        return self._moved(buffer, lambda given: self._allreduce(given, self.mpi.ops[op]), in_place=True)

    def _allreduce(self, buffer: torch.Tensor, op: Any) -> Work:
        mpi, pieces = self.mpi, cut(buffer)

        def call() -> None:
            for piece in pieces:
                self._comms[1].Allreduce(mpi.api.IN_PLACE, mpi.elements(piece), op)

        if mpi.is_concurrent and (buffer.nbytes >= LARGE_BYTES or buffer.is_cuda):
            return self._call(call, buffer)
        comm = self._comms[0]
        return self._ask(
            lambda: [comm.Iallreduce(mpi.api.IN_PLACE, mpi.elements(piece), op) for piece in pieces], buffer, buffer
        )

    def allgather(self, tensor: torch.Tensor, name: str) -> Work:
        return self._moved(tensor, self._allgather)

    def _allgather(self, tensor: torch.Tensor) -> Work:
        mpi, comm = self.mpi, self._comms[0]
        output = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        if tensor.nbytes <= MOST:
            return self._ask(lambda: [comm.Iallgather(mpi.bytes(tensor), mpi.blocks(output))], output, tensor)
        blocks = output.chunk(self.size)
        blocks[self.rank].copy_(tensor)
        return self._ask(
            lambda: [comm.Ibcast(mpi.bytes(piece), root) for root, block in enumerate(blocks) for piece in cut(block)],
            output,
            tensor,
        )

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Work:
        return self._moved(buffer, lambda given: self._broadcast(given, root), in_place=True)

    def _broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        mpi, comm = self.mpi, self._comms[0]
        return self._ask(lambda: [comm.Ibcast(mpi.bytes(piece), root) for piece in cut(buffer)], buffer, buffer)

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
                *(comm.Irecv(mpi.bytes(piece), other) for other in others for piece in cut(taken[other])),
                *(comm.Isend(mpi.bytes(piece), other) for other in others for piece in cut(given[other])),
            ]

        return self._ask(begin, output, tensor)

    def reserve(self, nbytes: int, device: torch.device) -> int:
        return 0

    def buffer(self, place: int, count: int, dtype: torch.dtype, device: torch.device) -> PlainBuffer:
        return PlainBuffer(torch.empty(count, dtype=dtype, device=device), self.allreduce_)

    def traced_allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        raise UnsupportedError(UNTRACEABLE)

    def channel(self, key: str) -> MpiBackend:
        return self._child(self.ranks, self.rank, lambda comm: comm.Dup())

    def subgroup(self, ranks: Sequence[int], key: str) -> MpiBackend:
        mine = self.ranks[self.rank]
        if mine not in ranks:
            return MpiBackend(None, (), ranks, -1, self.timeout_s)
        places = [self.ranks.index(rank) for rank in ranks]

        def create(comm: Any) -> Any:
            with freed(comm.Get_group()) as everybody, freed(everybody.Incl(places)) as members:
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
        if not self._comms or (is_alike and tensor.numel() == 0):
            return Finished(tensor if in_place else torch.cat([tensor] * self.size))
        if not tensor.is_cuda:
            return start(tensor)
        if not self.mpi.takes_cuda:
            return Staged(start(tensor.cpu().pin_memory()), tensor, in_place=in_place)
        torch.cuda.current_stream(tensor.device).synchronize()
        return start(tensor)

    def _ask(self, begin: Callable[[], list[Any]], result: torch.Tensor, given: torch.Tensor) -> Asked:
        with self.mpi.calls():
            return Asked(self, begin(), result, given)

    def _call(self, call: Callable[[], object], result: torch.Tensor) -> Called:
        if self._thread is None:
            self._thread = threading.Thread(target=self._make_calls, name="dualdist-mpi", daemon=True)
            self._thread.start()
        work = Called(self, call, result)
        self._calls.put(work)
        if self.mpi.patience_s:
            work.is_over_within(min(self.mpi.patience_s + result.nbytes / BYTES_PER_S, self.timeout_s))
        return work

    def _make_calls(self) -> None:
        while (work := self._calls.get()) is not None:
            work.make()


def late(timeout_s: float) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(f"not all ranks arrived within {timeout_s:g} s")


def cut(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensor in pieces that MPI can count the bytes of; none where there is nothing."""
    if 0 < tensor.nbytes <= MOST:
        return (tensor,)
    return tensor.view(-1).split(MOST // tensor.element_size()) if tensor.nbytes else ()


@contextlib.contextmanager
def freed(group: Any) -> Iterator[Any]:
    """One of MPI's groups of processes, for the block."""
    try:
        yield group
    finally:
        group.Free()


def takes_cuda(library: str) -> bool:
    """Whether the MPI that this library is linked to says that it takes addresses in a GPU's memory."""
    symbols = ctypes.CDLL(library)
    if hasattr(symbols, "MPIX_Query_cuda_support"):  # Open MPI, and MPICH since version 4
        return bool(symbols.MPIX_Query_cuda_support())
    if hasattr(symbols, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        failed = symbols.MPIX_GPU_query_support(CUDA, ctypes.byref(answer))
        return not failed and bool(answer.value)
    return False


def patience_s(cores: int, cores_of_machine: int, local_size: int, threads: int) -> float:
    """How long a program waits for the thread, not at all where each rank has a core for it: Note [patience].

    Ranks that may use all cores of the machine share them.
    """
    own = cores // local_size if cores == cores_of_machine else cores
    return 0.0 if own > threads else PATIENCE_S


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
    cores = len(os.sched_getaffinity(0))
    mpi = Mpi(api, patience_s(cores, os.cpu_count() or 1, topology.local_size, torch.get_num_threads()))
    backend = MpiBackend(mpi, (), range(topology.size), topology.rank, timeout_s)
    backend.open(api.COMM_WORLD)
    atexit.register(backend.at_exit)
    return backend
