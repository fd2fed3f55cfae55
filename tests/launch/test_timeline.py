"""DUALDIST_TIMELINE where clocks differ, where nobody shuts down, and where a rank dies."""

from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import trace_format
from harness.hosts import ADDRESSES, Hosts
from harness.jobs import Launch

PROGRAM = str(Path(__file__).with_name("timeline_program.py"))
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2", PROGRAM)


def spans(events: list[dict[str, Any]], name: str) -> dict[int, tuple[float, float]]:
    """When each rank's span of this name began and ended."""
    found = [event for event in events if event["ph"] == "X" and event["name"] == name]
    return {event["pid"]: (event["ts"], event["ts"] + event["dur"]) for event in found}


def test_clocks_of_two_hosts_are_brought_together(launch: Launch, two_hosts: Hosts) -> None:
    """The second host's clock is 5,000 s ahead, by a time namespace; a collective is everywhere at the same time.

    No rank leaves an allreduce before the other one has entered it: wrong clocks would show here.
    """
    if not Path("/proc/self/ns/time").exists():
        pytest.skip("this kernel has no time namespaces")
    path = launch.directory / "trace.json"
    with ExitStack() as stack:
        jobs = []
        for rank in range(2):
            env = {
                **two_hosts.env,
                "DUALDIST_RANK": str(rank),
                "DUALDIST_SIZE": "2",
                "DUALDIST_LOCAL_RANK": "0",
                "DUALDIST_LOCAL_SIZE": "1",
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": "29517",
                "DUALDIST_TIMELINE": str(path),
            }
            ahead = ["unshare", "--time", "--monotonic", "5000", "--fork"] if rank else []
            argv = two_hosts.on(rank, *ahead, sys.executable, PROGRAM, "shutdown")
            jobs.append(stack.enter_context(launch.start(argv, env=env)))
        outcomes = [job.wait(100) for job in jobs]
    failed = next(itertools.chain((each for each in outcomes if each.rc), outcomes))
    assert failed.rc == 0, str(failed)
    events = trace_format.load(path)
    for step in range(20):
        both = spans(events, f"allreduce metric {step}")
        assert sorted(both) == [0, 1]
        began, ended = max(start for start, _ in both.values()), min(end for _, end in both.values())
        assert began <= ended + 1000, (step, both)  # 1 ms: exchanges over TCP bound the clocks that well
        assert began - min(start for start, _ in both.values()) < 5e6, "not the 5,000 s"


def test_ranks_that_do_not_shut_down_leave_one_file(launch: Launch) -> None:
    path = launch.directory / "trace.json"
    outcome = launch([*TORCHRUN, "return"], env={"DUALDIST_TIMELINE": str(path)})
    assert [each.name for each in launch.directory.glob("trace*")] == ["trace.json"], str(outcome)
    assert sorted(spans(trace_format.load(path), "allreduce metric 19")) == [0, 1]
    assert "Traceback" not in outcome.stderr, str(outcome)
    reported = outcome.stderr.count(".json: the ranks did not all call dd.shutdown()")
    assert outcome.stderr.count("dualdist: ") == reported <= 1


def test_a_rank_that_outlives_another_leaves_what_it_saw(launch: Launch) -> None:
    path = launch.directory / "trace.json"
    path.with_stem("trace.rank-1").write_text('{"traceEvents": []}')  # left by another run
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(launch.start([sys.executable, PROGRAM, "die"], env=by_hand(launch, rank, path)))
            for rank in range(2)
        ]
        survivor, dead = [job.wait(100) for job in jobs]
    assert (survivor.rc, dead.rc) == (1, 7), str(survivor)
    assert "RankLostError" in survivor.stderr, str(survivor)
    (part,) = launch.directory.glob("trace*")
    assert part.name == "trace.rank-0.json"
    assert sorted(spans(trace_format.load(part), "allreduce metric 19")) == [0]
    assert f"{part}: the ranks did not all call dd.shutdown(): the last rank to exit merges" in survivor.stderr


def by_hand(launch: Launch, rank: int, path: Path) -> dict[str, str]:
    """The variables of a rank that no launcher watches."""
    return {
        "DUALDIST_RANK": str(rank),
        "DUALDIST_SIZE": "2",
        "DUALDIST_LOCAL_RANK": str(rank),
        "DUALDIST_LOCAL_SIZE": "2",
        "DUALDIST_RENDEZVOUS": (launch.directory / "meet").as_uri(),
        "DUALDIST_TIMELINE": str(path),
    }
