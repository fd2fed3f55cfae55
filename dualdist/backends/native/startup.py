"""How the native backend is started, or takes over the group that the program has set up."""

from __future__ import annotations

import atexit
import contextlib
import resource
import sys
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from dualdist.backends.base import InitContext
from dualdist.backends.native.backend import NativeBackend, ProcessGroup
from dualdist.backends.native.store import TcpStore, first_line
from dualdist.errors import BackendUnavailableError, RendezvousError, UnsupportedError
from dualdist.utils.machine import needed_open_files
from dualdist.utils.temporary_env import temporary_variables

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def existing_group() -> tuple[int, int]:
    """Rank and size in torch.distributed's default group, which is there."""
    return dist.get_rank(), dist.get_world_size()


def adopt(device: torch.device, timeout_s: float) -> tuple[NativeBackend, TcpStore]:
    """Use the default group that is there, and its store, and leave both alone at close()."""
    kinds = {kind.type for kind in dist.group.WORLD._device_types}  # type: ignore[union-attr]
    if "cpu" not in kinds:
        raise UnsupportedError(
            f"torch.distributed's default group moves {', '.join(sorted(kinds))} tensors only, and dualdist moves "
            'CPU tensors too: set the group up with init_process_group("cpu:gloo,cuda:nccl"), or not at all'
        )
    store = dist.PrefixStore("dualdist", dist.distributed_c10d._get_default_store())
    used = {"cpu", device.type} & kinds
    backend = NativeBackend(
        lambda: _world(used),
        range(dist.get_world_size()),
        dist.get_rank(),
        store,
        contextlib.nullcontext,
        timeout_s,
        owned=False,
        on_gpu="cuda" in used,
    )
    atexit.register(backend.at_exit)
    return backend, TcpStore(store, "", "torch.distributed's own store")


def _world(kinds: Iterable[str]) -> dict[str, ProcessGroup]:
    """torch.distributed's default group for every type of device."""
    group = dist.group.WORLD
    assert group is not None, "the default group has been set up"
    return dict.fromkeys(kinds, group)


def start(world: InitContext, *, shares_memory: bool) -> NativeBackend:
    """Set up torch.distributed's default group over the store; a group of one needs none."""
    if not dist.is_available():
        raise BackendUnavailableError("this torch was built without torch.distributed: install another build of torch")
    rank, size, environ = world.topology.rank, world.topology.size, world.environ
    nccl = world.device.type == "cuda" and dist.is_nccl_available()
    inner: dist.Store = dist.HashStore() if world.store is None else world.store.store  # type: ignore[attr-defined]
    _allow_open_files(needed_open_files(size))
    named = {name: world.interface for name in INTERFACES if world.interface and name not in environ}

    def network() -> contextlib.AbstractContextManager[None]:
        return temporary_variables(environ, named)

    shows_errors = sys.excepthook
    try:
        with network():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=dist.PrefixStore(f"{world.key}/group", inner),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=world.timeout_s),
            )
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} of {size} met the others, but torch could not connect them ({first_line(error)}): "
            f"if the hosts have several networks, name the one they share in {' and '.join(INTERFACES)}"
        ) from error
    names_rank = sys.excepthook

    def unhook() -> None:
        """Else every further session would put one more "[rank0]: " before each line of an error."""
        if sys.excepthook is names_rank:
            sys.excepthook = shows_errors

    backend = NativeBackend(
        lambda: _world(["cpu", "cuda"] if nccl else ["cpu"]),
        range(size),
        rank,
        dist.PrefixStore(f"{world.key}/lines", inner),
        network,
        world.timeout_s,
        owned=True,
        on_gpu=nccl,
        hosts=[place.host for place in world.places] if shares_memory else (),
    )
    backend.unhook = unhook
    backend._groups()
    atexit.register(backend.at_exit)
    return backend


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit of open files to `count`, as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
