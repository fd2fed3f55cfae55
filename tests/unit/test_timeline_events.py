"""Timeline: trace events from spans, and clock offsets from messages."""

import contextlib
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

from dualdist.trace.timeline import EventListener, max_error_ns, measure_offsets, offset_between
from dualdist.trace.trace_format import COMMUNICATION, STEPS, ClockModel, ClockOffset, TraceSpan, rank_events

ZERO = ClockOffset(0.0, 0.0, 0)


def test_overlapping_communication_uses_separate_tracks() -> None:
    """Random spans never cross in a track, and use as few tracks as possible."""
    chance = random.Random(7)
    for _ in range(50):
        spans = []
        for number in range(40):
            start = chance.randrange(1000)
            spans.append(TraceSpan(COMMUNICATION, str(number), start, start + chance.randrange(1, 200)))
        events = rank_events(0, "rank 0", spans, ClockModel(0, ZERO, ZERO))
        assert not list(trace_format.problems({"traceEvents": events}))
        lanes = {event["tid"] for event in events if event["ph"] == "X"}
        most = max(sum(span.start_ns <= at < span.end_ns for span in spans) for at in range(1200))
        assert len(lanes) == most


def test_clock_drift_is_interpolated_and_offsets_are_the_middle_of_their_bounds() -> None:
    """1 ms ahead at 10 s, 3 ms at 20 s."""
    clock = ClockModel(0, ClockOffset(1e6, 0.0, 10 * 10**9), ClockOffset(3e6, 0.0, 20 * 10**9))
    assert clock.microseconds(10 * 10**9) == 10e6 - 1e3
    assert clock.microseconds(15 * 10**9) == 15e6 - 2e3
    assert clock.microseconds(20 * 10**9) == 20e6 - 3e3
    assert clock.microseconds(5 * 10**9) == 5e6 - 1e3
    assert ClockModel(5_000, ZERO, ZERO).microseconds(7_500) == 2.5
    assert offset_between(-5, 7, 1) == ClockOffset(0.0, 7.0, 1)
    assert offset_between(100, 140, 1) == ClockOffset(120.0, 20.0, 1)
    assert offset_between(-140, -100, 1) == ClockOffset(-120.0, 20.0, 1)


@pytest.mark.parametrize("ahead_ns", [[0, 0, 0], [0, 5 * 10**9, -3600 * 10**9], [7 * 10**15, 0, 1]])
def test_clocks_are_measured_within_their_bounds(ahead_ns: list[int]) -> None:
    """By ranks in threads that gather objects from each other, whose clocks are ahead."""
    size = len(ahead_ns)
    barrier = threading.Barrier(size)
    gathered: list[Any] = [None] * size

    def measure(rank: int) -> tuple[list[ClockOffset], int]:
        def gather(own: Any) -> list[Any]:
            gathered[rank] = own
            barrier.wait()
            found = list(gathered)
            barrier.wait()
            return found

        return measure_offsets(gather, lambda: time.monotonic_ns() + ahead_ns[rank])

    with ThreadPoolExecutor(size) as pool:
        first, *others = pool.map(measure, range(size))
    assert others == [first] * (size - 1)
    for rank, each in enumerate(first[0]):
        assert abs(each.ns - ahead_ns[rank] + ahead_ns[0]) <= each.error_ns, rank
    if not any(ahead_ns):
        assert [each.ns for each in first[0]] == [0, 0, 0]
        assert 0 < max_error_ns(first[0]) < 10**9


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
