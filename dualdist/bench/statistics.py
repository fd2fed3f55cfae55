"""Medians, ratios and their confidence intervals over rounds and launches, and how noisy the machine was.

A launch is one start of a job, a round one sample of every contender in it. Launches are independent; the rounds and
steps of one launch are not, as memory placement shifts a launch as a whole. Needs scipy, which is imported on use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any

from dualdist.utils.machine import CpuUse

Rounds = Sequence[float]  # one sample per round, of one launch
ForeignCores = Sequence[float | None]  # CPU use of other processes in each round; None if unknown

RESAMPLES = 4000
LEVEL = 0.95
# CPU use of other processes, in cores, above which a round counts as loaded: a tenth of a core changes a step of two
# ranks on two cores.
LOADED_CORES = 0.1
# A machine is noisy if more than this share of the rounds was loaded, or if the interquartile range of the baseline's
# samples exceeds this share of their median.
NOISY_ROUNDS = 0.25
NOISY_SPREAD = 0.1


def time_ratio(over: Sequence[Rounds], under: Sequence[Rounds], foreign: Sequence[ForeignCores]) -> dict[str, Any]:
    """Divide `over` by `under`, round by round; each argument holds one sequence per launch.

    `quiet_median` is the median over rounds that were not loaded, None if all were.
    """
    launches = [[a / b for a, b in zip(*each, strict=True)] for each in zip(over, under, strict=True)]
    quiet = [
        [value for value, cores in zip(values, rounds, strict=True) if not is_loaded(cores)]
        for values, rounds in zip(launches, foreign, strict=True)
    ]
    quiet = [values for values in quiet if values]
    return {
        "median": bootstrap_median(launches),
        "quiet_median": pooled_median(quiet) if quiet else None,
        "rounds": sum(len(values) for values in launches),
        "loaded_rounds": sum(sum(map(is_loaded, rounds)) for rounds in foreign),
        "launches": len(launches),
    }


def time_difference(over: Sequence[Rounds], under: Sequence[Rounds]) -> dict[str, float]:
    return bootstrap_median([[a - b for a, b in zip(*each, strict=True)] for each in zip(over, under, strict=True)])


def pooled_median(launches: Sequence[Rounds]) -> float:
    """Return the median of the launches' medians."""
    return median(median(rounds) for rounds in launches)


def bootstrap_median(launches: Sequence[Rounds]) -> dict[str, float]:
    """Return the pooled median and its interval. With one launch it does not cover the variation between launches."""
    low, high = _bootstrap_interval(launches, LEVEL)
    return {"value": pooled_median(launches), "low": low, "high": high}


def _bootstrap_interval(launches: Sequence[Rounds], level: float) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the pooled median (Efron and Tibshirani 1993, chapter 13).

    Launches, of equally many rounds, are resampled first, then the rounds within each (Davison and Hinkley 1997,
    section 3.8).
    """
    import numpy

    samples, draw = numpy.asarray(launches), numpy.random.default_rng(0)
    count, rounds = samples.shape
    launch = draw.integers(count, size=(RESAMPLES, count, 1))
    resampled = samples[launch, draw.integers(rounds, size=(RESAMPLES, count, rounds))]
    medians = numpy.median(numpy.median(resampled, axis=2), axis=1)
    low, high = numpy.quantile(medians, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


@dataclass(frozen=True)
class MedianInterval:
    """A median over launches with its 95% interval, or the range of the values if there are too few launches.

    `comparisons` intervals hold simultaneously with 95% confidence (Bonferroni).
    """

    value: float
    low: float
    high: float
    launches: int
    comparisons: int = 1

    @property
    def has_enough_launches(self) -> bool:
        return self.launches >= min_launches(self.comparisons)

    def excludes(self, value: float) -> bool:
        """Return True if the interval is based on enough launches and does not contain the value."""
        return self.has_enough_launches and not self.low <= value <= self.high

    def inverse(self) -> MedianInterval:
        return MedianInterval(1 / self.value, 1 / self.high, 1 / self.low, self.launches, self.comparisons)


def min_launches(comparisons: int = 1) -> int:
    """Return how many launches an interval needs: the range of n values misses the median with probability 2 / 2**n.

    A bootstrap interval cannot exceed that range: with 5 launches it would cover 1 - 2 / 2**5 = 94% at most.
    """
    return math.ceil(1 + math.log2(comparisons / (1 - LEVEL)))


MIN_LAUNCHES = min_launches()


def median_interval(values: Sequence[float], *, comparisons: int = 1) -> MedianInterval:
    """Return the median of one value per launch, with a bootstrap interval over launches.

    The percentiles are expanded for small samples as Hesterberg does for means (The American Statistician 69(4),
    2015, section 5.3).
    """
    count = len(values)
    if count < min_launches(comparisons):
        return MedianInterval(median(values), min(values), max(values), count, comparisons)
    from scipy import stats

    t = stats.t.ppf(1 - (1 - LEVEL) / 2 / comparisons, count - 1) * math.sqrt(count / (count - 1))
    low, high = _bootstrap_interval([[value] for value in values], 1 - 2 * NormalDist().cdf(-t))
    return MedianInterval(median(values), low, high, count, comparisons)


def machine_noise(foreign: Sequence[ForeignCores], baseline: Sequence[Rounds]) -> dict[str, Any]:
    """Return how noisy the machine was, by the foreign CPU use of every round and the spread of the baseline's samples.

    `foreign_cores` is that of the median round, None if unknown. `spread` is the interquartile range over the median,
    the median over launches.
    """
    from scipy.stats import iqr

    flat = [value for rounds in foreign for value in rounds]
    known = [value for value in flat if value is not None]
    cores, loaded = median(known) if known else None, sum(map(is_loaded, flat))
    spread = median(float(iqr(rounds)) / median(rounds) for rounds in baseline)
    is_noisy = loaded > NOISY_ROUNDS * len(flat) or spread > NOISY_SPREAD
    verdict = "NOISY: repeat on a quiet machine before relying on this" if is_noisy else "quiet"
    summary = (
        f"{verdict} (CPU use of other processes {'unknown' if cores is None else f'{cores:.2f} cores'} in the median "
        f"round, {loaded} of {len(flat)} rounds above {LOADED_CORES:g} cores; interquartile range of the baseline "
        f"{spread:.1%})"
    )
    return {
        "rounds": len(flat),
        "loaded_rounds": loaded,
        "foreign_cores": cores,
        "spread": spread,
        "is_noisy": is_noisy,
        "summary": summary,
    }


def is_loaded(cores: float | None) -> bool:
    return cores is not None and cores > LOADED_CORES


def foreign_cores(ranks: Sequence[CpuUse]) -> float | None:
    """Return how many cores other programs used, from the readings of all ranks of one host in the same window.

    The system counts in ticks of 10 ms: windows well below a second are imprecise.
    """
    first = ranks[0]
    if first.machine_s is None or first.window_s <= 0:
        return None
    return max(0.0, first.machine_s - sum(rank.own_s for rank in ranks)) / first.window_s


def max_foreign_cores(uses: Sequence[tuple[int | str, CpuUse]]) -> float | None:
    """Return the foreign CPU use of the most loaded node, from (node, CPU use) of every rank."""
    nodes = {node for node, _ in uses}
    found = [foreign_cores([use for node, use in uses if node == chosen]) for chosen in nodes]
    return max((cores for cores in found if cores is not None), default=None)
