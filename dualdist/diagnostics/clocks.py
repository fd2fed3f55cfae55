"""How far the ranks' clocks are apart, from messages alone.

Note [bounds]: what a rank has sent cannot arrive before it was sent. If rank r received at its time b what rank 0 had
sent at its own time a, then r's clock is ahead of 0's by at most b - a. Messages both ways bound it from both sides;
every further exchange can only narrow the bounds. Ranks of one host share a clock: there 0 is within them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EXCHANGES = 8

Gather = Callable[[Any], list[Any]]  # everybody's object, in rank order


@dataclass(frozen=True)
class Ahead:
    """A rank's clock was `ns` ahead of rank 0's at `at_ns` of its own, give or take `error_ns`."""

    ns: float
    error_ns: float
    at_ns: int


def measure(gather: Gather, now: Callable[[], int] = time.monotonic_ns) -> tuple[list[Ahead], int]:
    """How far everybody is ahead of rank 0, and what rank 0's clock said last; every rank calls this."""
    most: list[int] = []  # by how much this rank is ahead of each at most
    for _ in range(EXCHANGES):
        sent = gather(now())
        received = now()
        bounds = [received - at for at in sent]
        most = bounds if not most else [min(pair) for pair in zip(most, bounds, strict=True)]
    everybodys = gather((most, now()))
    of_rank_0, zero_ns = everybodys[0]
    told = [between(-of_rank_0[other], row[0], at) for other, (row, at) in enumerate(everybodys)]
    return told, int(zero_ns)


def between(least_ns: int, most_ns: int, at_ns: int) -> Ahead:
    """The middle of the bounds, or 0 where that is within them."""
    if least_ns <= 0 <= most_ns:
        return Ahead(0.0, float(max(-least_ns, most_ns)), at_ns)
    return Ahead((least_ns + most_ns) / 2, (most_ns - least_ns) / 2, at_ns)


def worst_ns(ahead: Sequence[Ahead]) -> float:
    """By how much times of two ranks may be apart wrongly."""
    return max((each.error_ns for each in ahead), default=0.0)
