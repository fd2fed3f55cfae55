"""Where all ranks stand, once they have met: what each one said, checked against the others."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from dualdist.errors import TopologyError
from dualdist.monitoring.process_state import ProcessIdentity
from dualdist.topology import RankLocation, Topology


@dataclass(frozen=True)
class RankReport:
    """What a rank says when the ranks meet; `node` and `local_rank` are None where its launcher did not tell."""

    rank: int
    size: int
    host: str
    node_rank: int | None
    local_rank: int | None
    backend: str
    transport: str = ""  # as asked for
    process: str = ""  # see process_state.Process

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> RankReport:
        return RankReport(**json.loads(text))


def make_report(topology: Topology, host: str, backend: str, transport: str = "", process: str = "") -> RankReport:
    """What this rank says of itself: the fields that variables told, not the inferred ones."""
    return RankReport(
        rank=topology.rank,
        size=topology.size,
        host=host,
        node_rank=None if "node_rank" in topology.inferred else topology.node_rank,
        local_rank=None if "local_rank" in topology.inferred else topology.local_rank,
        backend=backend,
        transport=transport,
        process=process,
    )


def assign_locations(reports: Sequence[RankReport]) -> list[RankLocation]:
    """Give every rank its place, in rank order; TopologyError where the reports contradict each other.

    A node is what the launcher numbered so, or else a host; nodes without a number are numbered by their lowest rank.
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
                f"rank 0 asked for the transport {reports[0].transport!r} and rank {rank} for {report.transport!r}: "
                "give every rank the same DUALDIST_TRANSPORT"
            )
    first_on: dict[str, int] = {}
    for report in reports:
        first_on.setdefault(report.host, report.rank)
    nodes: dict[object, list[int]] = defaultdict(list)
    for report in reports:
        nodes[report.host if report.node_rank is None else report.node_rank].append(report.rank)
    places: list[RankLocation | None] = [None] * size
    told = all(report.node_rank is not None for report in reports)
    for index, (key, ranks) in enumerate(nodes.items()):
        node = reports[ranks[0]].node_rank if told else index
        assert node is not None
        for rank, local_rank in zip(ranks, _local_ranks(key, [reports[rank] for rank in ranks]), strict=True):
            places[rank] = RankLocation(node, local_rank, first_on[reports[rank].host], reports[rank].process)
    return [place for place in places if place is not None]


def _local_ranks(node: object, reports: Sequence[RankReport]) -> list[int]:
    """The local rank of each of one node's ranks: as told, or by rank order where nobody told."""
    told = [report.local_rank for report in reports if report.local_rank is not None]
    if not told:
        return list(range(len(reports)))
    if sorted(told) != list(range(len(reports))):
        ranks = [report.rank for report in reports]
        raise TopologyError(
            f"ranks {ranks} share node {node} and say they are its local ranks "
            f"{[report.local_rank for report in reports]}, expected each of 0 to {len(reports) - 1} once: "
            "is LOCAL_RANK set by hand, or was each rank started by a launcher of its own?"
        )
    return told


def with_location(topology: Topology, places: Sequence[RankLocation]) -> Topology:
    """The topology with the node and local rank that the ranks found when they met."""
    mine = places[topology.rank]
    local_size = sum(place.node_rank == mine.node_rank for place in places)
    nodes = max(place.node_rank for place in places) + 1
    found = {"node_rank": mine.node_rank, "num_nodes": nodes, "local_rank": mine.local_rank, "local_size": local_size}
    for name, value in found.items():
        if name not in topology.inferred and getattr(topology, name) != value:
            raise TopologyError(
                f"{name}={getattr(topology, name)} (from {topology.source}), but the ranks that met make it {value}: "
                "is a variable left over from another launcher?"
            )
    return replace(
        topology,
        node_rank=mine.node_rank,
        num_nodes=nodes,
        local_rank=mine.local_rank,
        local_size=local_size,
        inferred=frozenset(),
    )


def processes_on_host(places: Sequence[RankLocation], rank: int) -> list[ProcessIdentity | None]:
    """Everybody's process, by rank, None of those on other hosts than this rank's."""
    mine = places[rank].host
    return [ProcessIdentity.loads(place.process) if place.process and place.host == mine else None for place in places]
