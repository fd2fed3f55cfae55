"""Timeline: trace events from spans, and clock offsets from messages."""

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import trace_format

from dualdist.diagnostics.timeline import EventListener, max_error_ns, measure_offsets, offset_between
from dualdist.diagnostics.trace_format import (
    STEPS,
    ClockModel,
    ClockOffset,
    Event,
    TraceSpan,
    rank_events,
)

COMPUTE, COMMUNICATION = "compute", "communication"


def clock_from(zero_ns: int) -> ClockModel:
    """A clock that is rank 0's."""
    return ClockModel(zero_ns, ClockOffset(0.0, 0.0, 0), ClockOffset(0.0, 0.0, 0))


def written(events: list[Event], tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return trace_format.load(path)


def complete(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def test_spans_become_complete_events_in_microseconds(tmp_path: Path) -> None:
    spans = [
        TraceSpan(COMPUTE, "forward Net", 2_000, 5_500),
        TraceSpan(COMMUNICATION, "allreduce x", 3_000, 9_000, {"bytes": 8}, (("agreeing", 3_000, 4_000),)),
    ]
    events = written(rank_events(1, "rank 1", spans, clock_from(1_000)), tmp_path)
    (forward,) = complete(events, COMPUTE)
    assert (forward["name"], forward["pid"], forward["ts"], forward["dur"]) == ("forward Net", 1, 1.0, 3.5)
    whole, part = complete(events, COMMUNICATION)
    assert (whole["name"], whole["ts"], whole["dur"], whole["args"]) == ("allreduce x", 2.0, 6.0, {"bytes": 8})
    assert (part["name"], part["ts"], part["dur"], part["tid"]) == ("agreeing", 2.0, 1.0, whole["tid"])
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    assert names == {"rank 1", "compute", "communication"}


def test_overlapping_communication_uses_separate_tracks(tmp_path: Path) -> None:
    """Random spans never cross in a track, and use as few tracks as possible."""
    chance = random.Random(7)
    for _ in range(50):
        spans = []
        for number in range(40):
            start = chance.randrange(1000)
            spans.append(TraceSpan(COMMUNICATION, str(number), start, start + chance.randrange(1, 200)))
        events = written(rank_events(0, "rank 0", spans, clock_from(0)), tmp_path)
        lanes = {event["tid"] for event in complete(events, COMMUNICATION)}
        most = max(sum(span.start_ns <= at < span.end_ns for span in spans) for at in range(1200))
        assert len(lanes) == most


def test_clock_drift_is_interpolated_and_offsets_are_the_middle_of_their_bounds() -> None:
    """1 ms ahead at 10 s, 3 ms at 20 s."""
    clock = ClockModel(0, ClockOffset(1e6, 0.0, 10 * 10**9), ClockOffset(3e6, 0.0, 20 * 10**9))
    assert clock.microseconds(10 * 10**9) == 10e6 - 1e3
    assert clock.microseconds(15 * 10**9) == 15e6 - 2e3
    assert clock.microseconds(20 * 10**9) == 20e6 - 3e3
    assert clock.microseconds(5 * 10**9) == 5e6 - 1e3
    assert clock_from(5_000).microseconds(7_500) == 2.5
    assert offset_between(-5, 7, 1) == ClockOffset(0.0, 7.0, 1)
    assert offset_between(100, 140, 1) == ClockOffset(120.0, 20.0, 1)
    assert offset_between(-140, -100, 1) == ClockOffset(-120.0, 20.0, 1)


class Ranks:
    """Threads that gather objects from each other, with clocks that are ahead."""

    def __init__(self, ahead_ns: list[int]) -> None:
        self.ahead_ns = ahead_ns
        self._barrier = threading.Barrier(len(ahead_ns))
        self._objects: list[Any] = [None] * len(ahead_ns)

    def gather(self, rank: int, obj: Any) -> list[Any]:
        self._objects[rank] = obj
        self._barrier.wait()
        objects = list(self._objects)
        self._barrier.wait()
        return objects


@pytest.mark.parametrize("ahead_ns", [[0, 0, 0], [0, 5 * 10**9, -3600 * 10**9], [7 * 10**15, 0, 1]])
def test_clocks_are_measured_within_their_bounds(ahead_ns: list[int]) -> None:
    ranks, found = Ranks(ahead_ns), {}

    def work(rank: int) -> None:
        now = lambda: time.monotonic_ns() + ahead_ns[rank]  # noqa: E731
        found[rank] = measure_offsets(lambda each: ranks.gather(rank, each), now)

    with ThreadPoolExecutor(len(ahead_ns)) as pool:
        list(pool.map(work, range(len(ahead_ns))))
    offsets, zero_ns = found[0]
    assert all(each == found[0] for each in found.values())
    assert abs(zero_ns - ahead_ns[0] - time.monotonic_ns()) < 10 * 10**9
    for rank, each in enumerate(offsets):
        true = ahead_ns[rank] - ahead_ns[0]
        assert abs(each.ns - true) <= each.error_ns, (rank, each, true)
    if ahead_ns == [0, 0, 0]:
        assert [each.ns for each in offsets] == [0, 0, 0]
        assert 0 < max_error_ns(offsets) < 10**9


class Stubborn(torch.optim.SGD):
    """An optimizer whose step() calls the base class's, and may raise."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("no")
        return super().step(closure)


def test_a_step_that_raises_does_not_hide_later_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Stubborn([weight], lr=0.1)
    listener = EventListener()
    listener.start()
    try:
        listener.attach(optimizer)
        for fails in (False, True, True, False, True, False):
            optimizer.fails = fails
            with contextlib.suppress(ValueError):
                optimizer.step()
    finally:
        listener.stop()
    assert [span.name for span in listener.spans if span.track == STEPS] == ["step 0", "step 1", "step 2"]


GONE = """
import os, sys
import dualdist as dd
from dualdist import session
dd.init()
session.current().close_callbacks.append(lambda: print("what comes after it"))
os.rename(os.path.dirname(os.environ["DUALDIST_TIMELINE"]), os.path.join(sys.argv[1], "elsewhere"))
try:
    dd.shutdown()
except dd.errors.UsageError as error:
    assert "rank 0 cannot write it (No such file or directory); name another file" in str(error), error
    assert not dd.is_initialized()
    print("raised")
"""


def test_a_trace_that_cannot_be_written_does_not_stop_shutdown(base_env: Mapping[str, str], tmp_path: Path) -> None:
    """Its folder is moved while the program runs: shutdown() raises that, after all its other work."""
    (tmp_path / "traces").mkdir()
    env = {**base_env, "DUALDIST_TIMELINE": str(tmp_path / "traces" / "trace.json")}
    done = subprocess.run(
        [sys.executable, "-c", GONE, str(tmp_path)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "what comes after it\nraised\n", "")
    assert list((tmp_path / "elsewhere").iterdir()) == []
