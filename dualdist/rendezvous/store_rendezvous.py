"""Rendezvous of the ranks at one key-value store, where they exchange what they know of themselves.

Rank 0 listens at the address that the launcher names. If it names none, rank 0 listens on a free port and publishes its
address by what the launcher offers: MPI, the store of Horovod's launcher, or a file in a folder that all ranks see.

Note [elastic generations]: the store of torchrun's agent outlives the ranks, with the keys of earlier ranks in it, and
no variable numbers the generation of ranks: torchrun counts restarts on each host separately, and not those after
which hosts have come or gone. So rank 0 draws a number, and every other rank posts a new question, which rank 0 of its
generation answers with that number. Questions left from earlier generations are answered as well; no rank reads those.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from dualdist.backends.base import Store
from dualdist.backends.native import store as native_store
from dualdist.environments.env_values import RENDEZVOUS
from dualdist.errors import DualdistError, RendezvousError, TopologyError
from dualdist.monitoring import process_state
from dualdist.rendezvous.address_exchange import (
    AddressExchange,
    FileAddressExchange,
    publish_listener,
    rendezvous_endpoint,
)
from dualdist.rendezvous.rank_assignment import RankReport, assign_locations, make_report
from dualdist.topology import RankLocation, Topology
from dualdist.utils import network_interfaces
from dualdist.utils.deadline import Deadline, call_within
from dualdist.utils.network_interfaces import StoreAddress

if TYPE_CHECKING:
    from dualdist.rendezvous.open_session import SessionConfig

MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
GENERATIONS = "dualdist/generations"
POLL_S = 0.01
# The store may report a timeout so many seconds late.
GRACE_S = 1.0
# Rank 0 serves the store for so many seconds more, until every other rank has read why rendezvous failed.
READ_VERDICT_S = 5.0


def join_store(config: SessionConfig, backend: str) -> tuple[Store, str, list[RankLocation], str | None]:
    """Connect all ranks to one store, the known one in a later session, and exchange their locations.

    Every rank calls this with the backend that it will use. Errors are raised on every rank that takes part.

    Returns:
        The store, the prefix of this session's keys in it, the locations of all ranks, and this rank's network
        interface towards the other nodes, None if there are none.
    """
    topology, environ, known = config.topology, config.environ, config.rendezvous
    host, deadline = network_interfaces.host_identity(environ), Deadline(config.timeout_s)
    report = make_report(topology, host, backend, config.transport, process_state.current_process().dumps())
    connected: list[tuple[Store, AddressExchange | None]] = []

    def meet() -> tuple[Store, str, list[RankLocation], str | None]:
        connected.append((known.store, None) if known.store else _open_store(topology, environ, host, deadline))
        store = connected[0][0]
        if known.store is None and may_restart(topology, environ):
            known.generation = agree_on_generation(store, topology, deadline)
        key = f"{config.key}/{known.generation}" if known.generation else config.key
        locations = LocationExchange(store, report, key, deadline).run()
        return store, key, locations, _interface(store, locations, topology.rank, key, deadline)

    def late() -> DualdistError:
        waited = f"rank {topology.rank} waited {deadline.timeout_s:g} s for"
        if not connected:
            where = environ.get(RENDEZVOUS) or topology.address or topology.rendezvous
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


def _interface(store: Store, locations: list[RankLocation], rank: int, key: str, deadline: Deadline) -> str | None:
    """Return the network interface towards the other nodes, None if there is one node.

    A rank of another node publishes the address by which it reached rank 0: on rank 0's own node the route to that
    address is loopback, which the other nodes do not reach.
    """
    first = locations[0].node_rank
    remote = next((other for other, location in enumerate(locations) if location.node_rank != first), None)
    if remote is None:
        return None
    if rank == remote:
        store.set(f"{key}/reached", network_interfaces.resolve_address(store.address))
    if locations[rank].node_rank != first:
        return network_interfaces.interface_towards(store.address)
    try:
        return network_interfaces.find_interface(store.get(f"{key}/reached", deadline.left_s()))
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {rank} waited {deadline.timeout_s:g} s for the address by which rank {remote} reached rank 0"
        ) from error


def _open_store(
    topology: Topology, environ: MutableMapping[str, str], host: str, deadline: Deadline
) -> tuple[Store, AddressExchange | None]:
    """Connect to the job's store, served by rank 0 or the launcher; return it and the address exchange used."""
    endpoint = rendezvous_endpoint(topology, environ, deadline)
    if not isinstance(endpoint, tuple):
        return serve_or_connect(endpoint, topology, host, deadline), endpoint
    address, port = endpoint
    agent = topology.rendezvous == "agent" and not environ.get(RENDEZVOUS)
    if topology.rank == 0 and not agent:
        listener = network_interfaces.open_listener(port, loopback_only=False)
        return native_store.connect(network_interfaces.LOOPBACK, port, listener, deadline), None
    who = "the store of the launcher" if agent else "rank 0 (MASTER_ADDR, MASTER_PORT)"
    network_interfaces.wait_until_listening(address, port, deadline, who)
    return native_store.connect(address, port, None, deadline), None


def serve_or_connect(exchange: AddressExchange, topology: Topology, host: str, deadline: Deadline) -> Store:
    """Serve a store on a free port and publish its address (rank 0), or read the address and connect."""
    if topology.rank == 0:
        listener = publish_listener(exchange, topology, host)
        return native_store.connect(network_interfaces.LOOPBACK, listener.getsockname()[1], listener, deadline)
    pause_s = 0.002  # rank 0 mostly comes at the same time
    while True:
        text = exchange.read()
        if text is not None:
            published = StoreAddress.loads(text)
            try:
                address = published.reachable_address(host, deadline)
                return native_store.connect(address, published.port, None, deadline)
            except RendezvousError:
                if deadline.passed() or not isinstance(exchange, FileAddressExchange):
                    raise  # else read again: the file may be of a job that was killed
        if deadline.passed():
            raise RendezvousError(
                f"rank {topology.rank} waited {deadline.timeout_s:g} s for rank 0's address {exchange.describe()}"
            )
        deadline.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


@dataclass(frozen=True)
class LocationExchange:
    """Exchange of the ranks' reports under a key of the store, and the verdict on them.

    Each rank sends a fixed number of messages; the last one to arrive reads all reports and writes the verdict. A rank
    that is missing, is there twice, or contradicts the others is an error on every rank that takes part.
    """

    store: Store
    report: RankReport
    key: str
    deadline: Deadline

    def run(self) -> list[RankLocation]:
        """Publish this rank's report and return the locations of all ranks in rank order."""
        store, key, rank, size = self.store, self.key, self.report.rank, self.report.size
        try:
            problem = self._publish_report()
            if problem:  # raised here, whatever the verdict already is
                self._write_verdict(problem)
            else:
                problem, locations = json.loads(store.get(f"{key}/verdict", self.deadline.left_s()))
        except TimeoutError as late:
            missing = [other for other in range(size) if not store.has(f"{key}/report/{other}")]
            raise RendezvousError(
                f"rank {rank} waited {self.deadline.timeout_s:g} s for all {size} ranks to call dd.init(); "
                f"{'missing: ' + str(missing) if missing else 'all came, the last one too late'}"
            ) from late
        if problem:
            self._leave_together()
            raise TopologyError(problem)
        return [RankLocation(*location) for location in locations]

    def _publish_report(self) -> str:
        """Publish this rank's report, and write the verdict if it is the last; return why it does not fit, or ""."""
        store, key, rank, size = self.store, self.key, self.report.rank, self.report.size
        if store.add(f"{key}/came/{rank}", 1) > 1:
            return f"two processes are rank {rank} of {size}: is one left over from another job?"
        store.set(f"{key}/report/{rank}", self.report.dumps())
        count = store.add(f"{key}/count", 1)
        if count == 1:
            store.set(f"{key}/size", str(size))
        elif (others := int(store.get(f"{key}/size", self.deadline.left_s()))) != size:
            return f"rank {rank} of {size} met ranks of a job of {others}: were all started by one command?"
        if count == size:
            arrived = [name for other in range(size) if store.has(name := f"{key}/report/{other}")]
            reports = [RankReport.loads(store.get(name, self.deadline.left_s())) for name in arrived]
            try:
                self._write_verdict("", assign_locations(reports))
            except TopologyError as error:
                self._write_verdict(str(error))
        return ""

    def _write_verdict(self, problem: str, locations: Sequence[RankLocation] = ()) -> None:
        """Write the verdict, a problem or the locations of all ranks, unless there is one already."""
        if self.store.add(f"{self.key}/judges", 1) == 1:
            verdict = json.dumps([problem, [astuple(location) for location in locations]])
            self.store.set(f"{self.key}/verdict", verdict)

    def _leave_together(self) -> None:
        """Count this rank as one that knows of the failure; rank 0, with whose exit the store may end, awaits all."""
        with contextlib.suppress(RendezvousError):  # the store is gone: the failure says more
            informed = self.store.add(f"{self.key}/informed", 1)
            until = Deadline(min(READ_VERDICT_S, self.deadline.left_s()))
            while self.report.rank == 0 and informed < self.report.size and not until.passed():
                until.sleep(POLL_S)
                informed = self.store.add(f"{self.key}/informed", 0)
