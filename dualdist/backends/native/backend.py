"""Backend over torch.distributed: Gloo and shared memory for CPU tensors, NCCL and the like for those of accelerators.

Gloo connects every pair of ranks. If all ranks share a host, that happens only when shared memory cannot carry an
operation: an alltoall, or where /dev/shm is full.

Note [one order on a device]: a device's collective library waits on the device, and if two of its operations begin in
different order on two ranks, both may wait for ever; with communicators of their own, too, once the device is full
(NCCL's user guide, "Using multiple NCCL communicators concurrently"). So collectives and gradients of all ranks use one
communicator, and the program begins them itself, in its own order (Backend.in_program_order); no thread begins one. A
request says how many buckets of gradients went before it, and ranks that differ are refused.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions  # private to torch: tests/unit/test_torch_private_names.py

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import Backend, filled, gathered, timeout_error
from dualdist.backends.native.device_watch import DeviceWatch
from dualdist.backends.native.host_slices import HostSlices
from dualdist.backends.native.libraries import ProcessGroup, create_group, library_of_group
from dualdist.backends.native.limits import SHM_BYTES_PER_RANK
from dualdist.backends.native.operations import (
    NativeOperation,
    NativePeerOperation,
    finish,
    translate_error,
    unlimited,
)
from dualdist.backends.native.store import TcpStore
from dualdist.backends.operation import Operation, Staged
from dualdist.backends.shm.host import HostRanks, connect_host, slot_bytes
from dualdist.errors import (
    CLOSED,
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    NotInitializedError,
    RankLostError,
    RendezvousError,
)
from dualdist.utils import accelerator
from dualdist.utils.deadline import Deadline, call_within, stop_at_exit

T = TypeVar("T")

OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# Reduced by both Gloo and NCCL, by every operation.
REDUCE_DTYPES = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
)
TRANSPORT = "DUALDIST_TRANSPORT"
USES_GLOO = "dualdist: ranks of this host use Gloo, not shared memory"
OTHER_HOST = "the ranks of another host cannot share memory; see what they printed"
# The library's own watchdog, which ends the process, comes so much later than ours.
LIBRARY_GRACE = timedelta(seconds=60)
CONNECT_GRACE_S = 0.3  # after the time limit; the error of the library that connects says more than ours
ABANDON_S, ABANDON_TAG = 0.001, 1 << 20
# Between hosts, smaller tensors go straight over the network.
SMALL_BYTES = 1 << 14


@dataclass
class NativeSettings:
    """The same for all backends of a session; `network` sets the variables of torch's network interface in a block.

    `library` moves tensors of the device type `kind`; both are "" if there is none. `insists_on_memory`: the program
    asked for shared memory; `problem` says why the ranks of this host have none.
    """

    network: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    kind: str = ""
    library: str = ""
    insists_on_memory: bool = False
    problem: str = ""


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
        self.transport = settings.library or "gloo"
        self.devices = frozenset(("cpu", settings.kind)) if settings.library else frozenset(("cpu",))
        self.in_program_order = bool(settings.library)
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
        self._between: HostSlices | None = None  # None unless there are ranks on other hosts
        self._children: list[NativeBackend] = []
        self._parent: NativeBackend | None = None  # until close()
        self._watch = DeviceWatch(timeout_s, self._tell_late)

    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> Operation[torch.Tensor]:
        host = self._host_for(buffer)
        if host is not None:
            return host.allreduce_(buffer, op, source)
        filled(buffer, source)
        if self._between is not None and buffer.device.type == "cpu" and buffer.nbytes > SMALL_BYTES:
            return Staged(self._between.allreduce_(buffer.view(-1), op, name))
        return self._allreduce_by_group_(buffer, op, name)

    def _allreduce_by_group_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> NativeOperation:
        options = unlimited(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp(OPS[op])
        return self._start(buffer, name, lambda: self._group_for(buffer).allreduce([buffer], options))

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Operation[torch.Tensor]:
        host = self._host_for(tensor)
        if host is not None:
            return host.allgather(tensor, output)
        output = gathered(tensor, self.size, output)
        options = unlimited(AllgatherOptions())
        return self._start(output, name, lambda: self._group_for(tensor)._allgather_base(output, tensor, options))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Operation[torch.Tensor]:
        host = self._host_for(buffer)
        if host is not None:
            return host.broadcast_(buffer, root)
        options = unlimited(dist.BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        return self._start(buffer, name, lambda: self._group_for(buffer).broadcast([buffer], options))

    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str
    ) -> NativeOperation:
        output = tensor.new_empty(sum(received))
        options = unlimited(dist.AllToAllOptions())
        return self._start(
            output,
            name,
            lambda: self._group_for(tensor).alltoall_base(output, tensor, list(received), list(sent), options),
        )

    def _host_for(self, tensor: torch.Tensor) -> HostRanks | None:
        """Return the ranks of this host, if they are all ranks, and the tensor is in their memory."""
        return self._host if self._between is None and tensor.device.type == "cpu" else None

    def connect_peers(self) -> None:
        self._groups()

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> NativePeerOperation:
        return NativePeerOperation(self._begin(lambda: self._group_for(tensor).send([tensor], to, tag)), tensor)

    def receive_(self, buffer: torch.Tensor, source: int | None, tag: int) -> NativePeerOperation:
        group = self._group_for(buffer)
        if source is None:
            work = self._begin(lambda: group.recv_anysource([buffer], tag))
        else:
            work = self._begin(lambda: group.recv([buffer], source, tag))
        return NativePeerOperation(work, buffer)

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
        """Leave the host's memory, and let Gloo close its connections: it does at a receive that comes too late.

        What a device's library has begun is aborted, so that the device, and a program that waits for it, go on.
        """
        if self._between is not None and self._between.peers is not None:
            self._between.peers.abandon()
        if not self._owned:
            return
        if self._host is not None:
            self._host.close()
        self._abort_library()
        gloo = (self._connected or {}).get("cpu")
        if gloo is None or gloo is dist.group.WORLD:
            return
        # Gloo's destructor would wait for operations that the other ranks never finish, so it never runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))
        # A receive from a rank that has gone fails at once, and closes nothing else.
        for other in range(self.size):
            if other != self.rank:
                with contextlib.suppress(RuntimeError):
                    gloo.recv([torch.empty(1, device="cpu")], other, ABANDON_TAG).wait(timedelta(seconds=ABANDON_S))

    def _abort_library(self) -> None:
        """End what the device's library has begun, if the library can."""
        on_device = (self._connected or {}).get(self._settings.kind) if self._settings.library else None
        if on_device is not None:
            library_of_group(on_device, self._settings.kind).abort()

    def _tell_late(self, error: CollectiveError, name: str) -> None:
        if self.on_late is not None:
            self.on_late(error, name)

    def built_with(self) -> dict[str, int]:
        return built_with()

    def close(self) -> None:
        self.is_open = False
        self._watch.close()
        atexit.unregister(self.at_exit)
        for child in list(self._children):
            child.close()
        parent, self._parent = self._parent, None
        if parent is not None:
            parent._children.remove(self)
        host, self._host = self._host, None  # frees its memory even if others hold this object
        self._between = self.messenger = None
        if host is not None:
            host.close()
        shared = () if parent is None else (parent._connected or {}).values()
        groups = [group for group in (self._connected or {}).values() if group not in shared]
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

    def _child(
        self, ranks: Sequence[int], key: str, hosts: Sequence[int] = (), *, on_device: bool = True
    ) -> NativeBackend:
        """Return a backend with new connections between the ranks, which meet in the store under `key`."""
        deadline = Deadline(self.timeout_s)
        try:
            settings = self._settings if on_device else replace(self._settings, kind="", library="")
            return self._within_limit(lambda: self._connect_child(ranks, key, hosts, settings))
        except RendezvousError as error:
            raise (CollectiveTimeoutError if deadline.passed() else RankLostError)(f"{error}") from error

    def _within_limit(self, connect: Callable[[], T]) -> T:
        """Return connect(), which a store of a stopped rank would block for ever."""
        return call_within(self.timeout_s + CONNECT_GRACE_S, connect, lambda: timeout_error(self.timeout_s))

    def _connect_child(
        self, ranks: Sequence[int], key: str, hosts: Sequence[int], settings: NativeSettings
    ) -> NativeBackend:
        rank = list(ranks).index(self.ranks[self.rank])
        store = dist.PrefixStore(key, self._store)
        is_duplicate = tuple(ranks) == self.ranks  # Note [one order on a device]

        def connect() -> dict[str, ProcessGroup]:
            on_device = self._groups().get(self._settings.kind) if is_duplicate and self._owned else None
            return child._process_groups(store, rank, len(ranks), on_device)

        child = NativeBackend(connect, ranks, rank, store, settings, self.timeout_s, hosts=hosts)
        child._parent = self
        self._children.append(child)
        child._share_memory()
        if is_duplicate and hosts and child._host is None and settings.insists_on_memory and settings.problem:
            # Before the ranks connect otherwise: one that raises would break the connections of those that still do.
            raise BackendUnavailableError(f"{TRANSPORT}=shm: {settings.problem}")
        if child._host is None or child._between is not None or settings.library:
            child._groups()
        return child

    def _share_memory(self) -> None:
        """Share memory between the ranks of this host if every host can: Note [several hosts]."""
        if not self.hosts:
            return
        by_host: dict[int, list[int]] = {}
        for rank in self.ranks:
            by_host.setdefault(self.hosts[rank], []).append(rank)
        if len(by_host) == self.size:
            return
        host = self._connect_host(by_host[self.hosts[self.ranks[self.rank]]])
        if len(by_host) > 1:
            fails = torch.tensor([host is None], dtype=torch.uint8, device="cpu")
            finish(self._allreduce_by_group_(fails, "max", "memory"), Deadline(self.timeout_s))
            if fails.item():
                host, self._settings.problem = None, self._settings.problem or OTHER_HOST
        if host is None:
            return
        self._host = host
        if not self._settings.library:
            self.transport = "shm"
        if len(by_host) == 1:
            self.messenger = host
            self.mean_devices = self.rank_order_devices = frozenset(("cpu",))
        else:
            is_even = len({len(ranks) for ranks in by_host.values()}) == 1
            slices = host.size if is_even else 1
            peers = [ranks[host.index] for ranks in by_host.values()] if host.index < slices else []
            carriers = self._child(peers, f"peers/{host.index}", on_device=False) if peers else None
            self._between = HostSlices(host, slices, carriers)

    def _connect_host(self, ranks: Sequence[int]) -> HostRanks | None:
        """Connect the ranks of this host by memory; return None if they cannot share any, which one rank prints."""
        store = TcpStore(self._store, "", "the job's store")
        index, room = ranks.index(self.ranks[self.rank]), len(ranks) * SHM_BYTES_PER_RANK
        deadline = Deadline(self.timeout_s)
        try:
            return connect_host(store, f"host/{ranks[0]}", ranks, index, slot_bytes(len(ranks)), deadline, room)
        except BackendUnavailableError as error:
            settings = self._settings
            if index == 0 and not settings.problem and not settings.insists_on_memory:
                print(f"{USES_GLOO}: {error}", file=sys.stderr)
            settings.problem = f"{error}"
            return None

    def _process_groups(
        self, store: dist.Store, rank: int, size: int, on_device: ProcessGroup | None = None
    ) -> dict[str, ProcessGroup]:
        """Connect the ranks, on the device only if no group is given: Note [one order on a device]."""
        timeout = timedelta(seconds=self.timeout_s)
        groups: dict[str, ProcessGroup] = {}
        try:
            with self._settings.network():
                groups["cpu"] = dist.ProcessGroupGloo(store, rank, size, timeout)
            if library := self._settings.library:
                own = dist.PrefixStore(library, store)
                late = timeout + LIBRARY_GRACE
                groups[self._settings.kind] = on_device or create_group(library, own, rank, size, late)
        except RuntimeError as error:
            raise translate_error(error) from error
        return groups

    def _groups(self) -> Mapping[str, ProcessGroup]:
        if self._connected is None:
            self._connected = self._within_limit(self._connect)
        return self._connected

    def _group_for(self, tensor: torch.Tensor) -> ProcessGroup:
        return self._groups().get(tensor.device.type) or self._groups()["cpu"]

    def _start(self, result: torch.Tensor, name: str, start: Callable[[], dist.Work]) -> NativeOperation:
        watch = None if result.device.type == "cpu" else partial(self._watch.add, name)
        return NativeOperation(self._begin(start), result, watch)

    def _begin(self, start: Callable[[], dist.Work]) -> dist.Work:
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        try:
            return start()
        except (RuntimeError, ValueError) as error:
            raise translate_error(error) from error


def built_with() -> dict[str, int]:
    """Return the libraries that this torch was built with; see Backend.built_with."""
    has_nccl = dist.is_available() and dist.is_nccl_available()
    version = accelerator.nccl_version() if has_nccl else 0
    return {"gloo": int(dist.is_available() and dist.is_gloo_available()), "mpi": 0, "nccl": version}
