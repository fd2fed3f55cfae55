"""DUALDIST_TIMELINE where clocks differ, where no rank shuts down, and where a rank dies."""

import sys
from pathlib import Path
from typing import Any

import pytest
from harness import trace_format
from harness.hosts import ADDRESSES, Hosts
from harness.jobs import Launch
from launch.running import TORCHRUN, rank_env, side_by_side

PROGRAM = str(Path(__file__).with_name("timeline_program.py"))


def spans(events: list[dict[str, Any]], name: str) -> dict[int, tuple[float, float]]:
    """Return when each rank's span of this name began and ended."""
    found = [event for event in events if event["ph"] == "X" and event["name"] == name]
    return {event["pid"]: (event["ts"], event["ts"] + event["dur"]) for event in found}


def test_clocks_of_two_hosts_are_aligned(launch: Launch, two_hosts: Hosts) -> None:
    """The second host's clock is 5,000 s ahead, by a time namespace; a collective is everywhere at the same time.

    No rank leaves an allreduce before the other one has entered it: wrong clocks would show here.
    """
    if not Path("/proc/self/ns/time").exists():
        pytest.skip("this kernel has no time namespaces")
    path = launch.directory / "trace.json"
    env = {**two_hosts.env, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29517", "DUALDIST_TIMELINE": str(path)}
    ahead = ["unshare", "--time", "--monotonic", "5000", "--fork"]
    ranks = [two_hosts.on(rank, *ahead * rank, sys.executable, PROGRAM, "shutdown") for rank in range(2)]
    for outcome in side_by_side(launch, [(argv, {**env, **rank_env(rank, 2)}) for rank, argv in enumerate(ranks)]):
        assert outcome.rc == 0, str(outcome)
    events = trace_format.load(path)
    for step in range(20):
        both = spans(events, f"allreduce metric {step}")
        assert sorted(both) == [0, 1]
        began, ended = max(start for start, _ in both.values()), min(end for _, end in both.values())
        assert began <= ended + 1000, (step, both)  # 1 ms: exchanges over TCP bound the clocks that well
        assert began - min(start for start, _ in both.values()) < 5e6, "not the 5,000 s"


def test_ranks_that_do_not_shut_down_leave_one_file(launch: Launch) -> None:
    path = launch.directory / "trace.json"
    outcome = launch([*TORCHRUN, PROGRAM, "return"], env={"DUALDIST_TIMELINE": str(path)})
    assert [each.name for each in launch.directory.glob("trace*")] == ["trace.json"], str(outcome)
    assert sorted(spans(trace_format.load(path), "allreduce metric 19")) == [0, 1]
    assert "Traceback" not in outcome.stderr, str(outcome)
    reported = outcome.stderr.count(".json: the ranks did not all call dd.shutdown()")
    assert outcome.stderr.count("dualdist: ") == reported <= 1


def test_a_rank_that_outlives_another_writes_its_own_trace(launch: Launch) -> None:
    path = launch.directory / "trace.json"
    path.with_stem("trace.rank-1").write_text('{"traceEvents": []}')  # left by another run
    env = {"DUALDIST_RENDEZVOUS": (launch.directory / "meet").as_uri(), "DUALDIST_TIMELINE": str(path)}
    argv = [sys.executable, PROGRAM, "die"]  # under a launcher both would be ended
    survivor, dead = side_by_side(launch, [(argv, {**env, **rank_env(rank, 2, rank, 2)}) for rank in range(2)])
    assert (survivor.rc, dead.rc) == (1, 7), str(survivor)
    assert "RankLostError" in survivor.stderr, str(survivor)
    (part,) = launch.directory.glob("trace*")
    assert part.name == "trace.rank-0.json"
    assert sorted(spans(trace_format.load(part), "allreduce metric 19")) == [0]
    assert f"{part}: the ranks did not all call dd.shutdown(): the last rank to exit merges" in survivor.stderr
