"""Round-by-round ratios of interleaved timings, pooled over launches, with what they are worth."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

Rounds = Sequence[float]  # one value a round, of one launch

RESAMPLES = 2000
LEVEL = 0.95
# Foreign CPU, in cores, from which a round counts as loaded: a tenth of a core moves a step of two ranks on two cores.
LOADED_CORES = 0.1
# A machine is noisy where more than this part of the rounds was loaded, or where the reference's own timings spread
# (quartile to quartile, over the median) by more than that.
NOISY_ROUNDS = 0.25
NOISY_SPREAD = 0.1


@dataclass(frozen=True)
class MedianEstimate:
    """A median over rounds and launches, and the 95% interval that a bootstrap gives it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class TimeRatio:
    """How long one contender takes over another: below 1 it is the faster one.

    `minimum` is the least ratio of a round; `best` is the ratio of the two least timings of all; `quiet` is the median
    over the rounds that were not loaded, None where all were.
    """

    median: MedianEstimate
    minimum: float
    best: float
    quiet: float | None
    rounds: int
    loaded: int
    launches: int


def ratio(over: Sequence[Rounds], under: Sequence[Rounds], loaded: Sequence[Sequence[bool]] | None = None) -> TimeRatio:
    """over / under, round by round. Each argument has one sequence a launch, and these one value a round."""
    loaded = loaded or [[False] * len(rounds) for rounds in over]
    launches = [divided(a, b) for a, b in zip(over, under, strict=True)]
    quiet = [
        [value for value, marked in zip(values, marks, strict=True) if not marked]
        for values, marks in zip(launches, loaded, strict=True)
    ]
    left = [values for values in quiet if values]
    return TimeRatio(
        median=estimate(launches),
        minimum=min(min(values) for values in launches),
        best=min(min(values) for values in over) / min(min(values) for values in under),
        quiet=pooled(left) if left else None,
        rounds=sum(len(values) for values in launches),
        loaded=sum(sum(marks) for marks in loaded),
        launches=len(launches),
    )


def divided(over: Rounds, under: Rounds) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def subtracted(minuend: Rounds, subtrahend: Rounds) -> list[float]:
    return [a - b for a, b in zip(minuend, subtrahend, strict=True)]


def pooled(launches: Sequence[Rounds]) -> float:
    """The median of the launches' medians: one launch moves as a whole, by where its memory happens to lie."""
    return median(median(rounds) for rounds in launches)


def estimate(launches: Sequence[Rounds], *, seed: int = 0) -> MedianEstimate:
    """The pooled median and its percentile bootstrap interval (Efron and Tibshirani 1993, chapter 13).

    Launches are drawn first, then rounds inside them, as a launch's rounds are not independent of each other (Davison
    and Hinkley 1997, section 3.8). With one launch the interval knows nothing of how launches differ.
    """
    draw = random.Random(seed).choices
    centres = sorted(
        median(median(draw(rounds, k=len(rounds))) for rounds in draw(launches, k=len(launches)))
        for _ in range(RESAMPLES)
    )
    edge = (1 - LEVEL) / 2
    return MedianEstimate(pooled(launches), quantile(centres, edge), quantile(centres, 1 - edge))


def quantile(ordered: Sequence[float], part: float) -> float:
    """The quantile of ordered values, by linear interpolation (Hyndman and Fan 1996, type 7)."""
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(values: Rounds) -> float:
    """From quartile to quartile, over the median."""
    ordered = sorted(values)
    return (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / median(ordered)


@dataclass(frozen=True)
class MachineNoise:
    """How quiet the machine was while something was measured; `foreign_cores` is None where the system tells nothing.

    `spread` is that of the reference's timings, the median over launches.
    """

    rounds: int
    loaded: int
    foreign_cores: float | None
    spread: float

    @property
    def is_noisy(self) -> bool:
        return self.loaded > NOISY_ROUNDS * self.rounds or self.spread > NOISY_SPREAD

    def __str__(self) -> str:
        foreign = "unknown" if self.foreign_cores is None else f"{self.foreign_cores:.2f} cores"
        judged = "NOISY: measure again on a quiet machine before believing this" if self.is_noisy else "quiet"
        return (
            f"{judged} (foreign CPU {foreign} in the median round, {self.loaded} of {self.rounds} rounds above "
            f"{LOADED_CORES:g} cores and marked as loaded; the reference spreads by {self.spread:.1%})"
        )


def noise(foreign: Sequence[Sequence[float | None]], reference: Sequence[Rounds]) -> MachineNoise:
    """What the foreign load of every round, and the spread of what the others are held against, say of the machine."""
    flat = [value for rounds in foreign for value in rounds]
    known = [value for value in flat if value is not None]
    return MachineNoise(
        rounds=len(flat),
        loaded=sum(is_loaded(value) for value in flat),
        foreign_cores=median(known) if known else None,
        spread=median(spread(rounds) for rounds in reference),
    )


def is_loaded(foreign_cores: float | None) -> bool:
    return foreign_cores is not None and foreign_cores > LOADED_CORES


def least_squares(
    first: Sequence[float], second: Sequence[float], target: Sequence[float], weight: Callable[[float], float]
) -> tuple[float, float]:
    """a and b for which a * first + b * second is nearest to the target, each square weighted by weight(target)."""
    w = [weight(value) for value in target]
    xx = sum(k * x * x for k, x in zip(w, first, strict=True))
    yy = sum(k * y * y for k, y in zip(w, second, strict=True))
    xy = sum(k * x * y for k, x, y in zip(w, first, second, strict=True))
    xt = sum(k * x * t for k, x, t in zip(w, first, target, strict=True))
    yt = sum(k * y * t for k, y, t in zip(w, second, target, strict=True))
    determinant = xx * yy - xy * xy
    return (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
