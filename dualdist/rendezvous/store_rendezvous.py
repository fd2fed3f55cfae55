"""Rendezvous of the ranks of a session at one of torch's stores; later sessions use it again.

Note [elastic generations]: the store of torchrun's agent outlives the ranks, with the keys of earlier ranks in it, and
no variable numbers the generation of ranks: torchrun counts restarts on each host separately, and not those after
which hosts have come or gone. So rank 0 draws a number, and every other rank posts a new question, which rank 0 of its
generation answers with that number. Questions left from earlier generations are answered as well; no rank reads those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualdist.backends.native.store import connect
from dualdist.environments.env_values import RENDEZVOUS
from dualdist.errors import DualdistError, RendezvousError
from dualdist.liveness import process_state
from dualdist.rendezvous.address_exchange import AddressExchange, rendezvous_endpoint
from dualdist.rendezvous.meeting import LocationExchange, address_of_rank_0, interface_between_nodes, open_store
from dualdist.rendezvous.rank_assignment import make_report
from dualdist.rendezvous.records import Request
from dualdist.topology import RankLocation, Topology
from dualdist.utils import network_interfaces
from dualdist.utils.deadline import Deadline, call_within

if TYPE_CHECKING:
    from dualdist.backends.base import Store

MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
GENERATIONS = "dualdist/generations"
POLL_S = 0.01
# The store may report a timeout so many seconds late.
GRACE_S = 1.0


def join_store(request: Request, backend: str) -> tuple[Store, str, list[RankLocation], str | None]:
    """Connect all ranks to one store, the known one in a later session, and exchange their locations.

    Every rank calls this with the backend that it will use. Errors are raised on every rank that takes part.

    Returns:
        The store, the prefix of this session's keys in it, the locations of all ranks, and this rank's network
        interface towards the other nodes, None if there are none.
    """
    topology, environ, known = request.topology, request.environ, request.rendezvous
    host, deadline = network_interfaces.host_identity(environ), Deadline(request.timeout_s)
    report = make_report(topology, host, backend, request.transport, process_state.current_process().dumps())
    connected: list[tuple[Store, AddressExchange | None]] = []

    def meet() -> tuple[Store, str, list[RankLocation], str | None]:
        if known.store is None:
            agent = known.agent
            endpoint = rendezvous_endpoint(topology, environ, deadline) if agent is None else agent.address_exchange()
            is_served = topology.rendezvous == "agent" and not environ.get(RENDEZVOUS)
            store: Store = open_store(endpoint, topology, host, deadline, connect, is_served=is_served)
            connected.append((store, None if isinstance(endpoint, tuple) else endpoint))
        else:
            store = known.store
            connected.append((store, None))
        if known.store is None and may_restart(topology, environ):
            known.generation = agree_on_generation(store, topology, deadline)
        key = f"{request.key}/{known.generation}" if known.generation else request.key
        locations = LocationExchange(store, report, key, deadline).run()
        address = address_of_rank_0(store, locations, topology.rank, key, deadline)
        return store, key, locations, interface_between_nodes(address, locations, topology.rank)

    def late() -> DualdistError:
        waited = f"rank {topology.rank} waited {deadline.timeout_s:g} s for"
        if not connected:
            where = environ.get(RENDEZVOUS) or topology.address or topology.rendezvous
            if topology.rendezvous == "run":
                return RendezvousError(f"{waited} rank 0's address, which `dualdist run` passes on")
            return RendezvousError(f"{waited} the network or the shared folder by which the ranks meet ({where})")
        return RendezvousError(
            f"{waited} an answer of the store at {connected[0][0].endpoint}: "
            "the process that serves it, rank 0 or its launcher, is stopped or unreachable"
        )

    try:  # in a thread: a store that stops and a shared folder that hangs have no timeouts
        found = call_within(deadline.left_s() + GRACE_S, meet, late)
    finally:
        for _, exchange in connected:
            if exchange is not None and topology.rank == 0:
                exchange.withdraw()
    known.store = found[0]
    return found


def may_restart(topology: Topology, environ: Mapping[str, str]) -> bool:
    """Return True if several generations of ranks may use one store: with restarts, or if hosts may come and go."""
    return topology.rendezvous == "agent" and (environ.get(MAX_RESTARTS, "0") != "0" or topology.num_nodes > 1)


def agree_on_generation(store: Store, topology: Topology, deadline: Deadline) -> str:
    """Return the number of this generation; each of its ranks calls this once: Note [elastic generations]."""
    rank, size = topology.rank, topology.size
    if rank == 0:
        number = str(store.add(f"{GENERATIONS}/begun", 1))
        _answer_questions(store, number, size, deadline)
        return number
    question = store.add(f"{GENERATIONS}/questions", 1)
    store.set(f"{GENERATIONS}/question/{question}", str(rank))
    try:
        number = store.get(f"{GENERATIONS}/answer/{question}", deadline.left_s())
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {rank} waited {deadline.timeout_s:g} s for rank 0 to call dd.init(): see what it printed last"
        ) from error
    store.add(f"{GENERATIONS}/{number}/here", 1)
    return number


def _answer_questions(store: Store, number: str, size: int, deadline: Deadline) -> None:
    """Answer all questions with `number` until every rank of the generation has its answer."""
    answered = 0
    while (here := store.add(f"{GENERATIONS}/{number}/here", 0)) < size - 1:
        while store.has(f"{GENERATIONS}/question/{answered + 1}"):
            answered += 1
            store.set(f"{GENERATIONS}/answer/{answered}", number)
        if deadline.passed():
            raise RendezvousError(
                f"rank 0 waited {deadline.timeout_s:g} s for all {size} ranks to call dd.init(); "
                f"{size - 1 - here} of them did not"
            )
        deadline.sleep(POLL_S)
