"""Backend over torch.distributed: NCCL for CUDA tensors, Gloo and shared memory for CPU tensors.

Gloo connects every pair of ranks. If all ranks share a host, that happens only when shared memory cannot carry an
operation: an alltoall, or where /dev/shm is full.

Note [several hosts]: a link between hosts carries each byte of an allreduce once per direction. The ranks of a host add
up a block of the tensor in shared memory, each one slice of it; the ranks of equal index reduce their slice over the
network; and the host shares the slices. Blocks follow each other through these three stages, so that the network is
busy while the host adds and copies. Where hosts have different numbers of ranks, the first rank of each carries all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import resource
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions  # private to torch: tests/unit/test_torch_private_names.py

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import (
    AdoptedGroup,
    Backend,
    InitContext,
    Receive,
    filled,
    gathered,
    peer_error,
    timeout_error,
)
from dualdist.backends.native import SHM_BYTES_PER_RANK, needed_open_files
from dualdist.backends.native.store import TcpStore, first_line
from dualdist.backends.operation import Operation, Staged, Stages
from dualdist.backends.shm.host import CACHE_LINE_BYTES, HostRanks, connect_host, slot_bytes
from dualdist.errors import (
    CLOSED,
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    NotInitializedError,
    RankLostError,
    RendezvousError,
    TopologyError,
    UnsupportedError,
)
from dualdist.topology import RankLocation, Topology
from dualdist.utils.deadline import Deadline, call_within, stop_at_exit
from dualdist.utils.variables import temporary_variables

ProcessGroup = Any  # a dist.ProcessGroup, ProcessGroupGloo or ProcessGroupNCCL
Options = TypeVar("Options")
T = TypeVar("T")

OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# Reduced by both Gloo and NCCL, by every operation.
REDUCE_DTYPES = frozenset(
    (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
)
USES_GLOO = "dualdist: ranks of this host use Gloo, not shared memory"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


# Operations wait for as long as whoever advances them: Gloo closes all connections at the end of its own time limit.
UNLIMITED = timedelta(days=7)
CONNECT_GRACE_S = 0.3  # in which the error of what connects, which says more, may come
ABANDON_S, ABANDON_TAG = 0.001, 1 << 20
# Between hosts, smaller tensors go straight over the network.
SMALL_BYTES = 1 << 14
# Of a block, for each slice, and how many blocks are on the network at a time: Note [several hosts].
SLICE_BYTES = 1 << 20
BLOCKS_UNDER_WAY = 2


class NativeOperation(Operation[torch.Tensor]):
    """An asynchronous operation of torch.distributed.

    On an accelerator it has ended once it is in its stream's queue: who takes the result makes the current stream wait.
    """

    def __init__(self, work: dist.Work, result: torch.Tensor) -> None:
        self._work = work
        self._result = result
        self._has_ended = self._is_on_device = result.device.type != "cpu"

    @property
    def result(self) -> torch.Tensor:  # type: ignore[override]
        if self._is_on_device:
            self._work.wait()
        return self._result

    def advance(self, wait_s: float) -> bool:
        if self._has_ended:
            return True
        if wait_s <= 0 and not self._work.is_completed():
            return False
        try:
            self._work.wait(timedelta(seconds=max(wait_s, 0.001)))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._finish()
        self._has_ended = True
        return True

    def _finish(self) -> None:
        """Raise the error of an operation that has ended, if it has one."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise translate_error(error) from error


class NativePeerOperation(Receive):
    """A send or a receive. Gloo closes all connections if it does not end within `wait_s`."""

    def __init__(self, work: dist.Work, result: torch.Tensor) -> None:
        self._work = work
        self.result = result

    def advance(self, wait_s: float) -> bool:
        if wait_s <= 0:
            return bool(self._work.is_completed())
        try:
            self._work.wait(timedelta(seconds=wait_s))
        except RuntimeError as error:
            raise translate_error(error) from error
        return True

    def source(self) -> int:
        return self._work._source_rank()


@dataclass(frozen=True)
class Block:
    """A block whose slices are on the network: Note [several hosts]."""

    values: torch.Tensor
    starts: Sequence[int]
    on_network: Operation[torch.Tensor] | None  # of this rank's slice, if it has one


@dataclass(frozen=True)
class NativeSettings:
    """The same for all backends of a session; `network` sets the variables of torch's network interface in a block."""

    network: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    on_gpu: bool = False
    printed: set[str] = field(default_factory=set)  # messages


class NativeBackend(Backend):
    """Moves tensors over process groups, and on one host through shared memory.

    `connect` creates the process groups, by device type, when they are first needed; close() ends them if `owned`.
    `hosts` is the host of each of the job's ranks, or empty if they share no memory, in duplicates and subgroups.
    """

    name = "native"
    supported_reduce_dtypes = REDUCE_DTYPES
    traceable = True

    def __init__(
        self,
        connect: Callable[[], Mapping[str, ProcessGroup]],
        ranks: Sequence[int],
        rank: int,
        store: dist.Store,
        settings: NativeSettings,
        timeout_s: float,
        *,
        owned: bool = True,
        hosts: Sequence[int] = (),
    ) -> None:
        self.transport = "nccl" if settings.on_gpu else "gloo"
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.is_open = True
        self.hosts = hosts
        self.restore_excepthook: Callable[[], None] = lambda: None
        self.timeout_s = timeout_s
        self._connect = connect
        self._connected: Mapping[str, ProcessGroup] | None = None
        self._store = store
        self._settings = settings
        self._owned = owned
        self._host: HostRanks | None = None
        self._is_only_host = False
        self._slices = 0  # of a block: Note [several hosts]
        self._peers: NativeBackend | None = None  # the ranks that carry the same slice on the other hosts
        self._children: list[NativeBackend] = []
        self._parent: NativeBackend | None = None  # until close()

    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> Operation[torch.Tensor]:
        host = self._host if self._is_only_host else None
        if host is not None and buffer.device.type == "cpu":
            return host.allreduce_(buffer, op, source)
        filled(buffer, source)
        if self._host is not None and buffer.device.type == "cpu" and buffer.nbytes > SMALL_BYTES:
            return Staged(self._reduce_between_hosts(self._host, buffer.view(-1), op, name))
        return self._allreduce_by_group_(buffer, op)

    def _allreduce_by_group_(self, buffer: torch.Tensor, op: ReduceOp) -> NativeOperation:
        options = unlimited(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp(OPS[op])
        return self._start(buffer, lambda: self._group_for(buffer).allreduce([buffer], options))

    def _reduce_between_hosts(
        self, host: HostRanks, flat: torch.Tensor, op: ReduceOp, name: str
    ) -> Stages[torch.Tensor]:
        """Reduce block after block: Note [several hosts]."""
        under_way: deque[Block] = deque()
        for block in flat.split(self._slices * SLICE_BYTES // flat.element_size()):
            starts = slice_starts(block.nbytes, self._slices, host.size)
            yield host.reduce_scatter_(block, starts, op)
            own = block.view(torch.uint8)[starts[host.index] : starts[host.index + 1]].view(block.dtype)
            on_network = self._peers.allreduce_(own, op, name) if self._peers is not None and len(own) else None
            under_way.append(Block(block, starts, on_network))
            if len(under_way) > BLOCKS_UNDER_WAY:
                yield from share_block(host, under_way.popleft())
        while under_way:
            yield from share_block(host, under_way.popleft())
        return flat

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Operation[torch.Tensor]:
        host = self._host_for(tensor)
        if host is not None:
            return host.allgather(tensor, output)
        output = gathered(tensor, self.size, output)
        options = unlimited(AllgatherOptions())
        return self._start(output, lambda: self._group_for(tensor)._allgather_base(output, tensor, options))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Operation[torch.Tensor]:
        host = self._host_for(buffer)
        if host is not None:
            return host.broadcast_(buffer, root)
        options = unlimited(dist.BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        return self._start(buffer, lambda: self._group_for(buffer).broadcast([buffer], options))

    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str
    ) -> NativeOperation:
        output = tensor.new_empty(sum(received))
        options = unlimited(dist.AllToAllOptions())
        return self._start(
            output, lambda: self._group_for(tensor).alltoall_base(output, tensor, list(received), list(sent), options)
        )

    def _host_for(self, tensor: torch.Tensor) -> HostRanks | None:
        """Return the ranks of this host, if they are all ranks, and the tensor is in their memory."""
        return self._host if self._is_only_host and tensor.device.type == "cpu" else None

    def connect_peers(self) -> None:
        self._groups()

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> NativePeerOperation:
        return NativePeerOperation(self._begin(lambda: self._group_for(tensor).send([tensor], to, tag)), tensor)

    def receive_(self, buffer: torch.Tensor, source: int | None, tag: int) -> NativePeerOperation:
        group = self._group_for(buffer)

        def receive() -> dist.Work:
            work: dist.Work = (
                group.recv_anysource([buffer], tag) if source is None else group.recv([buffer], source, tag)
            )
            return work

        return NativePeerOperation(self._begin(receive), buffer)

    def duplicate(self, key: str) -> NativeBackend:
        child = self._child(self.ranks, key, self.hosts)
        if child._host is None:
            self.hosts = ()  # later duplicates would find no room either
        return child

    def subgroup(self, ranks: Sequence[int], key: str) -> NativeBackend:
        if self.ranks[self.rank] in ranks:
            return self._child(ranks, key, self.hosts)
        return NativeBackend(dict, ranks, -1, self._store, self._settings, self.timeout_s, owned=False)

    def lost_ranks(self) -> Sequence[int]:
        return () if self._host is None else self._host.lost_ranks()

    def abandon(self) -> None:
        """Leave the host's memory, and let Gloo close its connections: it does at a receive that comes too late."""
        for backend in (self, self._peers):
            if backend is None or not backend._owned:
                continue
            if backend._host is not None:
                backend._host.close()
            gloo = (backend._connected or {}).get("cpu")
            if gloo is None or gloo is dist.group.WORLD:
                continue
            # Its end would wait for operations that the other ranks never finish: it stays until the process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))
            # Of a rank that has gone a receive fails at once, and closes nothing else.
            for other in range(backend.size):
                if other != backend.rank:
                    with contextlib.suppress(RuntimeError):
                        gloo.recv([torch.empty(1, device="cpu")], other, ABANDON_TAG).wait(timedelta(seconds=ABANDON_S))

    def built_with(self) -> dict[str, int]:
        return built_with()

    def close(self) -> None:
        self.is_open = False
        atexit.unregister(self.at_exit)
        for child in list(self._children):
            child.close()
        parent, self._parent = self._parent, None
        if parent is not None:
            parent._children.remove(self)
        host, self._host = self._host, None  # its memory is freed, though others may hold this
        self.messenger = None
        if host is not None:
            host.close()
        groups = (self._connected or {}).values()
        self._connected = {}
        if not self._owned:
            return
        if any(group is dist.group.WORLD for group in groups):
            dist.destroy_process_group()
            self.restore_excepthook()
        else:
            for group in groups:
                group.abort()

    def at_exit(self) -> None:
        """Close before the interpreter ends, or Gloo's threads abort the process (pytorch pull request 179291)."""
        stop_at_exit(self.close)

    def _child(self, ranks: Sequence[int], key: str, hosts: Sequence[int] = ()) -> NativeBackend:
        """Return a backend with new connections between the ranks, which meet in the store under `key`."""
        deadline = Deadline(self.timeout_s)
        try:
            return self._within_limit(lambda: self._connect_child(ranks, key, hosts))
        except RendezvousError as error:
            raise (CollectiveTimeoutError if deadline.passed() else RankLostError)(f"{error}") from error

    def _within_limit(self, connect: Callable[[], T]) -> T:
        """Return connect(), which a store of a stopped rank would block for ever."""
        return call_within(self.timeout_s + CONNECT_GRACE_S, connect, lambda: timeout_error(self.timeout_s))

    def _connect_child(self, ranks: Sequence[int], key: str, hosts: Sequence[int]) -> NativeBackend:
        rank = list(ranks).index(self.ranks[self.rank])
        store = dist.PrefixStore(key, self._store)

        def connect() -> dict[str, ProcessGroup]:
            return self._process_groups(store, rank, len(ranks))

        child = NativeBackend(connect, ranks, rank, store, self._settings, self.timeout_s, hosts=hosts)
        child._parent = self
        self._children.append(child)
        child._share_memory()
        if not child._is_only_host or self._settings.on_gpu:
            child._groups()
        return child

    def _share_memory(self) -> None:
        """Share memory between the ranks of this host if every host can: Note [several hosts]."""
        if not self.hosts:
            return
        members: dict[int, list[int]] = {}
        for rank in self.ranks:
            members.setdefault(self.hosts[rank], []).append(rank)
        own_rank = self.ranks[self.rank]
        host_ranks = members[self.hosts[own_rank]]
        is_only_host, index = len(members) == 1, host_ranks.index(own_rank)
        if len(members) == self.size:
            return
        size, deadline = len(host_ranks), Deadline(self.timeout_s)
        store = TcpStore(self._store, "", "the job's store")
        host, key = None, f"host/{host_ranks[0]}"
        try:
            host = connect_host(
                store, key, host_ranks, index, slot_bytes(size), deadline, room=size * SHM_BYTES_PER_RANK
            )
        except BackendUnavailableError as error:
            if index == 0 and USES_GLOO not in self._settings.printed:
                print(f"{USES_GLOO}: {error}", file=sys.stderr)
            self._settings.printed.add(USES_GLOO)
        if not is_only_host:
            fails = torch.tensor([host is None], dtype=torch.uint8, device="cpu")
            finish(self._allreduce_by_group_(fails, "max"), deadline)
            host = None if fails.item() else host
        if host is None:
            return
        self._use_memory(host, members)

    def _use_memory(self, host: HostRanks, members: Mapping[int, Sequence[int]]) -> None:
        """Move tensors through the memory of this host, and between hosts; `members` are the ranks of each host."""
        self._host, self._is_only_host = host, len(members) == 1
        if self._is_only_host:
            self.messenger, self.mean_devices = host, frozenset(("cpu",))
            self.rank_order_devices = self.mean_devices
        else:
            is_even = len({len(each) for each in members.values()}) == 1
            self._slices = host.size if is_even else 1
            if host.index < self._slices:
                self._peers = self._child([each[host.index] for each in members.values()], f"peers/{host.index}")
        if not self._settings.on_gpu:
            self.transport = "shm"

    def _process_groups(self, store: dist.Store, rank: int, size: int) -> dict[str, ProcessGroup]:
        timeout = timedelta(seconds=self.timeout_s)
        groups: dict[str, ProcessGroup] = {}
        try:
            with self._settings.network():
                groups["cpu"] = dist.ProcessGroupGloo(store, rank, size, timeout)
            if self._settings.on_gpu:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                groups["cuda"] = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        except RuntimeError as error:
            raise translate_error(error) from error
        return groups

    def _groups(self) -> Mapping[str, ProcessGroup]:
        if self._connected is None:
            self._connected = self._within_limit(self._connect)
        return self._connected

    def _group_for(self, tensor: torch.Tensor) -> ProcessGroup:
        return self._groups().get(tensor.device.type) or self._groups()["cpu"]

    def _start(self, result: torch.Tensor, start: Callable[[], dist.Work]) -> NativeOperation:
        return NativeOperation(self._begin(start), result)

    def _begin(self, start: Callable[[], dist.Work]) -> dist.Work:
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        try:
            return start()
        except (RuntimeError, ValueError) as error:
            raise translate_error(error) from error


def unlimited(options: Options) -> Options:
    options.timeout = UNLIMITED  # type: ignore[attr-defined]
    return options


def finish(operation: Operation[T], deadline: Deadline) -> T:
    """Return the result of an operation, before there is a channel."""
    if not operation.advance(deadline.left_s()):
        raise timeout_error(deadline.timeout_s)
    return operation.result


def share_block(host: HostRanks, block: Block) -> Stages[None]:
    """Wait until this rank's slice of a block has been reduced over the network, and share it with the host."""
    if block.on_network is not None:
        yield block.on_network
    yield host.share_(block.values, block.starts)


def slice_starts(nbytes: int, slices: int, size: int) -> list[int]:
    """Return where each rank's slice of a block begins, and where the last one ends; only `slices` ranks have one."""
    lines = -(-nbytes // CACHE_LINE_BYTES)
    starts = [min(nbytes, lines * rank // slices * CACHE_LINE_BYTES) for rank in range(slices)]
    return starts + [nbytes] * (size + 1 - slices)


def built_with() -> dict[str, int]:
    """Return the libraries that this torch was built with; see Backend.built_with."""
    version = 0
    if dist.is_available() and dist.is_nccl_available():
        major, minor, patch = torch.cuda.nccl.version()
        version = 10000 * major + 100 * minor + patch  # as NCCL numbers its versions since 2.9
    return {"gloo": int(dist.is_available() and dist.is_gloo_available()), "mpi": 0, "nccl": version}


def translate_error(error: Exception) -> Exception:
    """Return the dualdist exception for one of torch.distributed."""
    text, shown = str(error).lower(), first_line(error)
    if found := peer_error(text, shown):
        return found
    if "invalid scalar type" in text or "unsupported" in text or "not support" in text:
        return UnsupportedError(f"torch.distributed cannot move this ({shown})")
    return CollectiveError(shown)


def adopt(context: InitContext) -> AdoptedGroup:
    """Use the program's default group and its store, and leave both open at close()."""
    device_types = {device.type for device in dist.group.WORLD._device_types}  # type: ignore[union-attr]
    if "cpu" not in device_types:
        raise UnsupportedError(
            f"torch.distributed's default group moves {', '.join(sorted(device_types))} tensors only, and dualdist "
            'moves CPU tensors too: set the group up with init_process_group("cpu:gloo,cuda:nccl"), or not at all'
        )
    topology = _topology_of_group(context.topology)
    store = dist.PrefixStore("dualdist", dist.distributed_c10d._get_default_store())
    used = {"cpu", context.device.type} & device_types
    backend = NativeBackend(
        lambda: dict.fromkeys(used, dist.group.WORLD),
        range(topology.size),
        topology.rank,
        store,
        NativeSettings(on_gpu="cuda" in used),
        context.timeout_s,
        owned=False,
    )
    atexit.register(backend.at_exit)

    def set_locations(locations: Sequence[RankLocation]) -> None:
        if context.transport != "gloo":
            backend.hosts = [location.host for location in locations]

    return AdoptedGroup(backend, TcpStore(store, "", "torch.distributed's own store"), topology, set_locations)


def _topology_of_group(topology: Topology) -> Topology:
    """Return the launcher's topology if the default group has the same ranks; without a launcher, the group's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if topology.launcher == "none":
        source = "torch.distributed's default group"
        inferred = frozenset({"local_rank", "local_size", "node_rank", "num_nodes"})
        return Topology(rank, size, rank, size, 0, 1, launcher="none", source=source, inferred=inferred)
    if (rank, size) != (topology.rank, topology.size):
        raise TopologyError(
            f"torch.distributed's default group says rank {rank} of {size}, but {topology.source} say "
            f"rank {topology.rank} of {topology.size}: set the group up with the launcher's numbers, or not at all"
        )
    return topology


def start(context: InitContext) -> NativeBackend:
    """Connect the ranks over the store, or in this process if there is one rank, by torch's default group if asked."""
    if not dist.is_available():
        raise BackendUnavailableError("this torch was built without torch.distributed: install another build of torch")
    rank, size, environ = context.topology.rank, context.topology.size, context.environ
    nccl = context.device.type == "cuda" and dist.is_nccl_available()
    inner: dist.Store = dist.HashStore() if context.store is None else context.store.store  # type: ignore[attr-defined]
    _allow_open_files(needed_open_files(size))
    interfaces = {name: context.interface for name in INTERFACES if context.interface and name not in environ}

    def network() -> contextlib.AbstractContextManager[None]:
        return temporary_variables(environ, interfaces)

    meeting = dist.PrefixStore(f"{context.key}/group", inner)

    def connect() -> Mapping[str, ProcessGroup]:
        if not context.sets_default_group:
            return backend._process_groups(meeting, rank, size)
        kinds, timeout = "cpu:gloo,cuda:nccl" if nccl else "gloo", timedelta(seconds=context.timeout_s)
        with network():
            dist.init_process_group(kinds, store=meeting, rank=rank, world_size=size, timeout=timeout)
        return dict.fromkeys(["cpu", "cuda"] if nccl else ["cpu"], dist.group.WORLD)

    backend = NativeBackend(
        connect,
        range(size),
        rank,
        dist.PrefixStore(f"{context.key}/lines", inner),
        NativeSettings(network, nccl),
        context.timeout_s,
        hosts=() if context.transport == "gloo" else [location.host for location in context.locations],
    )
    original_hook = sys.excepthook
    try:
        backend._groups()
    except (RuntimeError, CollectiveError) as error:
        reason = first_line(error)
        advice = f"if the hosts have several networks, name the one they share in {' and '.join(INTERFACES)}"
        if os.strerror(errno.EMFILE) in reason:
            advice = f"allow {needed_open_files(size)} open files and more by ulimit -n"
        raise RendezvousError(
            f"rank {rank} of {size} met the others, but torch could not connect them ({reason}): {advice}"
        ) from error
    group_hook = sys.excepthook

    def restore_excepthook() -> None:
        """Remove the group's hook; each further session would add one more "[rank0]: " to every line of an error."""
        if sys.excepthook is group_hook:
            sys.excepthook = original_hook

    backend.restore_excepthook = restore_excepthook
    atexit.register(backend.at_exit)
    return backend


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit of open files to `count`, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
