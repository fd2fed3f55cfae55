"""Backend over torch.distributed: NCCL for CUDA tensors, Gloo and shared memory for CPU tensors.

Gloo connects every pair of ranks. If all ranks share a host, that happens only when shared memory cannot carry an
operation: an alltoall, or where /dev/shm is full.
"""

from __future__ import annotations

import atexit
import contextlib
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions  # private to torch: tests/unit/test_torch_private_names.py

from dualdist.backends.base import AdoptedGroup, InitContext, ReduceOp, Work, filled, gathered, peer_error
from dualdist.backends.native import SHM_BYTES_PER_RANK, needed_open_files
from dualdist.backends.native.store import TcpStore, first_line
from dualdist.backends.shm.channel import connect_host
from dualdist.backends.shm.collectives import SMALL_BYTES, HostCollectives, slot_bytes
from dualdist.errors import (
    CLOSED,
    BackendUnavailableError,
    CollectiveError,
    NotInitializedError,
    RendezvousError,
    TopologyError,
    UnsupportedError,
)
from dualdist.topology import RankLocation, Topology
from dualdist.utils.deadline import Deadline, stop_at_exit
from dualdist.utils.variables import temporary_variables

ProcessGroup = Any  # a dist.ProcessGroup, ProcessGroupGloo or ProcessGroupNCCL
Options = TypeVar("Options")

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


class NativeWork:
    """An asynchronous operation of torch.distributed."""

    def __init__(self, work: dist.Work, result: torch.Tensor, timeout_s: float) -> None:
        self._work = work
        self._result = result
        self._timeout_s = timeout_s

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        try:
            self._work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise translate_error(error, self._timeout_s) from error
        return self._result

    def source(self) -> int:
        """Return the index of the rank that sent what this has received."""
        return self._work._source_rank()


@dataclass(frozen=True)
class NativeSettings:
    """The same for all backends of a session; `network` sets the variables of torch's network interface in a block."""

    network: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    on_gpu: bool = False
    printed: set[str] = field(default_factory=set)  # messages


class NativeBackend:
    """Moves tensors over process groups, and on one host through shared memory.

    `connect` creates the process groups, by device type, when they are first needed; close() ends them if `owned`.
    `hosts` is the host of each of the job's ranks, or empty if they share no memory, in duplicates and subgroups.
    """

    name = "native"
    supported_reduce_dtypes = REDUCE_DTYPES
    traceable = True
    done_means_all_started = True
    mean_devices: frozenset[str] = frozenset()
    rank_order_devices: frozenset[str] = frozenset()

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
        self._timeout_s = timeout_s
        self._connect = connect
        self._connected: Mapping[str, ProcessGroup] | None = None
        self._store = store
        self._settings = settings
        self._owned = owned
        self._host: HostCollectives | None = None
        self._children: list[NativeBackend] = []

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._timeout_s = value
        if self._host is not None:
            self._host.timeout_s = value

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None) -> Work:
        host = self._host
        if host is not None and buffer.device.type == "cpu" and (host.is_only_host or buffer.nbytes > SMALL_BYTES):
            return host.allreduce_(buffer, op, name, source)
        return self._allreduce_by_group_(filled(buffer, source), op, name)

    def _allreduce_by_group_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> NativeWork:
        options = self._with_timeout(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp(OPS[op])
        return self._start(buffer, lambda: self._group_for(buffer).allreduce([buffer], options))

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Work:
        host = self._host
        if host is not None and host.is_only_host and tensor.device.type == "cpu":
            return host.allgather(tensor, output)
        output = gathered(tensor, self.size, output)
        options = self._with_timeout(AllgatherOptions())
        return self._start(output, lambda: self._group_for(tensor)._allgather_base(output, tensor, options))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Work:
        host = self._host
        if host is not None and host.is_only_host and buffer.device.type == "cpu":
            return host.broadcast_(buffer, root)
        options = self._with_timeout(dist.BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        return self._start(buffer, lambda: self._group_for(buffer).broadcast([buffer], options))

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> NativeWork:
        output = tensor.new_empty(sum(received))
        options = self._with_timeout(dist.AllToAllOptions())
        return self._start(
            output, lambda: self._group_for(tensor).alltoall_base(output, tensor, list(received), list(sent), options)
        )

    def connect_peers(self) -> None:
        self._groups()

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> NativeWork:
        return self._start(tensor, lambda: self._group_for(tensor).send([tensor], to, tag))

    def receive_(self, buffer: torch.Tensor, source: int | None, tag: int) -> NativeWork:
        group = self._group_for(buffer)
        if source is None:
            return self._start(buffer, lambda: group.recv_anysource([buffer], tag))
        return self._start(buffer, lambda: group.recv([buffer], source, tag))

    def duplicate(self, key: str) -> NativeBackend:
        child = self._child(self.ranks, key, self.hosts)
        if child._host is None:
            self.hosts = ()  # later duplicates would find no room either
        return child

    def subgroup(self, ranks: Sequence[int], key: str) -> NativeBackend:
        if self.ranks[self.rank] in ranks:
            return self._child(ranks, key, self.hosts)
        return NativeBackend(dict, ranks, -1, self._store, self._settings, self.timeout_s, owned=False)

    def built_with(self) -> dict[str, int]:
        return built_with()

    def close(self) -> None:
        self.is_open = False
        atexit.unregister(self.at_exit)
        for child in self._children:
            child.close()
        self._children.clear()
        host, self._host = self._host, None  # its memory is freed, though others may hold this
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
        rank = list(ranks).index(self.ranks[self.rank])
        store = dist.PrefixStore(key, self._store)

        def connect() -> dict[str, ProcessGroup]:
            return self._process_groups(store, rank, len(ranks))

        child = NativeBackend(connect, ranks, rank, store, self._settings, self.timeout_s, hosts=hosts)
        self._children.append(child)
        child._share_memory()
        if child._host is None or not child._host.is_only_host or self._settings.on_gpu:
            child._groups()
        return child

    def _share_memory(self) -> None:
        """Share memory between the ranks of this host if every host can, and connect the hosts' first ranks."""
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
            self._allreduce_by_group_(fails, "max", "share").wait()
            host = None if fails.item() else host
        if host is None:
            return
        leaders = None
        if not is_only_host and index == 0:
            leaders = self._child([ranks[0] for ranks in members.values()], "leaders")
        self._host = HostCollectives(host, leaders, is_only_host=is_only_host)
        self.done_means_all_started = is_only_host
        self.mean_devices = self.rank_order_devices = frozenset(("cpu",) if is_only_host else ())
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
            raise translate_error(error, self.timeout_s) from error
        return groups

    def _groups(self) -> Mapping[str, ProcessGroup]:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def _group_for(self, tensor: torch.Tensor) -> ProcessGroup:
        return self._groups().get(tensor.device.type) or self._groups()["cpu"]

    def _with_timeout(self, options: Options) -> Options:
        options.timeout = timedelta(seconds=self.timeout_s)  # type: ignore[attr-defined]
        return options

    def _start(self, result: torch.Tensor, start: Callable[[], dist.Work]) -> NativeWork:
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        try:
            return NativeWork(start(), result, self.timeout_s)
        except (RuntimeError, ValueError) as error:
            raise translate_error(error, self.timeout_s) from error


def built_with() -> dict[str, int]:
    """Return the libraries that this torch was built with; see Backend.built_with."""
    version = 0
    if dist.is_available() and dist.is_nccl_available():
        major, minor, patch = torch.cuda.nccl.version()
        version = 10000 * major + 100 * minor + patch  # as NCCL numbers its versions since 2.9
    return {"gloo": int(dist.is_available() and dist.is_gloo_available()), "mpi": 0, "nccl": version}


def translate_error(error: Exception, timeout_s: float) -> Exception:
    """Return the dualdist exception for one of torch.distributed."""
    text, shown = str(error).lower(), first_line(error)
    if found := peer_error(text, shown, timeout_s):
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
        raise RendezvousError(
            f"rank {rank} of {size} met the others, but torch could not connect them ({first_line(error)}): "
            f"if the hosts have several networks, name the one they share in {' and '.join(INTERFACES)}"
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
