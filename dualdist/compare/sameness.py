"""Whether all contenders trained the same model: the loss of every step and the parameters they ended with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dualdist.compare.launches import Launch

# Where an order of addition may differ: how far a loss may be from another, by its size, and how far apart parameters
# (a sample of them) may end, by how far training moved them. Four ranks that added up in other orders, float32 on a
# CPU, were 2e-6 of it apart after 103 steps of the MLP here, but 0.08 after 13 of ResNet-18, whose batch norms make
# much of little. Who never steps is 1 apart; dividing by the ranks once too often is 0.5 and more.
LOSS_TOLERANCE, MOVEMENT_TOLERANCE = 1e-3, 0.4
EXACT = "to the bit"
LOSSES = f"losses within {LOSS_TOLERANCE:g}"
WITHIN = f"{LOSSES}, parameters within {MOVEMENT_TOLERANCE:g} of how far training moved them"
UNTOLD = f"{LOSSES}; of the parameters it cannot be told, as training moved them hardly more than rounding does"


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
    how = EXACT if is_exact else WITHIN if _can_be_told(right) else UNTOLD
    return Sameness(how, len(every), len(right.losses), differing)


def _trained(launch: Launch) -> tuple[str, tuple[str, ...]]:
    return launch.first.digest, tuple(map(str, launch.losses))  # by their words, as NaN is not equal to itself


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
    if apart <= _allowed(right):
        return None
    return f"ended with parameters {apart:.1e} from those of others, which training moved by {_moved(right):.1e}"


def _moved(right: Launch) -> float:
    """How far training moved the parameters that it did not lose to infinity."""
    both = [each for each in zip(right.first.start, right.first.sample, strict=False) if math.isfinite(each[1])]
    return distance([start for start, _ in both], [end for _, end in both])


def _allowed(right: Launch) -> float:
    """How far from the right parameters others may end: every step rounds them once more, at random."""
    size = math.hypot(*filter(math.isfinite, right.first.sample))
    return max(MOVEMENT_TOLERANCE * _moved(right), right.first.rounding * size * math.sqrt(len(right.losses)))


def _can_be_told(right: Launch) -> bool:
    """One that never steps, or half as far, would be found out."""
    return _allowed(right) < _moved(right) / 2


def _agree(found: float | None, expected: float | None, is_exact: bool) -> bool:
    if found is None or expected is None:
        return found is expected
    return _is_same(found, expected) or (not is_exact and math.isclose(found, expected, rel_tol=LOSS_TOLERANCE))


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """|found - expected|, infinite where they cannot be held against each other."""
    if len(found) != len(expected):
        return math.inf
    pairs = zip(found, expected, strict=True)
    return math.hypot(*(one - other for one, other in pairs if not _is_same(one, other)))


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _shown(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.9g}"
