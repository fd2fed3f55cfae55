"""Who waits for whom: how long this rank has waited, and the others have, in everything that they did together.

All ranks of a group perform the same operations, and the same rounds of gradients, in the same order. So every rank
keeps two times of each, and asks for the others' only when somebody wants to know. Durations are compared, not clocks:
all ranks are done with an operation at about the same time, so that the one to which it took least came last.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualdist.utils.suggest import format_ranks

Array = np.ndarray[Any, Any]

# Of each kind the last so many are kept.
KEPT = 1 << 16
UNKNOWN = float("nan")
SHOWN = 8  # ranks, at most, in a table
# The share of the time below which no rank is told to be slow.
SLOW = 0.01


class WaitRecord:
    """Of one thing after the other: seconds since this rank was ready for it, and of these those that it waited."""

    def __init__(self) -> None:
        self.dropped = 0
        self.ready, self.waited = array("f"), array("f")

    def add(self, ready_s: float, waited_s: float) -> None:
        self.ready.append(ready_s)
        self.waited.append(waited_s)
        if len(self.ready) >= 2 * KEPT:
            self.dropped += KEPT
            del self.ready[:KEPT], self.waited[:KEPT]


class WaitTimes:
    """What a rank remembers of a group from now on."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.operations, self.rounds = WaitRecord(), WaitRecord()
        self._noticed_s = 0.0

    def record_operation(self, ready_since: float, waits_since: float | None) -> None:
        """An operation is done; both in seconds of the monotonic clock, 0.0 and None where that was not."""
        now = time.monotonic()
        ready_s = now - ready_since if ready_since else UNKNOWN
        self.operations.add(ready_s, 0.0 if waits_since is None else now - waits_since)

    def record_flags_wait(self, since: float) -> None:
        """The message before a round, which belongs to it, has been waited for since then."""
        self._noticed_s += time.monotonic() - since

    def record_round(self, since: float) -> None:
        """A round of gradients has been waited for since then."""
        waited_s = time.monotonic() - since + self._noticed_s
        self._noticed_s = 0.0
        self.rounds.add(waited_s, waited_s)

    def skip(self, times: WaitRecord) -> None:
        """This rank has joined, and nobody waited for it."""
        times.add(UNKNOWN, 0.0)

    def dumps(self) -> bytes:
        """For the other ranks."""
        kinds = (self.operations, self.rounds)
        head = json.dumps([time.monotonic() - self.started_at, *((times.dropped, len(times.ready)) for times in kinds)])
        body = b"".join(part.tobytes() for times in kinds for part in (times.ready, times.waited))
        return head.encode() + b"\0" + body


@dataclass(frozen=True)
class SlowRanks:
    """Who waited for whom, over so many seconds. All lists go by the place of a rank in `ranks`.

    `waited_for_s[a][b]` are the seconds that a waited where b came last; `caused_s[b]` what each of the others waited
    for b on average; `was_last[b]` how often b came last.
    """

    ranks: tuple[int, ...]
    seconds: float
    operations: int
    rounds: int
    was_last: tuple[int, ...]
    caused_s: tuple[float, ...]
    waited_for_s: tuple[tuple[float, ...], ...]

    @property
    def waited_s(self) -> tuple[float, ...]:
        """What each rank waited for others."""
        return tuple(sum(row) for row in self.waited_for_s)

    @property
    def slowest(self) -> int | None:
        """The rank for which the others waited most; None where that was hardly any of the time."""
        place = max(range(len(self.ranks)), key=self.caused_s.__getitem__)
        return self.ranks[place] if self.caused_s[place] > SLOW * self.seconds else None

    def __str__(self) -> str:
        counted = self.operations + self.rounds
        if not counted or len(self.ranks) == 1:
            return "nothing has been counted yet that ranks did together"
        head = f"in {self.seconds:.1f} s ({self.rounds} rounds of gradients, {self.operations} operations)"
        if self.slowest is None:
            return f"{head} no rank made the others wait for more than {SLOW:.0%} of the time"
        order = sorted(range(len(self.ranks)), key=lambda place: -self.caused_s[place])
        rows = [("rank", "came last", "the others waited for it", "it waited", "mostly for")]
        rows += [self._row(place, counted) for place in order[:SHOWN]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        more = [f"and {len(order) - SHOWN} more"] if len(order) > SHOWN else []
        return "\n".join([f"{head} the others waited for {format_ranks([self.slowest])} most", *lines, *more])

    def _row(self, place: int, counted: int) -> tuple[str, str, str, str, str]:
        caused, waited = self.caused_s[place], self.waited_s[place]
        mostly = max(range(len(self.ranks)), key=self.waited_for_s[place].__getitem__)
        return (
            str(self.ranks[place]),
            f"{self.was_last[place]} of {counted}",
            f"{caused:.2f} s, {caused / self.seconds:.0%}",
            f"{waited:.2f} s",
            f"rank {self.ranks[mostly]}" if waited > 0 else "",
        )


def summarize_waits(ranks: Sequence[int], said: Sequence[bytes]) -> SlowRanks:
    """What the ranks' times come to, the same on every rank."""
    heads, bodies = zip(*(_loads(text) for text in said), strict=True)
    size = len(ranks)
    last, caused, waited_for = np.zeros(size, int), np.zeros(size), np.zeros((size, size))
    counts = []
    for kind in range(2):
        ready, waited = _aligned([head[1 + kind][0] for head in heads], [body[kind] for body in bodies])
        is_known = np.isfinite(ready).any(0)
        ready, waited = ready[:, is_known], waited[:, is_known]
        counts.append(ready.shape[1])
        if not ready.shape[1]:
            continue
        late = np.nanargmin(ready, 0)
        least = np.nanmin(ready, 0)
        because = np.nan_to_num(np.clip(np.minimum(waited, ready - least), 0.0, None))
        for place in range(size):
            mine = because[:, late == place]
            last[place] += mine.shape[1]
            waited_for[:, place] += mine.sum(1)
            caused[place] += mine.sum() / max(1, size - 1)
    seconds = min(float(head[0]) for head in heads)
    table = tuple(tuple(float(value) for value in row) for row in waited_for)
    operations, rounds = counts
    return SlowRanks(tuple(ranks), seconds, operations, rounds, tuple(map(int, last)), tuple(map(float, caused)), table)


def _loads(text: bytes) -> tuple[list[Any], list[Array]]:
    """What dumps() said: of operations and of rounds two rows each."""
    head, _, body = text.partition(b"\0")
    numbers = np.frombuffer(body, dtype=np.float32)
    found = json.loads(head)
    counts = [count for _, count in found[1:]]
    return found, [part.reshape(2, -1) for part in np.split(numbers, [2 * counts[0]])]


def _aligned(dropped: Sequence[int], found: Sequence[Array]) -> tuple[Any, Any]:
    """The same things of every rank, one under the other: ready and waited, (ranks, things)."""
    start = max(dropped)
    end = min(first + times.shape[1] for first, times in zip(dropped, found, strict=True))
    pieces = [times[:, start - first : max(start, end) - first] for first, times in zip(dropped, found, strict=True)]
    return np.stack([piece[0] for piece in pieces]), np.stack([piece[1] for piece in pieces])
