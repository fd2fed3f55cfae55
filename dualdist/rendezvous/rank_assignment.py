"""Assignment of nodes and local ranks from the reports of all ranks, which are checked against each other."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dualdist.errors import TopologyError
from dualdist.liveness.process_state import ProcessIdentity
from dualdist.topology import RankLocation, Topology


@dataclass(frozen=True)
class RankReport:
    """A rank's report at rendezvous; `node_rank` and `local_rank` are None if its launcher does not give them."""

    rank: int
    size: int
    host: str
    node_rank: int | None
    local_rank: int | None
    backend: str
    transport: str = ""  # requested
    process: str = ""  # a dumped ProcessIdentity

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> RankReport:
        return RankReport(**json.loads(text))


def make_report(topology: Topology, host: str, backend: str, transport: str = "", process: str = "") -> RankReport:
    """Return this rank's report, with the fields that variables gave and not the inferred ones."""
    node_rank = None if "node_rank" in topology.inferred else topology.node_rank
    local_rank = None if "local_rank" in topology.inferred else topology.local_rank
    return RankReport(topology.rank, topology.size, host, node_rank, local_rank, backend, transport, process)


def assign_locations(reports: Sequence[RankReport]) -> list[RankLocation]:
    """Return the location of every rank, in rank order; raise TopologyError if the reports contradict each other.

    Ranks are grouped into nodes by the launcher's node rank, else by host; hosts are numbered by their lowest rank.
    """
    size = len(reports)
    for rank, report in enumerate(reports):
        if report.rank != rank or report.size != size:
            raise TopologyError(
                f"{size} ranks met, but one of them says it is rank {report.rank} of {report.size} (on {report.host}): "
                "were all started by one command?"
            )
        if report.backend != reports[0].backend:
            raise TopologyError(
                f"rank 0 chose the backend {reports[0].backend!r} and rank {rank} the backend {report.backend!r}: "
                "give every rank the same --backend or DUALDIST_BACKEND, and the same installation"
            )
        if report.transport != reports[0].transport:
            raise TopologyError(
                f"rank 0 requested the transport {reports[0].transport!r} and rank {rank} {report.transport!r}: "
                "give every rank the same DUALDIST_TRANSPORT"
            )
    lowest_on = {report.host: report.rank for report in reversed(reports)}
    nodes: dict[object, list[int]] = defaultdict(list)
    for report in reports:
        nodes[report.host if report.node_rank is None else report.node_rank].append(report.rank)
    locations: dict[int, RankLocation] = {}
    has_node_ranks = all(report.node_rank is not None for report in reports)
    for index, (key, ranks) in enumerate(nodes.items()):
        node = reports[ranks[0]].node_rank if has_node_ranks else index
        assert node is not None
        for rank, local_rank in zip(ranks, _local_ranks(key, [reports[rank] for rank in ranks]), strict=True):
            locations[rank] = RankLocation(node, local_rank, lowest_on[reports[rank].host], reports[rank].process)
    return [locations[rank] for rank in range(size)]


def _local_ranks(node: object, reports: Sequence[RankReport]) -> list[int]:
    """Return the local ranks of one node's ranks: as reported, or in rank order if none is reported."""
    reported = [report.local_rank for report in reports if report.local_rank is not None]
    if not reported:
        return list(range(len(reports)))
    if sorted(reported) != list(range(len(reports))):
        ranks = [report.rank for report in reports]
        raise TopologyError(
            f"ranks {ranks} share node {node} and say they are its local ranks "
            f"{[report.local_rank for report in reports]}, expected each of 0 to {len(reports) - 1} once: "
            "is LOCAL_RANK set by hand, or was each rank started by a separate launcher?"
        )
    return reported


def with_location(topology: Topology, locations: Sequence[RankLocation]) -> Topology:
    """Return the topology with the locations found at rendezvous; raise TopologyError if its variables differ."""
    own = locations[topology.rank]
    found: dict[str, Any] = {
        "node_rank": own.node_rank,
        "num_nodes": max(location.node_rank for location in locations) + 1,
        "local_rank": own.local_rank,
        "local_size": sum(location.node_rank == own.node_rank for location in locations),
    }
    for name, value in found.items():
        if name not in topology.inferred and getattr(topology, name) != value:
            raise TopologyError(
                f"{name}={getattr(topology, name)} (from {topology.source}), but the ranks that met make it {value}: "
                "is a variable left over from another launcher?"
            )
    return replace(topology, **found, inferred=frozenset())


def processes_here(locations: Sequence[RankLocation], rank: int) -> list[ProcessIdentity | None]:
    """Return the processes of all ranks, None for those on other hosts than this rank."""
    return [
        ProcessIdentity.loads(each.process) if each.process and each.host == locations[rank].host else None
        for each in locations
    ]
