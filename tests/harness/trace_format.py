"""Validation of files in Chrome's Trace Event Format, independent of dualdist.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

# Required fields of events in addition to ph, pid and ts.
NEEDED = {"X": ("name", "tid", "dur"), "B": ("name", "tid"), "E": ("tid",), "i": ("name",), "M": ("name", "args")}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
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
    events = document.get("traceEvents")
    if not isinstance(events, list):
        yield "traceEvents is no list"
        return
    if document.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        yield f"displayTimeUnit {document['displayTimeUnit']!r}"
    wrong = [f"{why}: {event}" for event in events for why in _event_problems(event)]
    if wrong:
        yield from wrong
        return
    tracks = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for place, track in tracks.items():
        yield from (f"track {place}: {why}" for why in _track_problems(track))


def _event_problems(event: Mapping[str, Any]) -> Iterator[str]:
    phase = event.get("ph")
    if phase not in NEEDED:
        yield f"no phase of ours {phase!r}"
        return
    yield from (f"{name} is missing" for name in ("pid", *NEEDED[phase]) if name not in event)
    for name in ("pid", "tid"):
        if name in event and type(event[name]) is not int:
            yield f"{name} is no whole number"
    if phase != "M" and (not isinstance(event.get("ts"), Real) or isinstance(event["ts"], bool)):
        yield "ts is no number"
    if phase == "X" and not (isinstance(event.get("dur"), Real) and event["dur"] >= 0):
        yield "dur is no number of at least 0"
    if not isinstance(event.get("args", {}), dict):
        yield "args is no object"
    elif phase == "M":
        yield from _metadata_problems(event)


def _metadata_problems(event: Mapping[str, Any]) -> Iterator[str]:
    if event.get("name") in METADATA:
        key, kind = METADATA[event["name"]]
        if type(event.get("args", {}).get(key)) is not kind:
            yield f"args.{key} is no {kind.__name__}"
    else:
        yield "metadata of a kind that is not described"


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
