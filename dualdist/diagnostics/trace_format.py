"""Chrome's Trace Event Format, which chrome://tracing, edge://tracing and ui.perfetto.dev load.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]

STEPS, COMPUTE, COMMUNICATION = "steps", "compute", "communication"
# The numbers of a rank's tracks. Communication that overlaps takes more of them, from the last one on.
TRACKS = {STEPS: 1, COMPUTE: 2, COMMUNICATION: 10}


@dataclass(frozen=True)
class TraceSpan:
    """Something that a rank did, in nanoseconds of its clock. What began inside of it, and ended there, is within it.

    `parts` are those of a communication: its own name, and where it begins and ends.
    """

    track: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)
    parts: tuple[tuple[str, int, int], ...] = ()


def process_name_event(pid: int, name: str) -> Event:
    """A process is called so."""
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def begin_event(pid: int, name: str, ts: float) -> Event:
    return {"name": name, "ph": "B", "pid": pid, "ts": ts}


def end_event(pid: int, ts: float) -> Event:
    return {"ph": "E", "pid": pid, "ts": ts}


def instant_event(pid: int, name: str, ts: float) -> Event:
    """An instant, across the whole picture."""
    return {"name": name, "ph": "i", "pid": pid, "ts": ts, "s": "g"}


def rank_events(rank: int, title: str, spans: Sequence[TraceSpan], clock: ClockModel) -> list[Event]:
    """One rank as a process of the trace: its steps, what it computed, and below that what it communicated."""
    found = [
        process_name_event(rank, title),
        {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
    ]
    lanes: list[int] = []  # of communication: when each will be free
    told = set()
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        tid = TRACKS[span.track]
        lane = _lane(lanes, span) if span.track == COMMUNICATION else 0
        if (tid + lane) not in told:
            told.add(tid + lane)
            found += _track(rank, tid + lane, span.track if lane == 0 else f"{span.track} {lane + 1}")
        found += _complete(rank, tid + lane, span, clock)
    return found


def _lane(lanes: list[int], span: TraceSpan) -> int:
    """The first lane that is free: what overlaps without one being inside the other cannot share a track."""
    for number, free_ns in enumerate(lanes):
        if free_ns <= span.start_ns:
            lanes[number] = span.end_ns
            return number
    lanes.append(span.end_ns)
    return len(lanes) - 1


def _track(rank: int, tid: int, name: str) -> Iterator[Event]:
    yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}
    yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": tid, "args": {"sort_index": tid}}


def _complete(rank: int, tid: int, span: TraceSpan, clock: ClockModel) -> Iterator[Event]:
    pieces = [(span.name, span.start_ns, span.end_ns), *span.parts]
    for number, (name, start_ns, end_ns) in enumerate(pieces):
        start_us, end_us = clock.microseconds(start_ns), clock.microseconds(end_ns)
        event = {"name": name, "cat": span.track, "ph": "X", "pid": rank, "tid": tid, "ts": start_us}
        event["dur"] = round(max(0.0, end_us - start_us), 3)
        yield {**event, "args": span.args} if number == 0 and span.args else event


def trace_document(events: Iterable[Event], **about: Any) -> dict[str, Any]:
    """The whole file."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": about}


@dataclass(frozen=True)
class ClockModel:
    """From this rank's clock to rank 0's: it was `ahead_ns` at `at_ns`, and later `ahead_later_ns` at `later_ns`.

    The trace begins at rank 0's `zero_ns`.
    """

    zero_ns: int
    at_ns: int = 0
    ahead_ns: float = 0.0
    later_ns: int | None = None
    ahead_later_ns: float = 0.0

    def microseconds(self, at_ns: int) -> float:
        """Since the trace began, to the nanosecond."""
        ahead = self.ahead_ns
        if self.later_ns is not None and self.later_ns > self.at_ns:
            share = min(1.0, max(0.0, (at_ns - self.at_ns) / (self.later_ns - self.at_ns)))
            ahead += share * (self.ahead_later_ns - self.ahead_ns)
        return round((at_ns - self.zero_ns - ahead) / 1e3, 3)


TIMELINE = "DUALDIST_TIMELINE"


def find_write_problem(path: Path) -> str:
    """Why rank 0, on this host, cannot write the file; "" where it can."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return "" if os.access(path.parent, os.W_OK) else f"the folder {path.parent} is not writable"


def rank_file(path: Path, rank: int) -> Path:
    """The file of one rank alone."""
    return path.with_stem(f"{path.stem}.rank-{rank}")
