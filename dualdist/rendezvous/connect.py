"""Connection of the ranks of a session: they meet, exchange their locations, and start or adopt the backend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from dualdist.backends import registry
from dualdist.backends.registry import AUTO, NATIVE, BackendSpec
from dualdist.errors import DualdistError, RendezvousError, UsageError
from dualdist.liveness import process_state
from dualdist.rendezvous.address_exchange import BroadcastAddressExchange
from dualdist.rendezvous.backend_selection import Print, describe_choice, matching_choice, select_backend
from dualdist.rendezvous.rank_assignment import (
    RankReport,
    assign_locations,
    make_report,
    processes_here,
    with_location,
)
from dualdist.rendezvous.records import Connected, RendezvousStore, Request
from dualdist.topology import RankLocation
from dualdist.utils.deadline import Deadline, call_within
from dualdist.utils.network_interfaces import host_identity

if TYPE_CHECKING:
    from dualdist.backends.base import Backend
    from dualdist.engine.channel import Channel
    from dualdist.rendezvous.elastic_agent import ElasticAgent

STORE = "dualdist.store"
# An error of the meeting itself, which comes by the time limit, says more than that it was late.
GRACE_S = 3.0


def connect_ranks(requested: str, request: Request, print_line: Print) -> Connected:
    """Connect the ranks by the requested backend; for "auto", by the program's own process group or a saved choice."""
    adopted = registry.get(NATIVE if requested == AUTO else requested).adopt(request.context(None))
    if adopted is not None:
        request = replace(request, topology=adopted.topology)
        locations = _exchange_locations(adopted.backend, request)
        adopted.set_locations(locations)
        topology = with_location(request.topology, locations)
        return Connected(adopted.backend, topology, locations, adopted.store, request.key)

    def print_on_root(line: str) -> None:
        if request.topology.rank == 0:
            print_line(line)

    is_auto = requested == AUTO
    saved = matching_choice(request.topology, request.transport, request.environ, print_on_root) if is_auto else None
    if saved is None:
        return _connect(registry.get(select_backend(requested, request.topology)), request)
    try:
        connected = _connect(registry.get(saved.backend), replace(request, transport=saved.transport))
    except DualdistError:
        print_on_root(f"{describe_choice(saved, request.environ)}; it fails here")
        raise
    return replace(connected, saved=saved)


def _connect(spec: BackendSpec, request: Request) -> Connected:
    """Start the backend before the ranks meet, if it connects them, else after."""
    agent = request.rendezvous.agent
    backend = spec.start_early(request.context(None))
    if backend is not None:
        connected = _meet_over(backend, request)
    elif agent is None:
        connected = _meet_at_store(spec, request)
    else:
        connected = _meet_unless_lost(agent, spec, request)
    if (name := connected.backend.name) != spec.name:
        connected.backend.close()
        raise UsageError(f"the backend {spec.name!r} names itself {name!r}: give its Backend.name the first name")
    return connected


def _meet_unless_lost(agent: ElasticAgent, spec: BackendSpec, request: Request) -> Connected:
    """Meet at a store; raise RendezvousError as soon as a rank of this generation is lost.

    What waits for that rank is left behind in a thread, whose late result is closed and known to nobody.
    """
    generation, timeout_s = agent.generation, request.timeout_s + GRACE_S

    def find_problem() -> RendezvousError | None:
        loss = agent.find_loss(generation)
        return RendezvousError(f"while the ranks met, {loss}") if loss else None

    def meet() -> Connected:
        connected = _meet_at_store(spec, replace(request, rendezvous=RendezvousStore(agent=agent)))
        if (problem := find_problem()) is not None:
            connected.backend.close()
            raise problem
        return connected

    late = RendezvousError(f"the ranks did not connect within {timeout_s:g} s")
    return call_within(timeout_s, meet, lambda: late, find_problem)


def _meet_over(backend: Backend, request: Request) -> Connected:
    """Exchange locations over a backend that has connected the ranks."""
    locations = _exchange_locations(backend, request)
    topology = with_location(request.topology, locations)
    known, deadline = request.rendezvous, Deadline(request.timeout_s)
    if known.store is None and topology.size > 1:  # for the rank probe, which needs one beside the backend
        from dualdist.backends.control_plane import broadcast_object
        from dualdist.backends.native import store
        from dualdist.rendezvous.meeting import serve_or_connect

        channel = _unmonitored(backend, request.timeout_s)

        def broadcast(text: str | None) -> str:
            found = channel.run(STORE, lambda backend: broadcast_object(backend, text, 0, STORE))
            return cast(str, found)

        exchange = BroadcastAddressExchange(broadcast)
        known.store = serve_or_connect(exchange, topology, host_identity(request.environ), deadline, store.connect)
    return Connected(backend, topology, locations, known.store, request.key)


def _meet_at_store(spec: BackendSpec, request: Request) -> Connected:
    """Start a backend after the ranks have met at a store; a job of one rank needs none."""
    store, locations, interface, key = None, [RankLocation(0, 0)], None, request.key
    if request.topology.size > 1:
        from dualdist.rendezvous.store_rendezvous import join_store

        store, key, locations, interface = join_store(request, spec.name)
    request = replace(request, key=key, topology=with_location(request.topology, locations))
    context = request.context(request.topology)
    try:
        backend = spec.start(replace(context, locations=locations, store=store, interface=interface))
    except RendezvousError as error:
        from dualdist.liveness.rank_probe import describe_ended

        ended = describe_ended(processes_here(locations, request.topology.rank))
        if not ended:
            raise
        raise RendezvousError(f"{error}; {ended}") from error.__cause__
    return Connected(backend, request.topology, locations, store, key)


def _exchange_locations(backend: Backend, request: Request) -> list[RankLocation]:
    """Return the locations of all ranks, from their reports exchanged over a running backend."""
    from dualdist.backends.control_plane import allgather_object

    process, host = process_state.current_process().dumps(), host_identity(request.environ)
    report = make_report(request.topology, host, backend.name, request.transport, process)
    channel = _unmonitored(backend, request.timeout_s)
    reports = channel.run(
        "exchange of locations", lambda each: allgather_object(each, report.dumps(), "dualdist.places")
    )
    return assign_locations([RankReport.loads(text) for text in reports])


def _unmonitored(backend: Backend, timeout_s: float) -> Channel:
    """Return a channel for the messages before a session is open."""
    from dualdist.engine.channel import Channel
    from dualdist.engine.monitor import Monitor

    return Channel(backend, Monitor(None, backend.ranks), timeout_s)
