"""dualdist's transports as a process group of torch.distributed.

Private API of torch, tried with torch 2.13.0: torch puts a subclass of ProcessGroup in place of its own process group,
and calls its methods by their names, from C++ (DDP, functional collectives) through a trampoline that knows some of
them. The aliases at the end are such names, most of them those before torch 2.13.

What the transports lack is built of what they have: a gather or scatter is an alltoall in which most ranks send
nothing; a reduction to one rank, and a reduce-scatter, an allreduce of a copy.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import Backend, PointToPoint
from dualdist.backends.control_plane import as_bytes
from dualdist.backends.operation import Completed, Converted, Operation, Staged, Stages
from dualdist.c10d.tensors import Tensors, check, copied, flattened, in_place, own, plain, stored
from dualdist.c10d.work import Callbacks, GroupWork, PeerWork
from dualdist.collectives import reductions
from dualdist.collectives.reductions import sparse_sum
from dualdist.engine.channel import Channel, Transfer
from dualdist.engine.monitor import Monitor
from dualdist.errors import CollectiveError, UnsupportedError, UsageError
from dualdist.utils.deadline import stop_at_exit

F = TypeVar("F", bound=Callable[..., Any])
Op: Any = dist.ReduceOp.RedOpType
# Untyped, since the class declares overloads for one tensor, which torch.distributed itself does not call.
ProcessGroup: Any = dist.ProcessGroup
OPS: dict[Any, ReduceOp] = {Op.SUM: "sum", Op.MIN: "min", Op.MAX: "max", Op.PRODUCT: "product"}
BITWISE = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}


@dataclass(frozen=True)
class GroupBackend:
    """The backend of a process group, the monitor that names its missing ranks, and how it is closed."""

    transport: Backend
    monitor: Monitor
    close: Callable[[], None]
    wait_budget_s: float  # Note [wait budget]


def latched(method: F) -> F:
    """Close the latch also if an interrupt comes before the operation begins.

    The caller may be C++ code in the middle of several calls, such as DDP's when it forms new buckets: called again, it
    would pair the first one with the second of the other ranks.
    """

    @functools.wraps(method)
    def call(self: DualdistGroup, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (TypeError, ValueError):  # a wrong call, which all ranks make
            raise
        except BaseException as error:
            self._channel.latch.fail(error, method.__name__)
            raise

    return cast(F, call)


class DualdistGroup(ProcessGroup):  # type: ignore[misc]
    """A process group over a backend of dualdist."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, members: GroupBackend, name: str, timeout_s: float
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self.members = members
        self._backend = members.transport
        self._name = name
        self._description = ""
        self._count = 0
        self._channel = Channel(members.transport, members.monitor, timeout_s, wait_budget_s=members.wait_budget_s)
        self._callbacks = Callbacks()
        atexit.register(self._at_exit)

    # torch keeps these in its own backends, of which there is none here.

    def getBackendName(self) -> str:
        return "dualdist"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> DualdistGroup:
        return self  # asked by torch 2.15 whether it coalesces calls, which it does not

    # Operations

    @latched
    def allreduce(self, given: Tensors | torch.Tensor, opts: Any = None) -> GroupWork:
        tensors = [given] if isinstance(given, torch.Tensor) else given  # DDP passes one tensor in join()
        opts = opts or c10d.AllreduceOptions()

        def begin(tensor: torch.Tensor, name: str) -> Operation[torch.Tensor]:
            if tensor.is_sparse:
                return self._allreduce_sparse(tensor, opts.reduceOp.op, name)
            return in_place(tensor, lambda flat: self._allreduce(flat, opts.reduceOp.op, name))

        return self._submit("allreduce", opts, [tensors], begin)

    @latched
    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        root = self._root(opts)

        def begin(tensor: torch.Tensor, name: str) -> Operation[torch.Tensor]:
            work = self._allreduce(copied(tensor), opts.reduceOp.op, name)
            return stored(work, [tensor] if self.rank() == root else [])

        return self._submit("reduce", opts, [tensors], begin)

    @latched
    def broadcast(self, tensors: Tensors, opts: Any) -> GroupWork:
        root = self._root(opts)

        def begin(tensor: torch.Tensor, name: str) -> Operation[torch.Tensor]:
            return in_place(tensor, lambda flat: self._backend.broadcast_(as_bytes(flat), root, name))

        return self._submit("broadcast", opts, [tensors], begin)

    @latched
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        def begin(into: Tensors, tensor: torch.Tensor, name: str) -> Operation[torch.Tensor]:
            return stored(self._gather_bytes(tensor, name), self._one_each(into, "allgather", tensor))

        return self._submit("allgather", opts, [outputs, inputs], begin)

    @latched
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        # outputs[rank][number], unlike in allgather
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    @latched
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        return self._submit("allgather", opts, [outputs, inputs], self._gather_into)

    @latched
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> GroupWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    @latched
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        def begin(output: torch.Tensor, tensor: torch.Tensor, name: str) -> Operation[torch.Tensor]:
            return self._reduce_scatter(output, copied(tensor), opts.reduceOp.op, name)

        return self._submit("reduce_scatter", opts, [outputs, inputs], begin)

    @latched
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    @latched
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> GroupWork:
        def begin(output: torch.Tensor, parts: Tensors, name: str) -> Operation[torch.Tensor]:
            joined = torch.cat([plain(each).reshape(-1) for each in parts])
            return self._reduce_scatter(output, joined, opts.reduceOp.op, name)

        return self._submit("reduce_scatter", opts, [outputs, inputs], begin)

    @latched
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any,
    ) -> GroupWork:
        received, sent = self._row_sizes(output, output_splits), self._row_sizes(tensor, input_splits)
        return self._alltoall("alltoall", [output], [tensor], received, sent, opts)

    @latched
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        received, sent = [each.nbytes for each in outputs], [each.nbytes for each in inputs]
        return self._alltoall("alltoall", outputs, inputs, received, sent, opts)

    @latched
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        root = self._root(opts)
        targets = self._one_each(outputs[0], "gather", inputs[0]) if self.rank() == root else []
        received = [each.nbytes for each in targets] or [0] * self.size()
        sent = [inputs[0].nbytes if rank == root else 0 for rank in range(self.size())]
        return self._alltoall("gather", targets, inputs, received, sent, opts)

    @latched
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> GroupWork:
        root = self._root(opts)
        sources = self._one_each(inputs[0], "scatter", outputs[0]) if self.rank() == root else []
        sent = [each.nbytes for each in sources] or [0] * self.size()
        received = [outputs[0].nbytes if rank == root else 0 for rank in range(self.size())]
        return self._alltoall("scatter", outputs, sources, received, sent, opts)

    @latched
    def barrier(self, opts: Any = None) -> GroupWork:
        token = torch.zeros(1, dtype=torch.uint8)
        opts = opts or c10d.BarrierOptions()
        return self._submit("barrier", opts, [[[]]], lambda _, name: self._backend.allgather(token, name))

    def send(self, tensors: Tensors, to: int, tag: int) -> PeerWork:
        tensor, what = plain(check(tensors)[0]), f"send to rank {self._job_rank(to)}"
        work = self._peers().send(tensor, to, tag) if tensor.numel() else Completed(tensor)
        return PeerWork(work, what, self.members.monitor, self._channel.timeout_s)

    def recv(self, tensors: Tensors, source: int, tag: int) -> PeerWork:
        return self._receive(tensors, source, tag, f"receive from rank {self._job_rank(source)}")

    def recv_anysource(self, tensors: Tensors, tag: int) -> PeerWork:
        return self._receive(tensors, None, tag, "receive from any rank")

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin to collect operations: nothing to do, as they are finished in order."""

    @latched
    def _end_coalescing(self, device: torch.device) -> GroupWork:
        """Return work that is done once all operations before it are."""
        return self._submit("coalesced", c10d.BarrierOptions(), [[]], Completed)

    # The group itself

    def set_timeout(self, timeout: timedelta) -> None:
        self._channel.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        atexit.unregister(self._at_exit)
        if self._channel.latch.is_open:
            self._channel.latch.is_open = False
            self._channel.latch.abandon()
            self.members.close()
            self._channel.close()

    abort = shutdown

    def _at_exit(self) -> None:
        """End the threads before the interpreter does, inside C++ code of which it would abort the process."""
        stop_at_exit(self.shutdown)

    # How they are done

    def _submit(
        self, kind: str, opts: Any, columns: Sequence[list[Any]], begin: Callable[..., Operation[torch.Tensor]]
    ) -> GroupWork:
        """Begin an operation of the transport for each row: begin(output, input, name).

        The columns are the outputs, which are the result, and the inputs, where they are others: tensors, or lists.
        """
        result, *inputs = map(flattened, columns)
        check([*result, *flattened(inputs)])
        if self._callbacks.are_wanted and not self._callbacks.are_running_here:
            with self._channel.failing("the end of the callbacks"):
                self._finish_all()
                self._callbacks.are_wanted = False
        self._count += 1
        name, own_s = f"c10d.{self._name}.{kind}.{self._count}", opts.timeout.total_seconds()
        rows = list(zip(*columns, strict=True))
        names = [name] if len(rows) == 1 else [f"{name}.{number}" for number in range(len(rows))]

        def start(backend: Backend) -> Operation[Any]:
            return begin(*rows[0], name) if len(rows) == 1 else Staged(all_rows())

        def all_rows() -> Stages[None]:
            for number, (row, each) in enumerate(zip(rows, names, strict=True)):
                try:
                    operation = begin(*row, each)
                except (UnsupportedError, UsageError) as error:
                    if number:  # other rows have been sent
                        raise CollectiveError(f"tensor {number} of {len(rows)}: {error}") from error
                    raise
                yield operation

        what = Transfer(kind, name, result[0]) if result else f"{kind} {name!r}"
        is_attended = getattr(opts, "asyncOp", True)
        with self._channel.failing(what):
            work = self._channel.start(what, start, timeout_s=own_s if own_s > 0 else None)
            found = GroupWork(self._channel, work, result, self._callbacks)
            if self._callbacks.are_running_here:
                found.wait()
            elif is_attended and not work.is_done:
                self._channel.attend()
            return found

    def _finish_all(self) -> None:
        """Finish what has begun, with its callbacks, before another operation begins; errors are each work's own."""
        last = self._channel.start("the end of the callbacks", lambda _: Completed(None))
        last.wait()

    def _allreduce_sparse(self, tensor: torch.Tensor, op: Any, name: str) -> Operation[torch.Tensor]:
        """Reduce a sparse tensor, by several messages."""
        if op != Op.SUM:
            raise UnsupportedError("sparse tensors are reduced by SUM only")

        def stages() -> Stages[torch.Tensor]:
            total = yield from sparse_sum(self._backend, tensor.detach(), "sum", name)
            with torch.no_grad():
                return tensor.copy_(total)  # copy_() would not resize a tensor that detach() returns

        return Staged(stages())

    def _allreduce(self, flat: torch.Tensor, op: Any, name: str) -> Operation[torch.Tensor]:
        """Begin to reduce a contiguous tensor in place."""
        backend = self._backend
        if not flat.numel():
            return Completed(flat)
        if op in BITWISE:
            if flat.is_floating_point() or flat.is_complex():
                raise UsageError(f"{op} of {flat.dtype}: expected whole numbers or bool")
            data = as_bytes(flat)
            rows = backend.allgather(data.view(1, -1), name)
            return Converted(rows, lambda found: data.copy_(functools.reduce(BITWISE[op], found)))
        if op == Op.AVG:
            if not (flat.is_floating_point() or flat.is_complex()):
                raise UsageError(f"the average of {flat.dtype} is not a {flat.dtype}: convert the tensor, or add")
            return reductions.allreduce_(backend, flat, "mean", name)
        if op not in OPS:
            raise UnsupportedError(f"op {op}: dualdist reduces by SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR and BXOR")
        return reductions.allreduce_(backend, flat, OPS[op], name)

    def _reduce_scatter(self, output: torch.Tensor, own: torch.Tensor, op: Any, name: str) -> Operation[torch.Tensor]:
        """Reduce a tensor of every rank, which is overwritten; store this rank's part."""
        if own.numel() != output.numel() * self.size():
            raise UsageError(f"reduce_scatter of {own.numel()} elements on {self.size()} ranks into {output.numel()}")
        part = own.view(-1).split(output.numel())[self.rank()] if own.numel() else own.view(-1)
        return stored(Converted(self._allreduce(own, op, name), lambda _: part), [output])

    def _gather_bytes(self, tensor: torch.Tensor, name: str) -> Operation[torch.Tensor]:
        data = as_bytes(plain(tensor))
        return self._backend.allgather(data, name) if data.numel() else Completed(data)

    def _gather_into(self, output: torch.Tensor, tensor: torch.Tensor, name: str) -> Operation[torch.Tensor]:
        if (output.numel(), output.dtype) != (tensor.numel() * self.size(), tensor.dtype):
            given, into = (f"{each.numel()} elements of {each.dtype}" for each in (tensor, output))
            raise UsageError(f"allgather of {given} on {self.size()} ranks into {into}")
        if not output.is_contiguous() or not tensor.numel():
            return stored(self._gather_bytes(tensor, name), [output])
        return self._backend.allgather(as_bytes(plain(tensor)), name, as_bytes(output.detach()))

    def _alltoall(
        self,
        kind: str,
        outputs: Tensors,
        inputs: Tensors,
        received: Sequence[int],
        sent: Sequence[int],
        opts: Any,
    ) -> GroupWork:
        """Send bytes to each rank: the next sent[i] of the inputs to rank i."""

        def begin(into: Tensors, tensors: Tensors, name: str) -> Operation[torch.Tensor]:
            data = [as_bytes(plain(each)) for each in tensors]
            given = data[0] if len(data) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *data])
            return stored(self._backend.alltoall(given, sent, received, name), into)

        return self._submit(kind, opts, [[outputs], [inputs]], begin)

    def _root(self, opts: Any) -> int:
        """Return the index of the rank that an operation starts from or ends at."""
        self._job_rank(opts.rootRank)
        return int(opts.rootRank)

    def _one_each(self, listed: Tensors, kind: str, like: torch.Tensor) -> Tensors:
        """Return a list of a tensor for each rank, of as many bytes as `like`."""
        sizes = [each.nbytes for each in listed]
        if sizes != [like.nbytes] * self.size():
            raise UsageError(f"{kind} on {self.size()} ranks of {like.nbytes} bytes each: the list has {sizes} bytes")
        return listed

    def _row_sizes(self, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        """Return how many bytes of a tensor are each rank's."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self.size():
                raise UsageError(f"alltoall of {rows} rows between {self.size()} ranks: pass splits")
            splits = [rows // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != rows:
            raise UsageError(f"splits {list(splits)}: expected {self.size()} numbers of rows, together {rows}")
        return [count * (tensor.nbytes // rows if rows else 0) for count in splits]

    def _receive(self, tensors: Tensors, source: int | None, tag: int, what: str) -> PeerWork:
        (tensor,) = check(tensors)
        target = own(tensor).detach()
        flat = target.contiguous()
        work = self._peers().receive_(flat, source, tag) if flat.numel() else Completed(flat)
        into = None if flat is target else tensor
        return PeerWork(work, what, self.members.monitor, self._channel.timeout_s, into)

    def _peers(self) -> PointToPoint:
        transport = self.members.transport
        if not isinstance(transport, PointToPoint):
            raise UnsupportedError(
                f"the backend {transport.name} has no send and recv: set DUALDIST_BACKEND=native, or mpi under mpirun"
            )
        self._channel.latch.require_usable()
        return transport

    def _job_rank(self, index: int) -> int:
        if not 0 <= index < self.size():
            raise UsageError(f"rank {index} of a group of {self.size()}: expected 0 to {self.size() - 1}")
        return self.members.transport.ranks[index]

    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
