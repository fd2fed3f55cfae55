"""Trace files: Chrome's Trace Event Format, for chrome://tracing, edge://tracing and ui.perfetto.dev.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

STEPS, COMPUTE, COMMUNICATION = "steps", "compute", "communication"
# Thread IDs of a rank's tracks. Overlapping communication uses further ones, from the last on.
TRACKS = {STEPS: 1, COMPUTE: 2, COMMUNICATION: 10}


@dataclass(frozen=True)
class TraceSpan:
    """An event of a rank, in nanoseconds of its clock; `parts` are (name, start_ns, end_ns) within it."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)
    parts: tuple[tuple[str, int, int], ...] = ()


def process_name_event(pid: int, name: str) -> Event:
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def rank_events(rank: int, title: str, spans: Sequence[TraceSpan], clock: ClockModel) -> list[Event]:
    """Return a rank's events as a process with tracks for steps, computation and communication."""
    found = [
        process_name_event(rank, title),
        {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
    ]
    lanes: list[int] = []  # of communication: the end of each lane's last span
    named = set()
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        tid = TRACKS[span.track]
        lane = _lane(lanes, span) if span.track == COMMUNICATION else 0
        if (tid + lane) not in named:
            named.add(tid + lane)
            found += _track(rank, tid + lane, span.track if lane == 0 else f"{span.track} {lane + 1}")
        found += _complete(rank, tid + lane, span, clock)
    return found


def _lane(lanes: list[int], span: TraceSpan) -> int:
    """Return the first free lane: spans that overlap without nesting cannot share a track."""
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


@dataclass(frozen=True)
class ClockOffset:
    """At `at_ns`, a rank's clock was `ns` ± `error_ns` ahead of rank 0's."""

    ns: float
    error_ns: float
    at_ns: int


@dataclass(frozen=True)
class ClockModel:
    """Converts this rank's clock to microseconds since rank 0's `zero_ns`; between two offsets it drifts evenly."""

    zero_ns: int
    first: ClockOffset
    last: ClockOffset

    def microseconds(self, at_ns: int) -> float:
        """Return the time since the start of the trace."""
        between_ns = max(1, self.last.at_ns - self.first.at_ns)
        share = min(1.0, max(0.0, (at_ns - self.first.at_ns) / between_ns))
        ahead_ns = self.first.ns + share * (self.last.ns - self.first.ns)
        return round((at_ns - self.zero_ns - ahead_ns) / 1e3, 3)
