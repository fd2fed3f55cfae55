"""Statistics of wait times: which rank arrived last, and how long the others waited for it."""

from __future__ import annotations

import math

import pytest

from dualdist.monitoring import wait_times
from dualdist.monitoring.wait_times import SlowRanks, WaitRecord, WaitTimes, summarize_waits


def counted(operations: list[tuple[float, float]], rounds: list[tuple[float, float]], dropped: int = 0) -> bytes:
    found = WaitTimes()
    found.started_at -= 100.0
    found.operations.dropped = dropped
    for times, rows in ((found.operations, operations), (found.rounds, rounds)):
        for ready_s, waited_s in rows:
            times.add(ready_s, waited_s)
    return found.dumps()


def both(*rows: float) -> list[tuple[float, float]]:
    """Return rows of a rank that waits as soon as it is ready."""
    return [(row, row) for row in rows]


def test_each_rank_waits_for_the_last_to_arrive() -> None:
    found = summarize_waits([0, 1, 5], [counted([], both(3, 1)), counted([], both(1, 2)), counted([], both(2, 2.5))])
    assert (found.rounds, found.operations) == (2, 0)
    assert found.was_last == (1, 1, 0)
    assert found.waited_for_s == ((0, 2, 0), (1, 0, 0), (1.5, 1, 0))
    assert found.caused_s == (1.25, 1.5, 0)
    assert found.waited_s == (2, 1, 2.5)
    assert found.slowest == 1


def test_only_the_programs_own_waits_count() -> None:
    """One rank waited for the last second only, another never."""
    found = summarize_waits([0, 1, 2], [counted([(10, 1)], []), counted([(8, 0)], []), counted([(2, 2)], [])])
    assert found.was_last == (0, 0, 1)
    assert found.waited_for_s == ((0, 0, 1), (0, 0, 0), (0, 0, 0))


def test_joined_ranks_are_never_last_and_unknown_times_are_skipped() -> None:
    unknown = (math.nan, 0.0)
    found = summarize_waits([0, 1], [counted([unknown, unknown, (3, 3)], []), counted([(2, 2), unknown, (1, 1)], [])])
    assert found.operations == 2
    assert found.was_last == (0, 2)
    assert found.waited_for_s == ((0, 2), (0, 0))


def test_operations_that_a_rank_dropped_or_has_not_done_are_skipped() -> None:
    found = summarize_waits([0, 1], [counted(both(1, 2, 3, 4), []), counted(both(1, 9, 1), [], dropped=1)])
    assert found.operations == 3
    assert found.waited_for_s == ((0, pytest.approx(1 + 3)), (pytest.approx(6), 0))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_times, "KEPT", 10)
    times = WaitRecord()
    for number in range(105):
        times.add(number, 0)
    assert times.dropped + len(times.ready) == 105
    assert 10 <= len(times.ready) < 20
    assert times.ready[-1] == 104


def test_the_table_starts_with_the_slowest_rank() -> None:
    found = summarize_waits([0, 1], [counted([], both(30, 1)), counted([], both(10, 2))])
    lines = str(found).splitlines()
    assert lines[0].endswith("(2 rounds of gradients, 0 operations) the others waited most for rank 1")
    assert lines[1].split("  ")[0] == "rank"
    assert [line.split()[0] for line in lines[2:]] == ["1", "0"]
    assert "20.00 s, 20%" in lines[2]
    even = summarize_waits([0, 1], [counted([], both(1.1)), counted([], both(1))])
    assert even.slowest is None
    assert str(even).endswith("no rank made the others wait for more than 1% of the time")
    many = summarize_waits(range(20), [counted([], both(9 if rank else 1)) for rank in range(20)])
    assert str(many).endswith("and 12 more")


def test_no_operations_give_a_message() -> None:
    for ranks in ([0], [0, 1]):
        found: SlowRanks = summarize_waits(ranks, [counted([], [])] * len(ranks))
        assert str(found) == "no collectives have been counted yet"
        assert found.slowest is None
