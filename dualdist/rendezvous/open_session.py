"""How a session is opened: the backend is started or the program's own adopted, and the ranks find their places."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dualdist.errors import BackendUnavailableError, DualdistError, TopologyError, UnsupportedError
from dualdist.monitoring import process_state
from dualdist.rendezvous.backend_selection import (
    TRANSPORT,
    Print,
    controller,
    describe_choice,
    matching_choice,
    select_backend,
    select_device,
)
from dualdist.rendezvous.rank_assignment import (
    RankReport,
    assign_locations,
    make_report,
    processes_on_host,
    with_location,
)
from dualdist.topology import RankLocation, Topology
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import host_identity

if TYPE_CHECKING:
    import torch

    from dualdist.backends.base import Backend, Store
    from dualdist.backends.shm.exchange import ShmExchange
    from dualdist.collectives.group import Group

STORE = "dualdist.store"


@dataclass
class RendezvousStore:
    """The store at which this process met the others, for its next sessions; rank 0 serves it while it lives.

    `round` is that of the agent that started the ranks, where its store outlives them.
    """

    store: Store | None = None
    round: str = ""


@dataclass(frozen=True)
class SessionConfig:
    """What a session is opened from."""

    topology: Topology
    environ: MutableMapping[str, str]
    transport: str  # that was asked for, or ""
    key: str  # of what the session keeps in the store: the same on all ranks, and new for every session
    timeout_s: float
    meeting: RendezvousStore


@dataclass(frozen=True)
class Session:
    """What init() made: the group of all ranks, this rank's place and device, and what was made since."""

    world: Group
    topology: Topology
    device: torch.device
    timeout_s: float
    hosts: tuple[int, ...]  # of each rank, the lowest rank that shares its host
    store: Store | None  # None where there is one rank
    key: str  # of what this session keeps in the store
    groups: list[Group] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)  # what other faces keep as long as the session
    close_callbacks: list[Callable[[], None]] = field(default_factory=list)  # before the groups end

    @property
    def backend(self) -> Backend:
        return self.world.backend

    @property
    def ignored_failure(self) -> str:
        """Why an operation failed, where the program went on regardless."""
        return next((group.ignored_failure for group in (self.world, *self.groups) if group.ignored_failure), "")

    def close(self) -> None:
        """End the groups and the backend; the rank probe last, since errors on the way use it."""
        with contextlib.ExitStack() as stack:  # all of them, in this order, though one should fail
            if self.world.monitor.probe is not None:
                stack.callback(self.world.monitor.probe.close)
            for group in (self.world, *reversed(self.groups)):
                stack.callback(group.close)
            self.groups.clear()


def open_session(requested: str, start: SessionConfig, tell: Print) -> Session:
    """The session on the backend that was asked for, on the program's own process group, or on what was saved."""
    group = _existing_group()
    if group is not None and requested in ("auto", "native"):
        return _adopt(start, group)

    def tell_first(said: str) -> None:
        if start.topology.rank == 0:
            tell(said)

    saved = matching_choice(start.topology, start.transport, start.environ, tell_first) if requested == "auto" else None
    if saved is None:
        return _open_by(requested, start)
    try:
        opened = _open_by(saved.backend, replace(start, transport=saved.transport))
    except DualdistError:
        tell_first(f"{describe_choice(saved, start.environ)}; it fails here")
        raise
    ran = opened.backend.transport
    instead = "" if ran == saved.transport else f"; here it runs over {ran} instead"
    tell_first(f"{describe_choice(saved, start.environ)}{instead}")
    return opened


def _open_by(requested: str, start: SessionConfig) -> Session:
    name = select_backend(requested, start.topology)
    if name == "mpi":
        from dualdist.backends.mpi import backend as mpi

        return _open_on_mpi(mpi.start(start.topology, start.environ, start.timeout_s), start)
    if name == "horovod" and controller(start.transport, start.topology, start.environ) == "mpi":
        return _open_horovod_on_mpi(start)
    return _open_over_store(name, start)


def _existing_group() -> tuple[int, int] | None:
    """Rank and size in torch.distributed's default group, if the program has set one up."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None  # as in most programs, which need not wait here for the native backend's modules
    from dualdist.backends.native import startup

    return startup.existing_group()


def _adopt(start: SessionConfig, group: tuple[int, int]) -> Session:
    """Use the program's own process group. Where no launcher is seen, the group says how many ranks there are."""
    from dualdist.backends.native import startup

    rank, size = group
    topology = start.topology
    if topology.launcher == "none":
        topology = Topology(
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
    elif (rank, size) != (topology.rank, topology.size):
        raise TopologyError(
            f"torch.distributed's default group says rank {rank} of {size}, but {topology.source} say "
            f"rank {topology.rank} of {topology.size}: set the group up with the launcher's numbers, or not at all"
        )
    backend, store = startup.adopt(select_device(None), start.timeout_s)
    places = _places_by(backend, topology, start.transport, start.environ)
    if start.transport != "gloo":
        backend.share_memory([place.host for place in places])
    return _session(backend, store, replace(start, topology=with_location(topology, places)), places)


def _open_horovod_on_mpi(start: SessionConfig) -> Session:
    from dualdist.backends.horovod import startup as horovod_start
    from dualdist.backends.mpi import world as mpi_world

    topology = start.topology
    if mpi_world.has_ended():
        raise UnsupportedError(
            "MPI was finished in this process, by a session on another backend, and cannot start again: "
            f"start a new job, or set {TRANSPORT}=gloo"
        )
    backend = horovod_start.start_on_mpi(topology, start.environ, select_device(None), start.timeout_s)
    if (backend.rank, backend.size) != (topology.rank, topology.size):
        backend.close()
        raise TopologyError(
            f"{topology.source} say rank {topology.rank} of {topology.size}, but Horovod's MPI says "
            f"rank {backend.rank} of {backend.size}: this Horovod was built with another MPI than the mpirun that "
            "started it; put that MPI's mpirun first on PATH, build again with `dualdist install-horovod --force`, "
            "or set DUALDIST_TRANSPORT=gloo"
        )
    return _open_on_mpi(backend, start)


def _open_on_mpi(backend: Backend, start: SessionConfig) -> Session:
    """The session on a backend that runs over MPI, where ranks need no store to meet, but to tell who is missing."""
    places = _places_by(backend, start.topology, "", start.environ)
    start = replace(start, topology=with_location(start.topology, places))
    if start.meeting.store is None and start.topology.size > 1:
        start.meeting.store = _store_over(backend, start.topology, start.environ, Deadline(start.timeout_s))
    return _session(backend, start.meeting.store, start, places)


def _store_over(backend: Backend, topology: Topology, environ: MutableMapping[str, str], deadline: Deadline) -> Store:
    """A store that rank 0 serves, found over a backend that runs already."""
    from dualdist.backends.control_plane import broadcast_object
    from dualdist.backends.native import store as native_store
    from dualdist.utils import network_interfaces

    host = network_interfaces.host_identity(environ)
    if topology.rank == 0:
        listener = network_interfaces.open_listener(0, loopback_only=topology.num_nodes == 1)
        port = listener.getsockname()[1]
        broadcast_object(
            backend, network_interfaces.StoreAddress.of(host, port, one_node=topology.num_nodes == 1), 0, STORE
        )
        return native_store.connect(network_interfaces.LOOPBACK, port, listener, deadline)
    invitation = broadcast_object(backend, network_interfaces.StoreAddress("", (), 0), 0, STORE)
    return native_store.connect(invitation.reachable_address(host, deadline), invitation.port, None, deadline)


def _open_over_store(name: str, start: SessionConfig) -> Session:
    """Open the backend where the ranks first meet at a store; a job of one rank needs none."""
    if name == "single":
        from dualdist.backends.single import SingleBackend

        return _session(SingleBackend(), None, start, [RankLocation(0, 0)])
    from dualdist.backends.base import InitContext
    from dualdist.backends.native import store as native_store
    from dualdist.rendezvous import store_rendezvous

    topology, environ, transport = start.topology, start.environ, start.transport
    deadline = Deadline(start.timeout_s)
    if topology.size == 1:
        store, places, interface = None, [RankLocation(0, 0)], None
    else:
        met = store_rendezvous.join_store(
            topology,
            environ,
            start.key,
            name,
            native_store.connect,
            start.meeting.store,
            deadline,
            transport,
            start.meeting.round,
        )
        store, places, interface = met.store, met.places, met.interface
        start.meeting.store, start.meeting.round = store, met.round
        start = replace(start, key=met.key)
    topology = with_location(topology, places)
    world = InitContext(
        topology, places, store, start.key, interface, environ, select_device(topology), start.timeout_s
    )
    backend: Backend
    if name == "native":
        from dualdist.backends.native import startup

        backend = startup.start(world, shares_memory=transport != "gloo")
    else:
        from dualdist.backends.horovod import startup as horovod_start

        backend = horovod_start.start_on_gloo(world)
    return _session(backend, store, replace(start, topology=topology), places)


def _places_by(
    backend: Backend, topology: Topology, transport: str, environ: MutableMapping[str, str]
) -> list[RankLocation]:
    """Everybody's place, as the ranks find it when they compare what they know, over a backend that runs already."""
    from dualdist.backends.control_plane import allgather_object

    mine = make_report(
        topology, host_identity(environ), backend.name, transport, process_state.current_process().dumps()
    )
    return assign_locations(
        [RankReport.loads(text) for text in allgather_object(backend, mine.dumps(), "dualdist.places")]
    )


def _session(backend: Backend, store: Store | None, start: SessionConfig, places: Sequence[RankLocation]) -> Session:
    """The session on a backend that runs.

    The group of all ranks, whose failing operations name the ranks that are missing, has a line of its own: torch's
    default group is the program's, which may use it while ours is busy in a thread.
    """
    from dualdist.collectives.group import Group
    from dualdist.monitoring.monitored import Monitor
    from dualdist.monitoring.rank_probe import RankProbe

    topology, key, timeout_s = start.topology, start.key, start.timeout_s
    if topology.size == 1:
        store = None
    hosts = tuple(place.host for place in places)
    processes = processes_on_host(places, topology.rank)
    begun: list[Callable[[], None]] = [backend.close]
    try:
        probe = None if store is None else RankProbe(store, backend.rank, f"{key}/probe", processes, timeout_s)
        begun += [] if probe is None else [probe.close]
        line = backend.channel("operations")
        exchange = open_exchange(store, f"{key}/mailbox", hosts, backend.ranks, backend.rank, timeout_s)
    except BaseException:
        for end in begun[::-1]:  # else the next init() would take torch's default group for the program's own
            with contextlib.suppress(DualdistError):  # what failed first says more
                end()
        raise
    world = Group(line, Monitor(probe, backend.ranks), backend, exchange)
    return Session(world, topology, select_device(topology), timeout_s, hosts, store, key)


def open_exchange(
    store: Store | None, key: str, hosts: Sequence[int], ranks: Sequence[int], place: int, timeout_s: float
) -> ShmExchange | None:
    """Where these ranks exchange messages, if they share a host and its memory; the members call this."""
    if store is None or place < 0 or len(ranks) == 1 or len({hosts[rank] for rank in ranks}) > 1:
        return None
    from dualdist.backends.shm import exchange

    try:
        return exchange.open_exchange(store, key, ranks, place, Deadline(timeout_s))
    except BackendUnavailableError:
        return None  # they exchange them over the backend
