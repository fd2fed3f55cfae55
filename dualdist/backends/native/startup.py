"""Start of the native backend: over process groups of its own, or over the program's default group."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from dualdist.backends.base import AdoptedGroup, InitContext
from dualdist.backends.native.backend import LIBRARY_GRACE, NativeBackend, NativeSettings
from dualdist.backends.native.libraries import ProcessGroup, both, library_of
from dualdist.backends.native.limits import needed_open_files
from dualdist.backends.native.store import TcpStore, first_line
from dualdist.errors import (
    BackendUnavailableError,
    CollectiveError,
    RendezvousError,
    TopologyError,
    UnsupportedError,
)
from dualdist.topology import RankLocation, Topology
from dualdist.utils.variables import temporary_variables

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def start(context: InitContext) -> NativeBackend:
    """Connect the ranks over the store, or in this process if there is one rank, by torch's default group if asked."""
    if not dist.is_available():
        raise BackendUnavailableError("this torch was built without torch.distributed: install another build of torch")
    rank, size, environ = context.topology.rank, context.topology.size, context.environ
    kind = context.device.type
    library = "" if context.transport in ("shm", "gloo") else library_of(kind)  # else through host memory: staging.py
    inner: dist.Store = dist.HashStore() if context.store is None else context.store.store  # type: ignore[attr-defined]
    _allow_open_files(needed_open_files(size))
    interfaces = {name: context.interface for name in INTERFACES if context.interface and name not in environ}

    def network() -> contextlib.AbstractContextManager[None]:
        return temporary_variables(environ, interfaces)

    meeting = dist.PrefixStore(f"{context.key}/group", inner)

    def connect() -> Mapping[str, ProcessGroup]:
        if not context.sets_default_group:
            return backend._process_groups(meeting, rank, size)
        kinds, timeout = "gloo", timedelta(seconds=context.timeout_s)
        if library:
            kinds, timeout = both(kind), timeout + LIBRARY_GRACE
        with network():
            dist.init_process_group(kinds, store=meeting, rank=rank, world_size=size, timeout=timeout)
        return dict.fromkeys(["cpu", kind] if library else ["cpu"], dist.group.WORLD)

    backend = NativeBackend(
        connect,
        range(size),
        rank,
        dist.PrefixStore(f"{context.key}/lines", inner),
        NativeSettings(network, kind, library, context.transport == "shm"),
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


def adopt(context: InitContext) -> AdoptedGroup:
    """Use the program's default group and its store, and leave both open at close()."""
    device_types = {device.type for device in dist.group.WORLD._device_types}  # type: ignore[union-attr]
    if "cpu" not in device_types:
        raise UnsupportedError(
            f"torch.distributed's default group moves {', '.join(sorted(device_types))} tensors only, and dualdist "
            f"moves CPU tensors too: set the group up with {both(context.device.type)!r}, or not at all"
        )
    topology = _topology_of_group(context.topology)
    store = dist.PrefixStore("dualdist", dist.distributed_c10d._get_default_store())
    kind = context.device.type
    library = library_of(kind) if kind in device_types and kind != "cpu" else ""
    used = {"cpu", kind} if library else {"cpu"}
    backend = NativeBackend(
        lambda: dict.fromkeys(used, dist.group.WORLD),
        range(topology.size),
        topology.rank,
        store,
        NativeSettings(kind=kind, library=library),
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
