"""Medians over launches and ratios between launches of the same round, with intervals that hold for a few of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy

from dualdist.bench.statistics import LEVEL, quantile

RESAMPLES = 4000


def least_launches(among: int = 1) -> int:
    """So many that the range of all values, which a bootstrap cannot leave, holds the median in 95% of cases; `among`
    intervals at once. The range of n values misses it with a chance of 2 / 2**n: 1 - 2 / 2**5 is 94%.
    """
    return math.ceil(1 + math.log2(among / (1 - LEVEL)))


LEAST_LAUNCHES = least_launches()


@dataclass(frozen=True)
class MedianInterval:
    """A median over launches, and its 95% interval; with too few launches the range of what was seen instead.

    `among` is how many intervals hold at once in 95% of cases.
    """

    value: float
    low: float
    high: float
    launches: int
    among: int = 1

    @property
    def is_sound(self) -> bool:
        """Whether there were enough launches for an interval."""
        return self.launches >= least_launches(self.among)

    def differs_from(self, value: float) -> bool:
        return self.is_sound and not self.low <= value <= self.high


def centre(values: Sequence[float], *, among: int = 1, seed: int = 0) -> MedianInterval:
    """The median of one value a launch, and its interval by a bootstrap over launches. `among` is how many intervals
    shall hold at once in 95% of cases (Bonferroni), where the one that says most is looked for.

    Launches are independent of each other; steps inside one are not, as a launch moves as a whole. The percentiles are
    widened for few launches as Hesterberg does for means (The American Statistician 69(4), 2015, section 5.3).
    """
    if len(values) < least_launches(among):
        return MedianInterval(median(values), min(values), max(values), len(values), among)
    count = len(values)
    draws = numpy.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    found = sorted(numpy.median(numpy.asarray(values)[draws], axis=1).tolist())
    widened = student(1 - (1 - LEVEL) / 2 / among, count - 1) * math.sqrt(count / (count - 1))
    edge = NormalDist().cdf(-widened)
    return MedianInterval(median(values), quantile(found, edge), quantile(found, 1 - edge), count, among)


def ratio_of(over: Sequence[float], under: Sequence[float], *, among: int = 1) -> MedianInterval:
    """over / under, launch by launch: each pair ran in the same round, in an order that was drawn."""
    logs = centre([math.log(a / b) for a, b in zip(over, under, strict=True)], among=among)
    return MedianInterval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.launches, among)


def difference_of(minuend: Sequence[float], subtrahend: Sequence[float]) -> MedianInterval:
    """minuend - subtrahend, launch by launch."""
    return centre([a - b for a, b in zip(minuend, subtrahend, strict=True)])


def student(part: float, degrees: int) -> float:
    """A quantile of Student's t, for 5 degrees and more to three digits (Abramowitz and Stegun 1964, 26.7.5)."""
    z = NormalDist().inv_cdf(part)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))
