"""Opening of a session: the ranks meet, their locations are exchanged, and the backend is started or adopted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from dualdist.backends import registry
from dualdist.backends.registry import AUTO, NATIVE, BackendSpec
from dualdist.errors import BackendUnavailableError, DualdistError, RendezvousError, UsageError
from dualdist.monitoring import process_state
from dualdist.rendezvous.address_exchange import BroadcastAddressExchange
from dualdist.rendezvous.backend_selection import Print, describe_choice, matching_choice, select_backend, select_device
from dualdist.rendezvous.rank_assignment import RankReport, assign_locations, make_report, with_location
from dualdist.topology import RankLocation, Topology
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import host_identity

if TYPE_CHECKING:
    import torch

    from dualdist.backends.base import Backend, InitContext, Store
    from dualdist.collectives.group import Group
    from dualdist.engine.channel import Channel

STORE = "dualdist.store"


@dataclass
class RendezvousStore:
    """The store of this process's first rendezvous, for later sessions; rank 0 serves it while it lives.

    `generation` is that of the agent that started the ranks, if its store outlives them, or "".
    """

    store: Store | None = None
    generation: str = ""


@dataclass(frozen=True)
class SessionConfig:
    """Arguments of open_session()."""

    topology: Topology
    environ: MutableMapping[str, str]
    transport: str  # requested, or ""
    key: str  # prefix of the session's keys in the store: the same on all ranks, different for every session
    timeout_s: float
    rendezvous: RendezvousStore
    sets_default_group: bool = True
    uses_gpu: bool = True  # if there is one

    def device(self, topology: Topology | None) -> torch.device:
        """Return the device of this rank, or only its type without a topology."""
        import torch

        return select_device(topology) if self.uses_gpu else torch.device("cpu")

    def context(self, topology: Topology | None) -> InitContext:
        from dualdist.backends.base import InitContext

        device = self.device(topology)
        context = InitContext(self.topology, self.environ, self.transport, device, self.timeout_s, self.key)
        return replace(context, sets_default_group=self.sets_default_group)


@dataclass(frozen=True)
class Session:
    """An open session: the group of all ranks, this rank's location and device, and what was created since."""

    world: Group
    topology: Topology
    device: torch.device
    timeout_s: float
    hosts: tuple[int, ...]  # for each rank, the lowest rank on the same host
    store: Store | None  # None if there is one rank
    key: str  # prefix of this session's keys in the store
    groups: list[Group] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)  # objects that other modules keep until shutdown
    close_callbacks: list[Callable[[], None]] = field(default_factory=list)  # called before the groups close

    @property
    def backend(self) -> Backend:
        return self.world.backend

    @property
    def ignored_failure(self) -> str:
        """Return why an operation failed, if the program continued regardless, or ""."""
        return next((group.ignored_failure for group in (self.world, *self.groups) if group.ignored_failure), "")

    def close(self) -> None:
        """Close the groups and the backend; the rank probe last, since errors on the way use it."""
        with contextlib.ExitStack() as stack:  # closes all of them, in reverse order, even if one fails
            if self.world.monitor.probe is not None:
                stack.callback(self.world.monitor.probe.close)
            for group in (self.world, *reversed(self.groups)):
                stack.callback(group.close)
            self.groups.clear()


def open_session(requested: str, config: SessionConfig, print_line: Print) -> Session:
    """Open a session on the requested backend; for "auto", on the program's own process group or the saved choice."""
    adopted = registry.get(NATIVE if requested == AUTO else requested).adopt(config.context(None))
    if adopted is not None:
        config = replace(config, topology=adopted.topology)
        locations = _exchange_locations(adopted.backend, config)
        adopted.set_locations(locations)
        config = replace(config, topology=with_location(config.topology, locations))
        return _start_session(adopted.backend, adopted.store, config, locations)

    def print_on_root(line: str) -> None:
        if config.topology.rank == 0:
            print_line(line)

    is_auto = requested == AUTO
    saved = matching_choice(config.topology, config.transport, config.environ, print_on_root) if is_auto else None
    if saved is None:
        return _open(registry.get(select_backend(requested, config.topology)), config)
    try:
        session = _open(registry.get(saved.backend), replace(config, transport=saved.transport))
    except DualdistError:
        print_on_root(f"{describe_choice(saved, config.environ)}; it fails here")
        raise
    transport = session.backend.transport
    instead = "" if transport == saved.transport else f"; here it runs over {transport} instead"
    print_on_root(f"{describe_choice(saved, config.environ)}{instead}")
    return session


def _open(spec: BackendSpec, config: SessionConfig) -> Session:
    """Start the backend before the ranks meet, if it connects them, else after."""
    backend = spec.start_early(config.context(None))
    session = _open_over_store(spec, config) if backend is None else _open_over_backend(backend, config)
    if (name := session.backend.name) != spec.name:
        session.close()
        raise UsageError(f"the backend {spec.name!r} names itself {name!r}: give its Backend.name the first name")
    return session


def _open_over_backend(backend: Backend, config: SessionConfig) -> Session:
    """Open a session on a backend that has connected the ranks."""
    locations = _exchange_locations(backend, config)
    config = replace(config, topology=with_location(config.topology, locations))
    known, topology, deadline = config.rendezvous, config.topology, Deadline(config.timeout_s)
    if known.store is None and topology.size > 1:  # for the rank probe, which needs one beside the backend
        from dualdist.backends.control_plane import broadcast_object
        from dualdist.rendezvous.store_rendezvous import serve_or_connect

        channel = unmonitored(backend, config.timeout_s)

        def broadcast(text: str | None) -> str:
            found = channel.run(STORE, lambda backend: broadcast_object(backend, text, 0, STORE))
            return cast(str, found)

        exchange = BroadcastAddressExchange(broadcast)
        known.store = serve_or_connect(exchange, topology, host_identity(config.environ), deadline)
    return _start_session(backend, known.store, config, locations)


def _open_over_store(spec: BackendSpec, config: SessionConfig) -> Session:
    """Start a backend after the ranks have met at a store; a job of one rank needs none."""
    store, locations, interface = None, [RankLocation(0, 0)], None
    if config.topology.size > 1:
        from dualdist.rendezvous.store_rendezvous import join_store

        store, key, locations, interface = join_store(config, spec.name)
        config = replace(config, key=key)
    config = replace(config, topology=with_location(config.topology, locations))
    context = config.context(config.topology)
    try:
        backend = spec.start(replace(context, locations=locations, store=store, interface=interface))
    except RendezvousError as error:
        from dualdist.monitoring.rank_probe import describe_ended

        ended = describe_ended(_processes(locations, config.topology.rank))
        if not ended:
            raise
        raise RendezvousError(f"{error}; {ended}") from error.__cause__
    return _start_session(backend, store, config, locations)


def _exchange_locations(backend: Backend, config: SessionConfig) -> list[RankLocation]:
    """Return the locations of all ranks, from their reports exchanged over a running backend."""
    from dualdist.backends.control_plane import allgather_object

    process, host = process_state.current_process().dumps(), host_identity(config.environ)
    report = make_report(config.topology, host, backend.name, config.transport, process)
    channel = unmonitored(backend, config.timeout_s)
    reports = channel.run(
        "exchange of locations", lambda each: allgather_object(each, report.dumps(), "dualdist.places")
    )
    return assign_locations([RankReport.loads(text) for text in reports])


def unmonitored(backend: Backend, timeout_s: float) -> Channel:
    """Return a channel for the messages before a session is open."""
    from dualdist.engine.channel import Channel
    from dualdist.engine.monitor import Monitor

    return Channel(backend, Monitor(None, backend.ranks), timeout_s)


def _start_session(
    backend: Backend, store: Store | None, config: SessionConfig, locations: Sequence[RankLocation]
) -> Session:
    """Return the session on a running backend.

    The group of all ranks has its own connections: the program may use torch's default group while a thread uses ours.
    """
    from dualdist.collectives.group import Group
    from dualdist.engine.monitor import Monitor
    from dualdist.monitoring.rank_probe import RankProbe

    topology, key, timeout_s = config.topology, config.key, config.timeout_s
    if topology.size == 1:
        store = None
    hosts = tuple(location.host for location in locations)
    processes = _processes(locations, topology.rank)
    opened: list[Callable[[], None]] = [backend.close]
    try:
        probe = None if store is None else RankProbe(store, backend.rank, f"{key}/roll", processes, timeout_s)
        opened += [] if probe is None else [probe.close]
        monitor = Monitor(probe, backend.ranks, "all ranks")
        with monitor.operation("dd.init"):
            operations = backend.duplicate("operations")
            share_messages(operations, store, f"{key}/requests", hosts, timeout_s)
    except BaseException:
        for close in opened[::-1]:  # or the next init() would take torch's default group for the program's own
            with contextlib.suppress(DualdistError):  # the first error says more
                close()
        raise
    world = Group(operations, monitor, timeout_s, backend)
    return Session(world, topology, config.device(topology), timeout_s, hosts, store, key)


def _processes(locations: Sequence[RankLocation], rank: int) -> list[process_state.ProcessIdentity | None]:
    """Return the processes of all ranks, None for those on other hosts than this rank."""
    return [
        process_state.ProcessIdentity.loads(each.process)
        if each.process and each.host == locations[rank].host
        else None
        for each in locations
    ]


def share_messages(backend: Backend, store: Store | None, key: str, hosts: Sequence[int], timeout_s: float) -> None:
    """Let messages go through shared memory if the backend's ranks share a host; all of them call this."""
    ranks, index = backend.ranks, backend.rank
    if store is None or index < 0 or len(ranks) == 1 or len({hosts[rank] for rank in ranks}) > 1:
        return
    if backend.messenger is not None:
        return
    from dualdist.backends.shm.host import MESSAGE_SLOT_BYTES, connect_host

    with contextlib.suppress(BackendUnavailableError):  # messages go over the backend
        backend.messenger = connect_host(store, key, ranks, index, MESSAGE_SLOT_BYTES, Deadline(timeout_s))
