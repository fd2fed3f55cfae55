"""Connection of a process group: its backend, chosen as dd.init() chooses, over the store that torch gives."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist

from dualdist import session
from dualdist.backends.base import PointToPoint
from dualdist.backends.native.store import TcpStore
from dualdist.backends.registry import AUTO, MPI, NATIVE
from dualdist.backends.staging import without_staging
from dualdist.backends.wait_budget import wait_budget_s
from dualdist.c10d.process_group import DualdistGroup, GroupBackend
from dualdist.engine.monitor import Monitor
from dualdist.environments import detect
from dualdist.errors import TopologyError, UnsupportedError
from dualdist.rendezvous.backend_selection import MPI_LAUNCHERS
from dualdist.rendezvous.records import RendezvousStore, Request
from dualdist.session import Session
from dualdist.topology import Topology
from dualdist.utils import tracebacks
from dualdist.utils.extension import is_used


def create_group(given: Any) -> DualdistGroup:
    """Return a process group, of all ranks or, in new_group(), of some; torch calls this on its members only."""
    tracebacks.install_hooks(os.environ)
    rank, size, timeout = int(given.group_rank), int(given.group_size), given.timeout
    world = dist.group.WORLD if dist.is_initialized() else None
    # torch's stores may outlive a process group, with its keys, and torch may use its name again.
    key = f"{given.group_id}/{given.store.add(f'dualdist/{rank}', 1)}"
    if isinstance(world, DualdistGroup):
        backend = _subgroup(world.members, list(given.global_ranks_in_group), f"c10d/{key}")
    else:
        backend = _connect(given.store, rank, size, timeout, key)
    if isinstance(backend.transport, PointToPoint):
        backend.transport.connect_peers()
    return DualdistGroup(given.store, rank, size, backend, str(given.group_id), timeout.total_seconds())


def _connect(store: dist.Store, rank: int, size: int, timeout: timedelta, key: str) -> GroupBackend:
    """Connect all ranks: by the session of dd.init() if it is open and has the same ranks, else by a new one."""
    if session.is_open():
        here = session.current()
        if (here.topology.rank, here.topology.size) == (rank, size):
            return _subgroup(_members(here), here.backend.ranks, f"c10d/{key}")
    own = cast(Any, store).clone()  # so that this waits for no call of the program
    return _members(_open_session(own, rank, size, timeout.total_seconds(), f"dualdist/{key}"))


def _members(opened: Session) -> GroupBackend:
    budget_s = wait_budget_s(opened.topology.local_size, torch.get_num_threads())
    return GroupBackend(without_staging(opened.backend), opened.world.monitor, opened.close, budget_s)


def _subgroup(world: GroupBackend, ranks: Sequence[int], key: str) -> GroupBackend:
    """Connect some ranks of a group, or all of them again."""
    transport = world.transport
    if list(ranks) == list(transport.ranks):
        child = transport.duplicate(key)
    elif isinstance(transport, PointToPoint):
        child = transport.subgroup(ranks, key)
    else:
        raise UnsupportedError(
            f"the backend {transport.name} creates a group only if all ranks ask for it, and torch.distributed asks "
            "the members alone: set DUALDIST_BACKEND=native, or mpi where MPI was started"
        )
    monitor = Monitor(world.monitor.probe, ranks, key)
    return GroupBackend(child, monitor, child.close, world.wait_budget_s)


def _open_session(store: dist.Store, rank: int, size: int, timeout_s: float, key: str) -> Session:
    environ = os.environ
    requested, transport = session.requested_choice(None, environ)
    topology = _topology(environ, rank, size, requested)
    if requested == AUTO:
        requested = _default_backend(topology, transport)
    request = Request(
        topology,
        environ,
        transport,
        key,
        timeout_s,
        RendezvousStore(TcpStore(store, _address(store, environ), "torch.distributed's store")),
        sets_default_group=False,
        uses_gpu=False,
    )
    return session.open_session(requested, request)


def _default_backend(topology: Topology, transport: str) -> str:
    """Return what "auto" is here: a backend that has send, recv and groups of some ranks, as Horovod's has not.

    On one host that is native, through shared memory; elsewhere MPI where mpirun has started it, else native.
    """
    has_mpi = topology.launcher in MPI_LAUNCHERS and find_spec("mpi4py") is not None
    is_one_host = topology.num_nodes == 1 and "num_nodes" not in topology.inferred
    shares_memory = is_one_host and is_used(torch.__version__)
    wants_native = transport in ("shm", "gloo") or (not transport and shares_memory)
    return MPI if has_mpi and not wants_native else NATIVE


def _topology(environ: Mapping[str, str], rank: int, size: int, requested: str) -> Topology:
    """Return the launcher's topology if it has the same rank and size, else one of what torch was told.

    A program may start its ranks itself, with variables that dd.init() would refuse.
    """
    needs_launcher = requested not in (AUTO, NATIVE)
    try:
        found = detect(environ)
    except TopologyError:
        if needs_launcher:
            raise
        found = None
    if found is not None and (found.rank, found.size) == (rank, size):
        return found
    if found is not None and found.launcher != "none" and needs_launcher:
        raise TopologyError(
            f"init_process_group() was given rank {rank} of {size}, but {found.source} say rank {found.rank} of "
            f"{found.size}, which the backend {requested} needs: give it the launcher's numbers, or set "
            "DUALDIST_BACKEND=native"
        )
    launcher = "none" if size == 1 else "init_process_group"
    inferred = frozenset({"local_rank", "local_size", "node_rank", "num_nodes"})
    return Topology(rank, size, rank, size, 0, 1, launcher=launcher, source="init_process_group()", inferred=inferred)


def _address(store: dist.Store, environ: Mapping[str, str]) -> str:
    """Return the address of the store, or "" if it has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else environ.get("MASTER_ADDR", "")
