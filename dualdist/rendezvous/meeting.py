"""Meeting of the ranks at a key-value store that rank 0 serves, in dd.init() and in `dualdist exec`.

Rank 0 listens at the address that the launcher names. If it names none, rank 0 listens on a free port and publishes its
address by what the launcher offers: MPI, the store of Horovod's launcher, or a file in a folder that all ranks see.
Importing this imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, TypeVar

from dualdist.errors import RendezvousError, TopologyError
from dualdist.rendezvous.address_exchange import AddressExchange, FileAddressExchange, publish_listener
from dualdist.rendezvous.rank_assignment import RankReport, assign_locations
from dualdist.topology import RankLocation, Topology
from dualdist.utils import network_interfaces
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import LOOPBACK, StoreAddress

if TYPE_CHECKING:
    from dualdist.backends.base import Store

POLL_S = 0.01
# Rank 0 serves the store for so many seconds more, until every other rank has read why rendezvous failed.
READ_VERDICT_S = 5.0

StoreT = TypeVar("StoreT", bound="Store")
# Returns the store at an address and port, after serving it if a listening socket is given; raises RendezvousError.
Connect = Callable[[str, int, "socket.socket | None", Deadline], StoreT]


def open_store(
    endpoint: AddressExchange | tuple[str, int],
    topology: Topology,
    host: str,
    deadline: Deadline,
    connect: Connect[StoreT],
    *,
    is_served: bool = False,
) -> StoreT:
    """Connect to the job's store, which rank 0 serves, or its launcher if `is_served`."""
    if not isinstance(endpoint, tuple):
        return serve_or_connect(endpoint, topology, host, deadline, connect)
    address, port = endpoint
    if topology.rank == 0 and not is_served:
        return connect(LOOPBACK, port, network_interfaces.open_listener(port, loopback_only=False), deadline)
    who = "the store of the launcher" if is_served else "rank 0 (MASTER_ADDR, MASTER_PORT)"
    network_interfaces.wait_until_listening(address, port, deadline, who)
    return connect(address, port, None, deadline)


def serve_or_connect(
    exchange: AddressExchange, topology: Topology, host: str, deadline: Deadline, connect: Connect[StoreT]
) -> StoreT:
    """Serve a store on a free port and publish its address (rank 0), or read the address and connect."""
    if topology.rank == 0:
        listener = publish_listener(exchange, topology, host)
        return connect(LOOPBACK, listener.getsockname()[1], listener, deadline)
    pause_s = 0.002  # rank 0 mostly comes at the same time
    while True:
        text = exchange.read()
        if text is not None:
            published = StoreAddress.loads(text)
            try:
                address = published.reachable_address(host, deadline)
                return connect(address, published.port, None, deadline)
            except RendezvousError:
                if deadline.passed() or not isinstance(exchange, FileAddressExchange):
                    raise  # else read again: the file may be of a job that was killed
        if deadline.passed():
            raise RendezvousError(
                f"rank {topology.rank} waited {deadline.timeout_s:g} s for rank 0's address {exchange.describe()}"
            )
        deadline.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def address_of_rank_0(
    store: Store, locations: Sequence[RankLocation], rank: int, key: str, deadline: Deadline
) -> str | None:
    """Return the address by which a rank of another node reached rank 0, None if there is one node.

    That rank publishes it: on rank 0's own node the route to the store is loopback, which other nodes do not reach.
    """
    first = locations[0].node_rank
    remote = next((other for other, location in enumerate(locations) if location.node_rank != first), None)
    if remote is None:
        return None
    if rank == remote:
        store.set(f"{key}/reached", network_interfaces.resolve_address(store.address))
    if locations[rank].node_rank != first:
        return store.address
    try:
        return store.get(f"{key}/reached", deadline.left_s())
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {rank} waited {deadline.timeout_s:g} s for the address by which rank {remote} reached rank 0"
        ) from error


def interface_between_nodes(address: str | None, locations: Sequence[RankLocation], rank: int) -> str | None:
    """Return this rank's network interface towards the other nodes, from what address_of_rank_0() returned."""
    if address is None:
        return None
    is_with_rank_0 = locations[rank].node_rank == locations[0].node_rank  # where the route to the address is loopback
    find = network_interfaces.find_interface if is_with_rank_0 else network_interfaces.interface_towards
    return find(address)


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
    action: str = "call dd.init()"  # what all ranks must do, for errors

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
                f"rank {rank} waited {self.deadline.timeout_s:g} s for all {size} ranks to {self.action}; "
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
