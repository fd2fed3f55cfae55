"""Medians, ratios and their confidence intervals over rounds and launches, and how noisy the machine was.

A launch is one start of a job, a round one sample of every contender in it. Launches are independent; the rounds and
steps of one launch are not, as memory placement shifts a launch as a whole. Needs scipy, which is imported on use.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, median
from typing import Any

from dualdist.utils.machine import CpuUse

Rounds = Sequence[float]  # one sample per round, of one launch
ForeignCores = Sequence[float | None]  # CPU use of other processes in each round; None if unknown

RESAMPLES = 2000
PAIRED_RESAMPLES = 4000
LEVEL = 0.95
# CPU use of other processes, in cores, above which a round counts as loaded: a tenth of a core changes a step of two
# ranks on two cores.
LOADED_CORES = 0.1
# A machine is noisy if more than this share of the rounds was loaded, or if the interquartile range of the baseline's
# samples exceeds this share of their median.
NOISY_ROUNDS = 0.25
NOISY_SPREAD = 0.1


@dataclass(frozen=True)
class MedianEstimate:
    """A median over rounds and launches with its 95% bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TimeRatio:
    """Step time of one contender over another's, round by round; below 1 it is faster.

    `min_ratio` is the smallest ratio of a round, `ratio_of_minima` that of the smallest samples overall, and
    `quiet_median` the median over rounds that were not loaded (None if all were).
    """

    median: MedianEstimate
    min_ratio: float
    ratio_of_minima: float
    quiet_median: float | None
    rounds: int
    loaded_rounds: int
    launches: int


def time_ratio(over: Sequence[Rounds], under: Sequence[Rounds], foreign: Sequence[ForeignCores] = ()) -> TimeRatio:
    """Divide `over` by `under`, round by round; each argument holds one sequence per launch."""
    launches = [[a / b for a, b in zip(*each, strict=True)] for each in zip(over, under, strict=True)]
    foreign = foreign or [[None] * len(rounds) for rounds in over]
    quiet = [
        [value for value, cores in zip(values, rounds, strict=True) if not is_loaded(cores)]
        for values, rounds in zip(launches, foreign, strict=True)
    ]
    quiet = [values for values in quiet if values]
    return TimeRatio(
        median=bootstrap_median(launches),
        min_ratio=min(min(values) for values in launches),
        ratio_of_minima=min(min(values) for values in over) / min(min(values) for values in under),
        quiet_median=pooled_median(quiet) if quiet else None,
        rounds=sum(len(values) for values in launches),
        loaded_rounds=sum(sum(map(is_loaded, rounds)) for rounds in foreign),
        launches=len(launches),
    )


def time_difference(over: Sequence[Rounds], under: Sequence[Rounds]) -> MedianEstimate:
    """Subtract `under` from `over`, round by round."""
    return bootstrap_median([[a - b for a, b in zip(*each, strict=True)] for each in zip(over, under, strict=True)])


def pooled_median(launches: Sequence[Rounds]) -> float:
    """Return the median of the launches' medians."""
    return median(median(rounds) for rounds in launches)


def bootstrap_median(launches: Sequence[Rounds], *, seed: int = 0) -> MedianEstimate:
    """Return the pooled median and its percentile bootstrap interval (Efron and Tibshirani 1993, chapter 13).

    Launches are resampled first, then the rounds within each (Davison and Hinkley 1997, section 3.8), which
    scipy.stats.bootstrap cannot do. With one launch the interval does not cover the variation between launches.
    """
    import numpy

    draw = random.Random(seed).choices
    medians = [
        median(median(draw(rounds, k=len(rounds))) for rounds in draw(launches, k=len(launches)))
        for _ in range(RESAMPLES)
    ]
    low, high = numpy.quantile(medians, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return MedianEstimate(pooled_median(launches), float(low), float(high))


@dataclass(frozen=True)
class MedianInterval(MedianEstimate):
    """A median over launches with its 95% interval, or the range of the values if there are too few launches.

    `comparisons` intervals hold simultaneously with 95% confidence (Bonferroni).
    """

    launches: int
    comparisons: int = 1

    @property
    def has_enough_launches(self) -> bool:
        return self.launches >= min_launches(self.comparisons)

    def excludes(self, value: float) -> bool:
        """Return True if the interval is based on enough launches and does not contain the value."""
        return self.has_enough_launches and not self.low <= value <= self.high

    def inverse(self) -> MedianInterval:
        """Return the interval of the inverse ratio."""
        return MedianInterval(1 / self.value, 1 / self.high, 1 / self.low, self.launches, self.comparisons)


def min_launches(comparisons: int = 1) -> int:
    """Return how many launches an interval needs: the range of n values misses the median with probability 2 / 2**n.

    A bootstrap interval cannot exceed that range: with 5 launches it would cover 1 - 2 / 2**5 = 94% at most.
    """
    return math.ceil(1 + math.log2(comparisons / (1 - LEVEL)))


MIN_LAUNCHES = min_launches()


def median_interval(values: Sequence[float], *, comparisons: int = 1, seed: int = 0) -> MedianInterval:
    """Return the median of one value per launch, with a percentile bootstrap interval over launches.

    The percentiles are expanded for small samples as Hesterberg does for means (The American Statistician 69(4),
    2015, section 5.3).
    """
    count = len(values)
    if count < min_launches(comparisons):
        return MedianInterval(median(values), min(values), max(values), count, comparisons)
    import numpy
    from scipy import stats

    t = stats.t.ppf(1 - (1 - LEVEL) / 2 / comparisons, count - 1) * math.sqrt(count / (count - 1))
    level = 1 - 2 * NormalDist().cdf(-t)
    found = stats.bootstrap(
        (values,), numpy.median, n_resamples=PAIRED_RESAMPLES, confidence_level=level, method="percentile", rng=seed
    ).confidence_interval
    return MedianInterval(median(values), float(found.low), float(found.high), count, comparisons)


@dataclass(frozen=True)
class MachineNoise:
    """Noise of the machine during a benchmark.

    `foreign_cores` is the CPU use of other processes in the median round, None if unknown. `spread` is the
    interquartile range of the baseline's samples over their median, the median over launches.
    """

    rounds: int
    loaded_rounds: int
    foreign_cores: float | None
    spread: float

    @property
    def is_noisy(self) -> bool:
        return self.loaded_rounds > NOISY_ROUNDS * self.rounds or self.spread > NOISY_SPREAD

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_noisy": self.is_noisy, "summary": str(self)}

    def __str__(self) -> str:
        foreign = "unknown" if self.foreign_cores is None else f"{self.foreign_cores:.2f} cores"
        verdict = "NOISY: repeat on a quiet machine before relying on this" if self.is_noisy else "quiet"
        return (
            f"{verdict} (CPU use of other processes {foreign} in the median round, {self.loaded_rounds} of "
            f"{self.rounds} rounds above {LOADED_CORES:g} cores; interquartile range of the baseline {self.spread:.1%})"
        )


def machine_noise(foreign: Sequence[ForeignCores], baseline: Sequence[Rounds]) -> MachineNoise:
    """Summarize the foreign CPU use of every round and the spread of the baseline's samples."""
    from scipy.stats import iqr

    flat = [value for rounds in foreign for value in rounds]
    known = [value for value in flat if value is not None]
    return MachineNoise(
        rounds=len(flat),
        loaded_rounds=sum(map(is_loaded, flat)),
        foreign_cores=median(known) if known else None,
        spread=median(float(iqr(rounds)) / median(rounds) for rounds in baseline),
    )


def is_loaded(cores: float | None) -> bool:
    """Return True if other processes used more than LOADED_CORES."""
    return cores is not None and cores > LOADED_CORES


def foreign_cores(ranks: Sequence[CpuUse]) -> float | None:
    """Return how many cores other programs used, from the readings of all ranks of one host in the same window.

    The system counts in ticks of 10 ms: windows well below a second are imprecise.
    """
    first = ranks[0]
    if first.machine_s is None or first.window_s <= 0:
        return None
    return max(0.0, first.machine_s - sum(rank.own_s for rank in ranks)) / first.window_s


def max_foreign_cores(uses: Sequence[tuple[int, CpuUse]]) -> float | None:
    """Return the foreign CPU use of the most loaded node, from (node rank, CPU use) of every rank."""
    nodes = {node for node, _ in uses}
    found = [foreign_cores([use for node, use in uses if node == chosen]) for chosen in nodes]
    return max((cores for cores in found if cores is not None), default=None)
