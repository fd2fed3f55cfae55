"""How ranks that know only their number find each other: they reach one store, and there they say who they are.

Where the launcher names an address, rank 0 listens on it. Where it does not, rank 0 listens on a free port and passes
its address on by what the launcher offers: MPI, the store of Horovod's launcher, or a file in a folder that all ranks
see.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import tempfile
from collections.abc import Callable, MutableMapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NoReturn, Protocol
from urllib.parse import urlsplit

from dualdist.backends.base import Store
from dualdist.backends.mpi import world
from dualdist.errors import DualdistError, RendezvousError, TopologyError, UsageError
from dualdist.monitoring import process_state
from dualdist.rendezvous import elastic_generation
from dualdist.rendezvous.rank_assignment import RankReport, assign_locations, make_report
from dualdist.topology import RankLocation, Topology
from dualdist.utils import network_interfaces
from dualdist.utils.deadline import Deadline, call_within
from dualdist.utils.network_interfaces import StoreAddress

RENDEZVOUS = "DUALDIST_RENDEZVOUS"
RENDEZVOUS_DIR = "DUALDIST_RENDEZVOUS_DIR"
HOROVOD_STORE_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVOD_STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
SLURM_SUBMIT_DIR = "SLURM_SUBMIT_DIR"
SLURM_STEP = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
# Seconds by which the store itself may be late with its answer that time is up.
GRACE_S = 1.0

# Connects to the store at (address, port); with a socket, serves it there as well. Raises RendezvousError.
Connect = Callable[[str, int, "socket.socket | None", Deadline], Store]


class AddressExchange(Protocol):
    """Carries one line of text from rank 0 to the others."""

    def publish(self, text: str) -> None:
        """Rank 0 calls this once."""

    def read(self) -> str | None:
        """What rank 0 published, None while it has not; the other ranks call this until it is there."""

    def withdraw(self) -> None:
        """Rank 0 calls this when every rank has read."""

    def describe(self) -> str:
        """Where the text is expected, for errors."""


@dataclass(frozen=True)
class FileAddressExchange:
    """A file that all ranks see. It appears whole, by a rename, and is removed when all have met."""

    path: Path

    def publish(self, text: str) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix=f"{self.path.name}.", dir=self.path.parent) as folder:
                draft = Path(folder, self.path.name)
                draft.write_text(text)
                os.replace(draft, self.path)
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot write {self.path} ({error.strerror}), the file by which the ranks find each other: "
                f"name a folder that all ranks share and may write in {RENDEZVOUS_DIR}, "
                "or set MASTER_ADDR and MASTER_PORT"
            ) from error

    def read(self) -> str | None:
        with contextlib.suppress(OSError):
            os.listdir(self.path.parent)  # makes an NFS client look again for a file that was not there a moment ago
            return self.path.read_text(errors="replace")  # what is no text is no invitation
        return None

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def describe(self) -> str:
        return f"in the file {self.path}; is this folder shared by all nodes ({RENDEZVOUS_DIR} names another)?"


@dataclass(frozen=True)
class HorovodAddressExchange:
    """A key in the HTTP store of horovodrun, in a scope of our own."""

    address: str
    port: int
    key: str

    def publish(self, text: str) -> None:
        if self._request("PUT", text.encode()) is None:
            raise RendezvousError(f"horovodrun's store at {self.address}:{self.port} refused rank 0's address")

    def read(self) -> str | None:
        return self._request("GET", None)

    def withdraw(self) -> None:
        with contextlib.suppress(RendezvousError):
            self._request("DELETE", None)

    def describe(self) -> str:
        return f"in horovodrun's store at {self.address}:{self.port}"

    def _request(self, method: str, body: bytes | None) -> str | None:
        connection = None
        try:
            connection = http.client.HTTPConnection(self.address, self.port, timeout=network_interfaces.PROBE_S)
            connection.request(method, f"/dualdist/{self.key}", body)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # the second one of what is no host's name
            raise RendezvousError(
                f"horovodrun's store at {self.address}:{self.port} ({HOROVOD_STORE_ADDRESS}, {HOROVOD_STORE_PORT}) "
                f"does not answer ({error}): is horovodrun still running, and can this host reach it?"
            ) from error
        finally:
            if connection is not None:
                connection.close()
        return text if response.status == http.HTTPStatus.OK else None


@dataclass
class MpiAddressExchange:
    """One broadcast from rank 0, which all ranks call once: rank 0 by publish, the others by read."""

    topology: Topology
    environ: MutableMapping[str, str]
    deadline: Deadline

    def publish(self, text: str) -> None:
        world.broadcast_text(text, self.topology, self.environ, self.deadline)

    def read(self) -> str | None:
        return world.broadcast_text(None, self.topology, self.environ, self.deadline)

    def withdraw(self) -> None:
        pass

    def describe(self) -> str:
        return "by MPI broadcast"


@dataclass(frozen=True)
class RendezvousResult:
    """What a rank knows when all have met: the store, where all ranks stand, and how to reach the others.

    `interface` is the network interface towards the other nodes, None where there is one node only. `key` is that of
    this session in the store, and `round` that of the agent's round, or "".
    """

    store: Store
    places: list[RankLocation]
    interface: str | None
    key: str
    round: str


def join_store(
    topology: Topology,
    environ: MutableMapping[str, str],
    session: str,
    backend: str,
    connect: Connect,
    known: Store | None,
    deadline: Deadline,
    transport: str = "",
    known_round: str = "",
) -> RendezvousResult:
    """Bring all ranks together at one store; every rank calls this, with the backend and transport it will use.

    `session` names this meeting, alike on every rank; `known` and `known_round` are of an earlier one in this process.
    Errors are raised on every rank that came, and name who or what did not.
    """
    host = network_interfaces.host_identity(environ)
    store, exchange = (known, None) if known else _open_store(topology, environ, host, connect, deadline)
    report = make_report(topology, host, backend, transport, process_state.current_process().dumps())

    def gather() -> RendezvousResult:
        round = known_round
        if known is None and elastic_generation.may_restart(topology, environ):
            round = elastic_generation.agree_on_generation(store, topology, deadline)
        key = f"{session}/{round}" if round else session
        places = gather_locations(store, report, key, deadline)
        return RendezvousResult(store, places, _interface(store, places, topology.rank, key, deadline), key, round)

    def late() -> DualdistError:
        return RendezvousError(
            f"rank {topology.rank} waited {deadline.timeout_s:g} s for an answer of the store at {store.where}: "
            "the process that serves it, rank 0 or its launcher, is stopped or unreachable"
        )

    try:
        return call_within(deadline.left_s() + GRACE_S, gather, late)
    finally:
        if exchange is not None and topology.rank == 0:
            exchange.withdraw()


def _interface(store: Store, places: list[RankLocation], rank: int, session: str, deadline: Deadline) -> str | None:
    """The interface towards the other nodes; None where there are none.

    A rank elsewhere knows the address under which it reached rank 0, and tells it: on rank 0's node the way to rank 0
    would be loopback, from which the other nodes are not reached.
    """
    first = places[0].node_rank
    elsewhere = next((other for other, place in enumerate(places) if place.node_rank != first), None)
    if elsewhere is None:
        return None
    if rank == elsewhere:
        store.set(f"{session}/reached", network_interfaces.resolve_address(store.address))
    if places[rank].node_rank != first:
        return network_interfaces.interface_towards(store.address)
    try:
        return network_interfaces.find_interface(store.get(f"{session}/reached", deadline.left_s()))
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {rank} waited {deadline.timeout_s:g} s for rank {elsewhere} to tell how it reached rank 0"
        ) from error


def _open_store(
    topology: Topology, environ: MutableMapping[str, str], host: str, connect: Connect, deadline: Deadline
) -> tuple[Store, AddressExchange | None]:
    """The store of the job, which rank 0 serves unless the launcher does, and the exchange by which it was found."""
    given = environ.get(RENDEZVOUS)
    address, port = topology.address, topology.port
    agent = topology.rendezvous == "agent" and not given
    if given and urlsplit(given).scheme == "tcp":
        address, port = _address_of(given)
    elif given or topology.rendezvous in ("horovod", "mpi", "slurm"):
        exchange = FileAddressExchange(_path_of(given)) if given else _exchange(topology, environ, deadline)
        return _invite(topology, exchange, host, connect, deadline), exchange
    if address is None or port is None:
        raise TopologyError(
            f"the {topology.size} ranks have no address at which to meet (from {topology.source}): "
            f"set MASTER_ADDR and MASTER_PORT, or {RENDEZVOUS}=file:///a/shared/folder/name"
        )
    if topology.rank == 0 and not agent:
        listener = network_interfaces.open_listener(port, loopback_only=False)
        return connect(network_interfaces.LOOPBACK, port, listener, deadline), None
    who = "the store of the launcher" if agent else "rank 0 (MASTER_ADDR, MASTER_PORT)"
    network_interfaces.wait_until_listening(address, port, deadline, who)
    return connect(address, port, None, deadline), None


def _address_of(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port and not parts.path:
            return parts.hostname, parts.port
    except ValueError:  # a port that is none
        pass
    raise UsageError(f"{RENDEZVOUS}={url!r}: expected tcp://host:port, with a port between 1 and 65535")


def _path_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
        raise UsageError(f"{RENDEZVOUS}={url!r}: expected file:///folder/name or tcp://host:port")
    return Path(parts.path)


def _exchange(topology: Topology, environ: MutableMapping[str, str], deadline: Deadline) -> AddressExchange:
    if topology.rendezvous == "mpi":
        return MpiAddressExchange(topology, environ, deadline)
    if topology.rendezvous == "horovod":
        return HorovodAddressExchange(environ[HOROVOD_STORE_ADDRESS], int(environ[HOROVOD_STORE_PORT]), "rank0")
    folder = environ.get(RENDEZVOUS_DIR) or environ.get(SLURM_SUBMIT_DIR) or str(Path.home())
    step = "-".join(environ[name] for name in SLURM_STEP if environ.get(name))
    return FileAddressExchange(Path(folder) / f".dualdist-{step}")


def _invite(topology: Topology, exchange: AddressExchange, host: str, connect: Connect, deadline: Deadline) -> Store:
    """Rank 0 listens on a free port and publishes it by the exchange; the others read it and connect."""
    if topology.rank == 0:
        one_node = topology.num_nodes == 1 and "num_nodes" not in topology.inferred
        listener = network_interfaces.open_listener(0, loopback_only=one_node)
        port = listener.getsockname()[1]
        exchange.publish(StoreAddress.of(host, port, one_node=one_node).dumps())
        return connect(network_interfaces.LOOPBACK, port, listener, deadline)
    while True:
        text = exchange.read()
        if text is not None:
            invitation = StoreAddress.loads(text)
            try:
                return connect(invitation.reachable_address(host, deadline), invitation.port, None, deadline)
            except RendezvousError:
                if deadline.passed() or not isinstance(exchange, FileAddressExchange):
                    raise  # a file may be left over from a job that was killed: look again whether it was replaced
        if deadline.passed():
            raise RendezvousError(
                f"rank {topology.rank} waited {deadline.timeout_s:g} s for rank 0's address {exchange.describe()}"
            )
        deadline.sleep(0.05)


def gather_locations(store: Store, report: RankReport, key: str, deadline: Deadline) -> list[RankLocation]:
    """Wait until all ranks have said who they are, and return everybody's place in rank order.

    Costs a rank a fixed number of messages; the last one to come reads all reports and writes the verdict. A rank that
    never comes, comes twice, or contradicts the others is an error on every rank that did come.
    """
    rank, size = report.rank, report.size
    if store.add(f"{key}/came/{rank}", 1) > 1:
        _object(store, key, f"two processes say that they are rank {rank} of {size}: is one left over?")
    store.set(f"{key}/report/{rank}", report.dumps())
    count = store.add(f"{key}/count", 1)
    if count == 1:
        store.set(f"{key}/size", str(size))
    elif (others := int(store.get(f"{key}/size", deadline.left_s()))) != size:
        _object(store, key, f"rank {rank} of {size} met ranks of a job of {others}: were all started by one command?")
    if count == size:
        _judge_all(store, key, size, deadline)
    try:
        objection, places = json.loads(store.get(f"{key}/verdict", deadline.left_s()))
    except TimeoutError as late:
        missing = [other for other in range(size) if not store.has(f"{key}/report/{other}")]
        raise RendezvousError(
            f"rank {rank} waited {deadline.timeout_s:g} s for all {size} ranks to call dd.init(); "
            f"{'missing: ' + str(missing) if missing else 'all came, the last one too late'}"
        ) from late
    if objection:
        raise TopologyError(objection)
    return [RankLocation(*place) for place in places]


def _judge_all(store: Store, key: str, size: int, deadline: Deadline) -> None:
    """Write the verdict on everybody's report."""
    came = [rank for rank in range(size) if store.has(f"{key}/report/{rank}")]
    reports = [RankReport.loads(store.get(f"{key}/report/{rank}", deadline.left_s())) for rank in came]
    try:
        _judge(store, key, "", assign_locations(reports))
    except TopologyError as error:
        _judge(store, key, str(error))


def _object(store: Store, key: str, objection: str) -> NoReturn:
    """Write an objection as the verdict, for the others, and raise it here, whatever the verdict was before."""
    _judge(store, key, objection)
    raise TopologyError(objection)


def _judge(store: Store, key: str, objection: str, places: list[RankLocation] | None = None) -> None:
    """Write the verdict, an objection or everybody's place; the first one stands."""
    if store.add(f"{key}/judges", 1) == 1:
        store.set(f"{key}/verdict", json.dumps([objection, [astuple(place) for place in places or []]]))
