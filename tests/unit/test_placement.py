"""What ranks say when they meet, and the place that each gets from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualdist.errors import TopologyError
from dualdist.rendezvous.rank_assignment import RankLocation, RankReport, assign_locations, make_report, with_location
from dualdist.topology import Topology


def reports(*said: tuple[str, int | None, int | None]) -> list[RankReport]:
    """One report a rank, of (host, node, local rank)."""
    return [
        RankReport(rank, len(said), host, node, local_rank, "native")
        for rank, (host, node, local_rank) in enumerate(said)
    ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param([("a", 0, 0), ("a", 0, 1)], [(0, 0, 0), (0, 1, 0)], id="all told"),
        pytest.param([("a", None, None), ("a", None, None)], [(0, 0, 0), (0, 1, 0)], id="nothing told, one host"),
        pytest.param(
            [("a", None, 0), ("b", None, 0)], [(0, 0, 0), (1, 0, 1)], id="a node is a host where none is told"
        ),
        pytest.param(
            [("a", None, 0), ("b", None, 0), ("a", None, 1)], [(0, 0, 0), (1, 0, 1), (0, 1, 0)], id="round robin"
        ),
        pytest.param([("a", 0, 0), ("a", 1, 0)], [(0, 0, 0), (1, 0, 0)], id="two nodes on one machine, as told"),
        pytest.param([("a", 1, 0), ("b", 0, 0)], [(1, 0, 0), (0, 0, 1)], id="nodes need not follow the ranks"),
        pytest.param(
            [("a", None, 0)] + [("b", None, n) for n in range(3)],
            [(0, 0, 0), (1, 0, 1), (1, 1, 1), (1, 2, 1)],
            id="1+3",
        ),
        pytest.param([("a", None, 1), ("a", None, 0)], [(0, 1, 0), (0, 0, 0)], id="local ranks as told"),
    ],
)
def test_every_rank_gets_its_place(
    said: list[tuple[str, int | None, int | None]], expected: list[tuple[int, int, int]]
) -> None:
    assert assign_locations(reports(*said)) == [RankLocation(*place) for place in expected]


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        pytest.param(
            [replace(reports(("a", 0, 0))[0], size=4)], ["1 ranks met", "rank 0 of 4"], id="another size than met"
        ),
        pytest.param(reports(("a", 0, 0), ("a", 0, 0)), ["[0, 1]", "[0, 0]", "LOCAL_RANK"], id="a local rank twice"),
        pytest.param(reports(("a", None, 0), ("a", None, 2)), ["[0, 2]"], id="a local rank missing"),
        pytest.param(
            [reports(("a", 0, 0), ("a", 0, 1))[0], replace(reports(("a", 0, 0), ("a", 0, 1))[1], backend="horovod")],
            ["'native'", "'horovod'"],
            id="two backends",
        ),
        pytest.param(
            [reports(("a", 0, 0), ("a", 0, 1))[0], replace(reports(("a", 0, 0), ("a", 0, 1))[1], transport="gloo")],
            ["''", "'gloo'", "DUALDIST_TRANSPORT"],
            id="two transports",
        ),
    ],
)
def test_contradictions_are_named(spoiled: list[RankReport], words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        assign_locations(spoiled)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_report_survives_its_journey() -> None:
    report = reports(('host/with "quotes" and ü', None, 3))[0]
    assert RankReport.loads(report.dumps()) == report


def test_inferred_fields_are_replaced_and_told_ones_are_checked() -> None:
    told = Topology(1, 2, 0, 1, 1, 2, "mpirun", "X", inferred=frozenset({"node_rank", "num_nodes"}))
    assert make_report(told, "a", "native").node_rank is None
    assert make_report(told, "a", "native").local_rank == 0
    found = with_location(replace(told, local_rank=1, local_size=2), [RankLocation(0, 0), RankLocation(0, 1)])
    assert (found.node_rank, found.num_nodes, found.local_rank, found.local_size) == (0, 1, 1, 2)
    assert not found.inferred
    with pytest.raises(TopologyError, match=r"local_size=1 .*make it 2"):
        with_location(told, [RankLocation(0, 1), RankLocation(0, 0)])
