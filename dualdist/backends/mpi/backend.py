"""Backend over MPI by mpi4py, for machines whose MPI is configured for their network.

Note [two ways to reduce]: MPI's blocking allreduce of large tensors is faster than its nonblocking one, but has no
timeout, so a thread calls it. Small tensors do not repay the switch to the thread: they use nonblocking calls, which
are polled. MPI matches operations on a communicator by their order, which the thread does not keep relative to other
calls, so the thread has its own communicator. A blocking call spins until the last rank is there, so the thread polls a
nonblocking barrier first. Best of 20, 2 ranks on 2 cores, 8 bytes and 25 MiB: Open MPI 4.1.8 1.2 us and 6.1 ms
blocking, 1.9 us and 15.7 ms nonblocking, 4.9 us for 8 bytes by the thread; Open MPI 5.0.11 1.0 us and 5.9 ms, 1.9 us
and 15.0 ms; MPICH 4.3.2 1.4 us and 8.3 ms, 2.0 us and 9.5 ms.
How long a program waits for the thread: Note [wait budget] in backends/wait_budget.py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import ALL_DTYPES, Backend, InitContext, filled, gathered
from dualdist.backends.mpi import world as mpi_world
from dualdist.backends.mpi.work import DATATYPES, MpiBlockingCall, MpiCalls, MpiRequest, Running
from dualdist.backends.operation import Completed, Operation
from dualdist.backends.wait_budget import wait_budget_s
from dualdist.errors import (
    CLOSED,
    CollectiveTimeoutError,
    DualdistError,
    NotInitializedError,
    UnsupportedError,
)
from dualdist.utils import accelerator
from dualdist.utils.deadline import call_within

T = TypeVar("T")

# The thread reduces tensors of at least this size: Note [two ways to reduce].
LARGE_BYTES = 128 << 10
ABANDON_S = 0.01  # in this time the thread notices that its call was abandoned, unless it is inside MPI
# The most elements or bytes of one call: MPI before version 4 counts in 32 bits.
MAX_COUNT = (1 << 31) - 1


class MpiBackend(Backend):
    """Moves tensors over a nonblocking and a blocking communicator: Note [two ways to reduce].

    A backend of one rank, or without this process, has no communicators.
    """

    name = "mpi"
    transport = "mpi"

    def __init__(
        self,
        mpi: MpiCalls | None,
        comms: tuple[Any, ...],
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        wait_budget_s: float = 0.0,
    ) -> None:
        self.mpi: Any = mpi
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self.supported_reduce_dtypes = frozenset(DATATYPES) if self.size > 1 else ALL_DTYPES
        self.devices = frozenset(("cpu",)) if mpi is None else mpi.devices
        self.is_open = True
        self.wait_budget_s = wait_budget_s
        self._comms = comms
        self._running: Running = set()
        self._calls: queue.SimpleQueue[MpiBlockingCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_abandoned = False
        self._children: list[MpiBackend] = []
        self._parent: MpiBackend | None = None  # until close()

    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> Operation[torch.Tensor]:
        def start(given: torch.Tensor) -> Operation[torch.Tensor]:
            mpi, pieces, (nonblocking, blocking) = self.mpi, split_calls(given), self._comms
            reduction = mpi.ops[op]

            def reduce() -> None:
                mpi.meet(blocking, lambda: self._is_abandoned)
                for piece in pieces:
                    blocking.Allreduce(mpi.api.IN_PLACE, mpi.elements(piece), reduction)

            if mpi.is_concurrent and (given.nbytes >= LARGE_BYTES or given.device.type != "cpu"):
                return self._call_in_thread(reduce, given)
            return self._start_requests(
                lambda: [nonblocking.Iallreduce(mpi.api.IN_PLACE, mpi.elements(piece), reduction) for piece in pieces],
                given,
                given,
            )

        return self._start(filled(buffer, source), start, in_place=True)

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Operation[torch.Tensor]:
        return self._start(tensor, lambda given: self._allgather(given, output), output=output)

    def _allgather(self, tensor: torch.Tensor, output: torch.Tensor | None) -> Operation[torch.Tensor]:
        mpi, comm = self.mpi, self._comms[0]
        output = gathered(tensor, self.size, output)
        if tensor.nbytes <= MAX_COUNT:
            return self._start_requests(
                lambda: [comm.Iallgather(mpi.bytes(tensor), mpi.blocks(output))], output, tensor
            )
        blocks = output.chunk(self.size)
        blocks[self.rank].copy_(tensor)
        return self._start_requests(
            lambda: [
                comm.Ibcast(mpi.bytes(piece), root) for root, block in enumerate(blocks) for piece in split_calls(block)
            ],
            output,
            tensor,
        )

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Operation[torch.Tensor]:
        def start(given: torch.Tensor) -> Operation[torch.Tensor]:
            mpi, comm = self.mpi, self._comms[0]
            return self._start_requests(
                lambda: [comm.Ibcast(mpi.bytes(piece), root) for piece in split_calls(given)], given, given
            )

        return self._start(buffer, start, in_place=True)

    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str
    ) -> Operation[torch.Tensor]:
        return self._start(tensor, lambda given: self._alltoall(given, sent, received), same_count=False)

    def _alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Operation[torch.Tensor]:
        """Exchange messages between pairs: MPI's alltoall has 32-bit displacements, which a single rank may exceed."""
        mpi, comm = self.mpi, self._comms[0]
        output = tensor.new_empty(sum(received))
        given, taken = tensor.split(list(sent)), output.split(list(received))
        taken[self.rank].copy_(given[self.rank])
        others = [other for other in range(self.size) if other != self.rank]

        def begin() -> list[Any]:
            return [
                *(comm.Irecv(mpi.bytes(piece), other) for other in others for piece in split_calls(taken[other])),
                *(comm.Isend(mpi.bytes(piece), other) for other in others for piece in split_calls(given[other])),
            ]

        return self._start_requests(begin, output, tensor)

    def connect_peers(self) -> None:
        """See PointToPoint; MPI connects when it is needed."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Operation[torch.Tensor]:
        def start(given: torch.Tensor) -> Operation[torch.Tensor]:
            mpi, comm = self.mpi, self._comms[0]
            return self._start_requests(
                lambda: [comm.Isend(mpi.bytes(piece), to, tag + 1) for piece in split_calls(given)], given, given
            )

        return self._start(tensor, start)

    def receive_(self, buffer: torch.Tensor, source: int | None, tag: int) -> MpiRequest:
        """See PointToPoint; alltoall has tag 0."""
        if buffer.device.type != "cpu" or not 0 < buffer.nbytes <= MAX_COUNT:
            raise UnsupportedError(f"MPI receives 1 to {MAX_COUNT} bytes into host memory, not {buffer.nbytes}")
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        mpi, comm = self.mpi, self._comms[0]
        with mpi.calls():
            request = comm.Irecv(mpi.bytes(buffer), mpi.api.ANY_SOURCE if source is None else source, tag + 1)
            return MpiRequest(mpi, self._running, [request], buffer, buffer, mpi.api.Status())

    def duplicate(self, key: str) -> MpiBackend:
        return self._child(self.ranks, self.rank, lambda comm: comm.Dup())

    def subgroup(self, ranks: Sequence[int], key: str) -> MpiBackend:
        own_rank = self.ranks[self.rank]
        if own_rank not in ranks:
            return MpiBackend(None, (), ranks, -1, self.timeout_s)
        indices = [self.ranks.index(rank) for rank in ranks]

        def create(comm: Any) -> Any:
            with contextlib.ExitStack() as groups:
                parent = comm.Get_group()
                groups.callback(parent.Free)
                members = parent.Incl(indices)
                groups.callback(members.Free)
                return comm.Create_group(members)

        return self._child(ranks, list(ranks).index(own_rank), create)

    def built_with(self) -> dict[str, int]:
        return {"gloo": 0, "mpi": 1, "nccl": 0}

    def abandon(self) -> None:
        """End the thread's wait for other ranks, before MPI is finished."""
        self._is_abandoned = True

    def close(self) -> None:
        self.is_open = False
        self.abandon()
        atexit.unregister(self.at_exit)
        for child in list(self._children):
            child.close()
        parent, self._parent = self._parent, None
        if parent is not None:
            parent._children.remove(self)
        self._end_thread(ABANDON_S)
        if self._running:  # MPI writes to their tensors, and uses the communicators: they stay until the process ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._running))
            atexit.register(mpi_world.end_beside_calls, self.timeout_s, self.mpi.api)  # runs before MPI is finished
        elif self._comms:
            comms = self._comms
            self._within(lambda: [comm.Free() for comm in comms], "could not free a communicator")
        self._comms = ()

    def at_exit(self) -> None:
        """Limit the wait for other ranks in a process that exits without close()."""
        mpi_world.end_within(self.timeout_s, self.mpi.api)
        self._end_thread(self.timeout_s)

    def _end_thread(self, timeout_s: float) -> None:
        """Let the thread end after the calls that it has; wait for it, as it must not call an MPI that is finished."""
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
        for child in self._children:
            child._end_thread(timeout_s)

    def _child(self, ranks: Sequence[int], rank: int, create: Callable[[Any], Any]) -> MpiBackend:
        comms = (
            self._within(lambda: self._create_comms(create), "could not create a communicator") if self._comms else ()
        )
        child = MpiBackend(self.mpi, comms, ranks, rank, self.timeout_s, self.wait_budget_s)
        child._parent = self
        self._children.append(child)
        return child

    def _create_comms(self, create: Callable[[Any], Any]) -> tuple[Any, ...]:
        comms = tuple(create(comm) for comm in self._comms)
        for comm in comms:
            comm.Set_errhandler(self.mpi.api.ERRORS_RETURN)
        return comms

    def _within(self, call: Callable[[], T], problem: str) -> T:
        """Return call(), which may block in MPI, or raise CollectiveTimeoutError."""

        def locked() -> T:
            with self.mpi.calls():
                return call()

        late = f"{problem} within {self.timeout_s:g} s: another rank does not answer"
        return call_within(self.timeout_s, locked, lambda: CollectiveTimeoutError(late))

    def _start(
        self,
        tensor: torch.Tensor,
        start: Callable[[torch.Tensor], Operation[torch.Tensor]],
        *,
        in_place: bool = False,
        same_count: bool = True,
        output: torch.Tensor | None = None,
    ) -> Operation[torch.Tensor]:
        """Return start(), once the tensor has its values; an operation without data on any rank is complete at once."""
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        if self.size == 1 or (same_count and tensor.numel() == 0):
            if in_place:
                return Completed(tensor)
            every = torch.cat([tensor] * self.size)
            return Completed(every if output is None else output.copy_(every))
        stream = accelerator.current_stream(tensor.device)
        if stream is not None:  # MPI knows no streams
            stream.synchronize()
        return start(tensor)

    def _start_requests(
        self, begin: Callable[[], list[Any]], result: torch.Tensor, given: torch.Tensor
    ) -> Operation[torch.Tensor]:
        with self.mpi.calls():
            requests = begin()
            return MpiRequest(self.mpi, self._running, requests, result, given) if requests else Completed(result)

    def _call_in_thread(self, call: Callable[[], object], result: torch.Tensor) -> MpiBlockingCall:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_calls, name="dualdist-mpi", daemon=True)
            self._thread.start()
        operation = MpiBlockingCall(self.mpi, self._running, call, result)
        self._calls.put(operation)
        return operation

    def _run_calls(self) -> None:
        while (operation := self._calls.get()) is not None:
            operation.run()


def split_calls(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a tensor into pieces whose bytes MPI can count; none if it is empty."""
    if 0 < tensor.nbytes <= MAX_COUNT:
        return (tensor,)
    return tensor.view(-1).split(MAX_COUNT // tensor.element_size()) if tensor.nbytes else ()


def start(context: InitContext) -> MpiBackend:
    """Start MPI unless it runs already; a job of one rank needs none if its launcher has none. MPI ends at exit."""
    topology, timeout_s = context.topology, context.timeout_s
    if not topology.mpi:
        if topology.size > 1:
            raise UnsupportedError(
                f"the backend mpi was requested, but MPI was not started by {topology.launcher}: use mpirun, mpiexec, "
                "horovodrun --mpi or srun --mpi=pmix, or choose another backend"
            )
        return MpiBackend(None, (), [0], 0, timeout_s)

    def late() -> DualdistError:
        return mpi_world.start_timeout(topology, "MPI", timeout_s)

    api = call_within(timeout_s, lambda: mpi_world.start(topology, context.environ), late)
    budget_s = wait_budget_s(topology.local_size, torch.get_num_threads())
    world = (api.COMM_WORLD,) * 2
    program = MpiBackend(MpiCalls(api), world, range(topology.size), topology.rank, timeout_s, budget_s)
    backend = program.duplicate("")  # the program's own communicator is left unchanged
    atexit.register(backend.at_exit)
    return backend
