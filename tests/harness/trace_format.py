"""Validation of files in Chrome's Trace Event Format, independent of dualdist.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

# Required fields of complete events and of metadata, and the types of their values; dualdist writes no other events.
FIELDS: dict[object, dict[str, type]] = {
    "X": {"name": str, "pid": int, "tid": int, "ts": Real, "dur": Real},
    "M": {"name": str, "pid": int, "args": dict},
}
METADATA: dict[object, tuple[str, type]] = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
# Times have three decimals: a child's end may be rounded up and its parent's down.
ROUNDING_US = 0.002


def load(path: Path) -> list[dict[str, Any]]:
    """Return the events of a valid file."""
    document = json.loads(path.read_text(), parse_constant=_refuse)
    found = list(problems(document))
    assert not found, "\n".join(found[:10])
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def problems(document: Mapping[str, Any]) -> Iterator[str]:
    events = document["traceEvents"]
    wrong = [f"{why}: {event}" for event in events for why in _event_problems(event)]
    if wrong:
        yield from wrong
        return
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for ids, track in tracks.items():
        yield from (f"track {ids}: {why}" for why in _track_problems(track))


def _event_problems(event: Mapping[str, Any]) -> Iterator[str]:
    phase = event.get("ph")
    if phase not in FIELDS:
        yield f"unknown phase {phase!r}"
        return
    for name, kind in FIELDS[phase].items():
        if not isinstance(event.get(name), kind) or isinstance(event[name], bool):
            yield f"{name} is missing, or no {kind.__name__}"
    args = event.get("args", {})
    if not isinstance(args, dict) or event.get("dur", 0) < 0:
        yield "args is no dict, or dur is negative"
    elif phase == "M":
        key, kind = METADATA.get(event.get("name"), ("", object))
        if type(args.get(key)) is not kind:
            yield f"metadata of an unknown kind, or args.{key} is no {kind.__name__}"


def _track_problems(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield problems of complete events of one thread, which must be disjoint or nested."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start + ROUNDING_US:
            open_until.pop()
        if open_until and end > open_until[-1] + ROUNDING_US:
            yield f"{event} crosses the end of the one around it, {open_until[-1]}"
        open_until.append(end)
