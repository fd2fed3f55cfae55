"""Whether all contenders trained the same model: the loss of every step and the parameters they ended with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dualdist.bench.compare.launches import Launch

# Above two ranks, and on GPUs, a sum depends on its order. Losses then differ by rounding, of which training makes
# more: ResNet-18 on four ranks up to 163 times more from one step to the next (8.6e-8 of the second loss, 6e-2 of the
# fortieth), the MLP hardly any. What is wrong differs at once: with 1% more learning rate the second loss is 1e-5 off
# in both. So the first two losses may be some units in the last place apart, and each later one GROWTH times as much
# as any before it.
ROUNDINGS, GROWTH = 16, 1024
# Instead of units for programs that round in their own way, as under autocast, and GPUs (TF32). Where losses are
# further apart rounding has taken over.
LOSS_TOLERANCE = 1e-3
# How far apart parameters (a sample of them) may end, by how far training moved them. Who never steps is 1 apart;
# dividing by the ranks once too often is 0.5 and more.
MOVEMENT_TOLERANCE = 0.4
EXACT = "to the bit"


@dataclass(frozen=True)
class Equivalence:
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


def sameness(launches: Mapping[str, Sequence[Launch]]) -> Equivalence:
    """Judge the launches of contenders, by their names. Two ranks on CPUs add up in one way only, so they must agree
    to the bit; the model that most launches agree on is taken for the right one.
    """
    every = [launch for found in launches.values() for launch in found]
    if not every:
        return Equivalence(EXACT, 0, 0, {})
    is_exact = all(len(launch.ranks) <= 2 and launch.first.device == "cpu" for launch in every)
    common, _ = Counter(_trained(launch) for launch in every).most_common(1)[0]
    right = next(launch for launch in every if _trained(launch) == common)
    differing: dict[str, str] = {}
    for name, found in launches.items():
        for launch in found:
            why = _differs(launch, right, is_exact)
            if why is not None:
                differing.setdefault(name, why)
    how = EXACT if is_exact else _how(right, max(max(_apart(launch, right), default=0.0) for launch in every))
    return Equivalence(how, len(every), len(right.losses), differing)


def _how(right: Launch, worst: float) -> str:
    """What was asked for above two ranks, where losses were `worst` apart."""
    losses = f"losses but for rounding and what training makes of it, {worst:.0e} at most"
    if _can_be_told(right, worst):
        return f"{losses}, parameters within {MOVEMENT_TOLERANCE:g} of how far training moved them"
    has_grown = worst > LOSS_TOLERANCE
    why = "rounding has grown too far" if has_grown else "training moved them hardly more than rounding does"
    return f"{losses}; of the parameters it cannot be told, as {why}"


def _trained(launch: Launch) -> tuple[str, tuple[str, ...]]:
    return launch.first.digest, tuple(map(str, launch.losses))  # by their words, as NaN is not equal to itself


def _differs(launch: Launch, right: Launch, is_exact: bool) -> str | None:
    """How the launch's training differs from the right one."""
    if len({rank.digest for rank in launch.ranks}) > 1:
        return "ended with different parameters on different ranks"
    if len(launch.losses) != len(right.losses):
        return f"took {len(launch.losses)} steps, others {len(right.losses)}"
    unit, worst = 0.0 if is_exact else _unit(right), 0.0 if is_exact else right.first.rounding
    for step, apart in enumerate(_apart(launch, right), 1):
        if apart > (unit if step <= 2 else max(unit, GROWTH * worst)):
            found, expected = _shown(launch.losses[step - 1]), _shown(right.losses[step - 1])
            return f"had another loss at step {step} ({found}, others {expected})"
        worst = max(worst, apart)
    if is_exact:
        return None if launch.first.digest == right.first.digest else "ended with other parameters"
    apart = distance(launch.first.sample, right.first.sample)
    if worst > LOSS_TOLERANCE or apart <= _allowed(right):
        return None
    return f"ended with parameters {apart:.1e} from those of others, which training moved by {_moved(right):.1e}"


def _unit(right: Launch) -> float:
    """How far apart the first two losses may be, by their size. A launch of a model of ours knows its batch."""
    is_plain = right.first.device == "cpu" and right.batch is not None
    return ROUNDINGS * right.first.rounding if is_plain else LOSS_TOLERANCE


def _apart(launch: Launch, right: Launch) -> list[float]:
    """How far the losses are from the right ones, by their size; infinite where only one is a number."""
    return [_distance_of(*each) for each in zip(launch.losses, right.losses, strict=False)]


def _distance_of(found: float | None, expected: float | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    if _is_same(found, expected):
        return 0.0
    apart = abs(found - expected) / max(abs(found), abs(expected))
    return math.inf if math.isnan(apart) else apart


def _moved(right: Launch) -> float:
    """How far training moved the parameters that it did not lose to infinity."""
    both = [each for each in zip(right.first.start, right.first.sample, strict=False) if math.isfinite(each[1])]
    return distance([start for start, _ in both], [end for _, end in both])


def _allowed(right: Launch) -> float:
    """How far from the right parameters others may end: every step rounds them once more, at random."""
    size = math.hypot(*filter(math.isfinite, right.first.sample))
    return max(MOVEMENT_TOLERANCE * _moved(right), right.first.rounding * size * math.sqrt(len(right.losses)))


def _can_be_told(right: Launch, worst: float) -> bool:
    """One that never steps, or half as far, would be found out."""
    return worst <= LOSS_TOLERANCE and _allowed(right) < _moved(right) / 2


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
