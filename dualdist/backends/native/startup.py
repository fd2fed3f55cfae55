"""Start of the native backend, on a new default group of torch.distributed or on the program's own."""

from __future__ import annotations

import atexit
import contextlib
import resource
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from dualdist.backends.base import AdoptedGroup, InitContext
from dualdist.backends.native.backend import NativeBackend, ProcessGroup
from dualdist.backends.native.store import TcpStore, first_line
from dualdist.errors import BackendUnavailableError, RendezvousError, TopologyError, UnsupportedError
from dualdist.topology import RankLocation, Topology
from dualdist.utils.machine import needed_open_files
from dualdist.utils.temporary_env import temporary_variables

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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
        lambda: _default_groups(used),
        range(topology.size),
        topology.rank,
        store,
        contextlib.nullcontext,
        context.timeout_s,
        owned=False,
        on_gpu="cuda" in used,
    )
    atexit.register(backend.at_exit)

    def set_locations(locations: Sequence[RankLocation]) -> None:
        if context.transport != "gloo":
            backend.share_memory([location.host for location in locations])

    return AdoptedGroup(backend, TcpStore(store, "", "torch.distributed's own store"), topology, set_locations)


def _topology_of_group(topology: Topology) -> Topology:
    """Return the launcher's topology if the default group has the same ranks; without a launcher, the group's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if topology.launcher == "none":
        return Topology(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            node_rank=0,
            num_nodes=1,
            launcher="none",
            source="torch.distributed's default group",
            inferred=frozenset({"local_rank", "local_size", "node_rank", "num_nodes"}),
        )
    if (rank, size) != (topology.rank, topology.size):
        raise TopologyError(
            f"torch.distributed's default group says rank {rank} of {size}, but {topology.source} say "
            f"rank {topology.rank} of {topology.size}: set the group up with the launcher's numbers, or not at all"
        )
    return topology


def _default_groups(device_types: Iterable[str]) -> dict[str, ProcessGroup]:
    group = dist.group.WORLD
    assert group is not None, "the default group has been set up"
    return dict.fromkeys(device_types, group)


def start(context: InitContext) -> NativeBackend:
    """Set up torch.distributed's default group over the store, or in this process if there is one rank."""
    if not dist.is_available():
        raise BackendUnavailableError("this torch was built without torch.distributed: install another build of torch")
    rank, size, environ = context.topology.rank, context.topology.size, context.environ
    nccl = context.device.type == "cuda" and dist.is_nccl_available()
    inner: dist.Store = dist.HashStore() if context.store is None else context.store.store  # type: ignore[attr-defined]
    _allow_open_files(needed_open_files(size))
    interfaces = {name: context.interface for name in INTERFACES if context.interface and name not in environ}

    def network() -> contextlib.AbstractContextManager[None]:
        return temporary_variables(environ, interfaces)

    original_hook = sys.excepthook
    try:
        with network():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=dist.PrefixStore(f"{context.key}/group", inner),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=context.timeout_s),
            )
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} of {size} met the others, but torch could not connect them ({first_line(error)}): "
            f"if the hosts have several networks, name the one they share in {' and '.join(INTERFACES)}"
        ) from error
    group_hook = sys.excepthook

    def restore_excepthook() -> None:
        """Remove the group's hook; each further session would add one more "[rank0]: " to every line of an error."""
        if sys.excepthook is group_hook:
            sys.excepthook = original_hook

    backend = NativeBackend(
        lambda: _default_groups(["cpu", "cuda"] if nccl else ["cpu"]),
        range(size),
        rank,
        dist.PrefixStore(f"{context.key}/lines", inner),
        network,
        context.timeout_s,
        owned=True,
        on_gpu=nccl,
        hosts=() if context.transport == "gloo" else [location.host for location in context.locations],
    )
    backend.restore_excepthook = restore_excepthook
    backend._groups()
    atexit.register(backend.at_exit)
    return backend


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit of open files to `count`, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
