"""Wait times: how long each rank waited in collectives, and for which other rank.

All ranks of a group perform the same operations, and the same gradient reductions, in the same order. So every rank
records two durations of each, and exchanges them on request only. Durations are compared, not clocks: all ranks
complete an operation at about the same time, so the rank with the shortest duration arrived last.
"""

import pickle
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualdist.utils.suggest import format_ranks

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
        waited_s = time.monotonic() - since + self._flags_s
        self._flags_s = 0.0
        self.gradient_reductions.add(waited_s, waited_s)

    def skip(self, times: WaitRecord) -> None:
        """Record an operation after this rank has joined, for which no rank waited."""
        times.add(UNKNOWN, 0.0)

    def dumps(self) -> bytes:
        """Serialize for the other ranks."""
        return pickle.dumps((time.monotonic() - self.started_at, self.operations, self.gradient_reductions))


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
    elapsed, *kinds = zip(*map(pickle.loads, dumps), strict=True)
    size, counts = len(ranks), []
    last, waited_for = np.zeros(size, int), np.zeros((size, size))
    for records in kinds:
        ready, waited = _aligned(records)
        is_known = np.isfinite(ready).any(0)
        ready, waited = ready[:, is_known], waited[:, is_known]
        counts.append(ready.shape[1])
        latest = np.nanargmin(ready, 0)
        for_latest = np.nan_to_num(np.clip(np.minimum(waited, ready - np.nanmin(ready, 0)), 0.0, None))
        last += np.bincount(latest, minlength=size)
        waited_for += [np.bincount(latest, row, size) for row in for_latest]
    caused, table = waited_for.sum(0) / max(1, size - 1), tuple(map(tuple, waited_for.tolist()))
    operations, reductions = counts
    return SlowRanks(
        tuple(ranks), min(elapsed), operations, reductions, tuple(last.tolist()), tuple(caused.tolist()), table
    )


def _aligned(records: Sequence[WaitRecord]) -> Any:
    """Return ready and waited, each of shape (ranks, operations), of the operations that all ranks kept."""
    start = max(each.dropped for each in records)
    end = max(start, min(each.dropped + len(each.ready) for each in records))
    kept = [
        [times[start - each.dropped : end - each.dropped] for times in (each.ready, each.waited)] for each in records
    ]
    return np.array(kept).swapaxes(0, 1)
