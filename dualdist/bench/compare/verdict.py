"""Which contender is the fastest, in one sentence with its confidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from dualdist.bench.compare.equivalence import Equivalence
from dualdist.bench.compare.launches import Launch
from dualdist.bench.paired import LEAST_LAUNCHES, MedianInterval, least_launches, ratio_of
from dualdist.rendezvous.saved_choice import ChoiceConditions, SavedChoice

Kind = Literal["faster", "no difference", "too few", "alone", "invalid", "nothing"]


@dataclass(frozen=True)
class Verdict:
    """`ratio` is the runner-up's step time over the winner's; both names are those of the contenders, or None."""

    kind: Kind
    sentence: str
    winner: str | None = None
    runner_up: str | None = None
    ratio: MedianInterval | None = None


def ranking(launches: Mapping[str, Sequence[Launch]]) -> list[str]:
    """The names, the fastest first: by the median over rounds of the step over that of the round's median contender.

    Rounds that some lack count for the others; what did not run is left out.
    """
    rounds = sorted({launch.round for found in launches.values() for launch in found})
    shares: dict[str, list[float]] = {name: [] for name, found in launches.items() if found}
    for number in rounds:
        here = {name: each.step_s for name, found in launches.items() for each in found if each.round == number}
        for name, seconds in here.items():
            shares[name].append(seconds / median(here.values()))
    return sorted(shares, key=lambda name: median(shares[name]))


def pairs(one: Sequence[Launch], other: Sequence[Launch]) -> tuple[list[Launch], list[Launch]]:
    """The launches of rounds in which both ran."""
    theirs = {launch.round: launch for launch in other}
    both = [launch for launch in one if launch.round in theirs]
    return both, [theirs[launch.round] for launch in both]


def step_ratio(over: Sequence[Launch], under: Sequence[Launch], *, among: int = 1) -> MedianInterval | None:
    """The step time of one contender over that of another; None where no round had both."""
    first, second = pairs(over, under)
    if not first:
        return None
    return ratio_of([each.step_s for each in first], [each.step_s for each in second], among=among)


def verdict(launches: Mapping[str, Sequence[Launch]], same: Equivalence) -> Verdict:
    """The sentence about contenders, by the names that it shall use; of those not launched yet the list is empty."""
    if not same.is_valid:
        return Verdict("invalid", f"INVALID: the contenders did not train the same model: {same}")
    order = ranking(launches)
    if not order:
        return Verdict("nothing", "nothing was measured")
    if len(order) == 1 and len(launches) > 1:
        told = f"no verdict: of {len(launches)} contenders {order[0]} alone was launched, so give more time"
        return Verdict("too few", told, order[0])
    if len(order) == 1:
        return Verdict("alone", f"{order[0]} is the only contender that ran here", order[0])
    winner, runner_up = order[:2]
    ratio = step_ratio(launches[runner_up], launches[winner])
    if ratio is None:
        return Verdict("too few", f"no round had both {winner} and {runner_up}: give more time", winner, runner_up)
    if ratio.value < 1:  # a tie, by the rounds that both took part in
        winner, runner_up, ratio = runner_up, winner, _inverse(ratio)
    return Verdict(*_said(winner, runner_up, ratio), winner, runner_up, ratio)


def _said(one: str, other: str, ratio: MedianInterval) -> tuple[Kind, str]:
    digits = 3 if ratio.value < 1.1 else 2
    value, low, high = (f"{each:.{digits}f}" for each in (ratio.value, ratio.low, ratio.high))
    if not ratio.is_sound:
        return "too few", (
            f"{runs(ratio.launches)} {'is' if ratio.launches == 1 else 'are'} too few to tell {one} from {other} "
            f"(ratio {value}, seen {low} to {high}): a verdict needs {LEAST_LAUNCHES} of each, so give more time"
        )
    interval = f"95% interval {low} to {high}, {ratio.launches} runs each"
    if ratio.differs_from(1.0) and ratio.value > 1:
        return "faster", f"{one} is {value}x faster than {other} ({interval})"
    return "no difference", (
        f"no difference that {runs(ratio.launches)} can show between {one} and {other} (ratio {value}, {interval})"
    )


def against(winner: str, launches: Mapping[str, Sequence[Launch]]) -> dict[str, str]:
    """A sentence on the winner and each other with launches enough; every interval holds for its own pair alone."""
    found = {}
    for other in launches:
        ratio = step_ratio(launches[other], launches[winner]) if other != winner else None
        if ratio is not None and ratio.is_sound:
            low_first = (winner, other, ratio) if ratio.value >= 1 else (other, winner, _inverse(ratio))
            found[other] = _said(*low_first)[1]
    return found


def _inverse(ratio: MedianInterval) -> MedianInterval:
    return MedianInterval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.launches, ratio.among)


def runs(count: int) -> str:
    return f"{count} run" + ("" if count == 1 else "s")


Launches = Mapping[str, Sequence[Launch]]


def chosen(contenders: Launches, at: str) -> Iterator[SavedChoice | str]:
    """The fastest contender, by label, of every launcher that started two or more; or a sentence why there is none.

    auto cannot change the launcher, so contenders of different ones are no choice. Somebody must be slower for sure.
    """
    for conditions, found in _by_conditions(contenders).items():
        if len(found) < 2:
            yield f"nothing saved for {conditions}: {next(iter(found))} was the only one that it started"
            continue
        first, *others = ranking(found)
        pairs = len(found) * (len(found) - 1) // 2  # the first is looked for, and any of them may come out as that
        ratios = {other: step_ratio(found[other], found[first], among=pairs) for other in others}
        slower = {other: each for other, each in ratios.items() if each and each.value > 1 and each.differs_from(1.0)}
        if not slower and not any(each and each.is_sound for each in ratios.values()):
            yield f"nothing saved for {conditions}: {len(found)} contenders need {least_launches(pairs)} runs of each"
            continue
        if not slower:
            yield f"nothing saved for {conditions}: no difference that these runs can show"
            continue
        why = ", ".join(f"{each.value:.2f}x faster than {other}" for other, each in slower.items())
        place = found[first][0].first
        yield SavedChoice(conditions, place.backend, place.transport, at, why)


def _by_conditions(contenders: Launches) -> dict[ChoiceConditions, Launches]:
    groups: dict[ChoiceConditions, dict[str, Sequence[Launch]]] = {}
    for label, found in contenders.items():
        first = found[0].first
        here = ChoiceConditions.here(first.device, first.launcher, first.ranks, threads=first.threads, mpi=first.mpi)
        groups.setdefault(here, {})[label] = found
    return dict(groups)
