"""Wait times: how long each rank waited in collectives, and for which other rank.

All ranks of a group perform the same operations, and the same gradient reductions, in the same order. So every rank
records two durations of each, and exchanges them on request only. Durations are compared, not clocks: all ranks
complete an operation at about the same time, so the rank with the shortest duration arrived last.
"""

import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualdist.utils.suggest import format_ranks

Array = np.ndarray[Any, Any]

# Number of operations, and of gradient reductions, that are kept.
KEPT = 1 << 16
UNKNOWN = float("nan")
SHOWN = 8  # ranks in a table
# No rank is reported as slow below this share of the time.
SLOW = 0.01


class WaitRecord:
    """Per operation: seconds since this rank was ready for it, and those of them that it waited."""

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
    """A rank's wait times in a group."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.operations, self.gradient_reductions = WaitRecord(), WaitRecord()
        self._flags_s = 0.0

    def record_operation(self, ready_since: float, waits_since: float | None) -> None:
        """Record a completed operation. Times are of the monotonic clock; 0.0: never ready, None: never waited."""
        now = time.monotonic()
        ready_s = now - ready_since if ready_since else UNKNOWN
        self.operations.add(ready_s, 0.0 if waits_since is None else now - waits_since)

    def record_flags_wait(self, since: float) -> None:
        """Record a wait for the flags of the next gradient reduction since `since`."""
        self._flags_s += time.monotonic() - since

    def record_gradient_reduction(self, since: float) -> None:
        """Record a wait for a gradient reduction since `since`."""
        waited_s = time.monotonic() - since + self._flags_s
        self._flags_s = 0.0
        self.gradient_reductions.add(waited_s, waited_s)

    def skip(self, times: WaitRecord) -> None:
        """Record an operation after this rank has joined, for which no rank waited."""
        times.add(UNKNOWN, 0.0)

    def dumps(self) -> bytes:
        """Serialize for the other ranks."""
        kinds = (self.operations, self.gradient_reductions)
        head = json.dumps([time.monotonic() - self.started_at, *((times.dropped, len(times.ready)) for times in kinds)])
        body = b"".join(part.tobytes() for times in kinds for part in (times.ready, times.waited))
        return head.encode() + b"\0" + body


@dataclass(frozen=True)
class SlowRanks:
    """Seconds that ranks waited for each other. All tuples are in the order of `ranks`.

    Attributes:
        ranks: The ranks compared.
        seconds: Time over which was counted.
        operations: Number of operations.
        gradient_reductions: Number of gradient reductions.
        was_last: `was_last[b]` is how often b arrived last.
        caused_s: `caused_s[b]` is how long each of the others waited for b, on average.
        waited_for_s: `waited_for_s[a][b]` is how long a waited while b arrived last.
    """

    ranks: tuple[int, ...]
    seconds: float
    operations: int
    gradient_reductions: int
    was_last: tuple[int, ...]
    caused_s: tuple[float, ...]
    waited_for_s: tuple[tuple[float, ...], ...]

    @property
    def waited_s(self) -> tuple[float, ...]:
        """Seconds that each rank waited for others."""
        return tuple(sum(row) for row in self.waited_for_s)

    @property
    def slowest(self) -> int | None:
        """The rank for which the others waited most, None if below 1% of the time."""
        index = max(range(len(self.ranks)), key=self.caused_s.__getitem__)
        return self.ranks[index] if self.caused_s[index] > SLOW * self.seconds else None

    def __str__(self) -> str:
        counted = self.operations + self.gradient_reductions
        if not counted or len(self.ranks) == 1:
            return "no collectives have been counted yet"
        head = f"in {self.seconds:.1f} s ({self.gradient_reductions} gradient reductions, {self.operations} operations)"
        if self.slowest is None:
            return f"{head} no rank made the others wait for more than {SLOW:.0%} of the time"
        order = sorted(range(len(self.ranks)), key=lambda index: -self.caused_s[index])
        rows = [("rank", "came last", "the others waited for it", "it waited", "mostly for")]
        rows += [self._row(index, counted) for index in order[:SHOWN]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        more = [f"and {len(order) - SHOWN} more"] if len(order) > SHOWN else []
        return "\n".join([f"{head} the others waited most for {format_ranks([self.slowest])}", *lines, *more])

    def _row(self, index: int, counted: int) -> tuple[str, str, str, str, str]:
        caused, waited = self.caused_s[index], self.waited_s[index]
        mostly = max(range(len(self.ranks)), key=self.waited_for_s[index].__getitem__)
        return (
            str(self.ranks[index]),
            f"{self.was_last[index]} of {counted}",
            f"{caused:.2f} s, {caused / self.seconds:.0%}",
            f"{waited:.2f} s",
            f"rank {self.ranks[mostly]}" if waited > 0 else "",
        )


def summarize_waits(ranks: Sequence[int], dumps: Sequence[bytes]) -> SlowRanks:
    """Return the statistics of the ranks' WaitTimes.dumps(), the same on every rank."""
    heads, bodies = zip(*(_loads(text) for text in dumps), strict=True)
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
        latest = np.nanargmin(ready, 0)
        least = np.nanmin(ready, 0)
        for_latest = np.nan_to_num(np.clip(np.minimum(waited, ready - least), 0.0, None))
        for index in range(size):
            for_index = for_latest[:, latest == index]
            last[index] += for_index.shape[1]
            waited_for[:, index] += for_index.sum(1)
            caused[index] += for_index.sum() / max(1, size - 1)
    seconds = min(float(head[0]) for head in heads)
    table = tuple(tuple(float(value) for value in row) for row in waited_for)
    operations, reductions = counts
    return SlowRanks(
        tuple(ranks), seconds, operations, reductions, tuple(map(int, last)), tuple(map(float, caused)), table
    )


def _loads(text: bytes) -> tuple[list[Any], list[Array]]:
    """Parse dumps(): two rows each of operations and of gradient reductions."""
    head, _, body = text.partition(b"\0")
    numbers = np.frombuffer(body, dtype=np.float32)
    found = json.loads(head)
    counts = [count for _, count in found[1:]]
    return found, [part.reshape(2, -1) for part in np.split(numbers, [2 * counts[0]])]


def _aligned(dropped: Sequence[int], found: Sequence[Array]) -> tuple[Any, Any]:
    """Return ready and waited, each of shape (ranks, operations), of the operations that all ranks kept."""
    start = max(dropped)
    end = min(first + times.shape[1] for first, times in zip(dropped, found, strict=True))
    pieces = [times[:, start - first : max(start, end) - first] for first, times in zip(dropped, found, strict=True)]
    return np.stack([piece[0] for piece in pieces]), np.stack([piece[1] for piece in pieces])
