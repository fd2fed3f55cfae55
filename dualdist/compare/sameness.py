"""Whether all contenders trained the same model: the loss of every step and the parameters they ended with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dualdist.compare.launches import Launch

# Where an order of addition may differ: how far a loss may be from another, and how far apart parameters (a sample of
# them) may lie, each by its size. Rounding of float32 is 6e-8, and grows with the steps.
LOSS_TOLERANCE, PARAMETER_TOLERANCE = 1e-3, 1e-3
EXACT = "to the bit"
WITHIN = f"losses within {LOSS_TOLERANCE:g}, parameters within {PARAMETER_TOLERANCE:g} of their size"


@dataclass(frozen=True)
class Sameness:
    """`differing` says of each contender that trained another model how it did. `how` is what was asked for."""

    how: str
    launches: int
    steps: int
    differing: Mapping[str, str]

    @property
    def is_valid(self) -> bool:
        return not self.differing

    def __str__(self) -> str:
        if self.is_valid:
            return f"the losses of {self.steps} steps and the parameters agree in {self.launches} launches: {self.how}"
        return "; ".join(f"{name} {why}" for name, why in self.differing.items())


def sameness(launches: Mapping[str, Sequence[Launch]]) -> Sameness:
    """Judge the launches of contenders, by their names. Two ranks on CPUs add up in one way only, so they must agree
    to the bit; the model that most launches agree on is taken for the right one.
    """
    every = [launch for found in launches.values() for launch in found]
    if not every:
        return Sameness(EXACT, 0, 0, {})
    is_exact = all(len(launch.ranks) <= 2 and launch.first.device == "cpu" for launch in every)
    common, _ = Counter(_trained(launch) for launch in every).most_common(1)[0]
    right = next(launch for launch in every if _trained(launch) == common)
    differing: dict[str, str] = {}
    for name, found in launches.items():
        for launch in found:
            why = _differs(launch, right, is_exact)
            if why is not None:
                differing.setdefault(name, why)
    return Sameness(EXACT if is_exact else WITHIN, len(every), len(right.losses), differing)


def _trained(launch: Launch) -> tuple[str, tuple[float | None, ...]]:
    return launch.first.digest, tuple(launch.losses)


def _differs(launch: Launch, right: Launch, is_exact: bool) -> str | None:
    """How the launch's training differs from the right one."""
    if len({rank.digest for rank in launch.ranks}) > 1:
        return "ended with different parameters on different ranks"
    if len(launch.losses) != len(right.losses):
        return f"took {len(launch.losses)} steps, others {len(right.losses)}"
    for number, (found, expected) in enumerate(zip(launch.losses, right.losses, strict=True), 1):
        if not _agree(found, expected, is_exact):
            return f"had another loss at step {number} ({_shown(found)}, others {_shown(expected)})"
    if is_exact:
        return None if launch.first.digest == right.first.digest else "ended with other parameters"
    apart = distance(launch.first.sample, right.first.sample)
    return None if apart <= PARAMETER_TOLERANCE else f"ended with parameters that are {apart:.1e} of their size apart"


def _agree(found: float | None, expected: float | None, is_exact: bool) -> bool:
    if found is None or expected is None:
        return found is expected
    if math.isnan(found) or math.isnan(expected):
        return math.isnan(found) and math.isnan(expected)
    return found == expected if is_exact else math.isclose(found, expected, rel_tol=LOSS_TOLERANCE)


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """|found - expected| / |expected|, infinite where they cannot be held against each other."""
    if len(found) != len(expected):
        return math.inf
    apart = math.dist(found, expected)
    return apart / size if (size := math.hypot(*expected)) else apart


def _shown(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.9g}"
