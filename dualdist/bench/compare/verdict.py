"""Verdict of a comparison: did all contenders train the same model, and which candidate is the fastest."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from dualdist.bench.compare.launches import Launch, RankRecord
from dualdist.bench.statistics import MIN_LAUNCHES, MedianInterval, median_interval, min_launches
from dualdist.utils.saved_choices import ChoiceConditions, SavedChoice

Launches = Mapping[str, Sequence[Launch]]  # the launches of each contender, by its label

# Note [equivalent training]
# With more than two ranks, and on GPUs, a sum depends on its order. Losses then differ by rounding, which training
# amplifies: ResNet-18 on four ranks up to 163 times from one step to the next (8.6e-8 of the second loss, 6e-2 of the
# fortieth), the MLP hardly at all. A wrong reduction shows at once: with 1% more learning rate the second loss differs
# by 1e-5 in both. So the first two losses may differ by ROUNDINGS units in the last place, and each later one by GROWTH
# times the largest difference before it. Programs that round differently (autocast, TF32) get LOSS_TOLERANCE instead
# of units; above it rounding dominates, and parameters are not compared. MOVEMENT_TOLERANCE limits the distance between
# final parameters (a sample of them), relative to how far training moved them: a contender that never steps is 1 away,
# one that divides by the number of ranks twice 0.5 or more. Smaller faults show on CPUs only, in launches with
# reduction="ordered": these must end with the same bits.
ROUNDINGS, GROWTH = 16, 1024
LOSS_TOLERANCE = 1e-3
MOVEMENT_TOLERANCE = 0.4
BIT_IDENTICAL = "bit-identical"
SEPARATELY = "ordered sums, checked in separate launches"


@dataclass(frozen=True)
class Equivalence:
    """Result of the check that all contenders trained the same model; `mismatches` says how one differs.

    From three CPU ranks on, `same_bits` are those that gave the same bits with ordered sums, in separate launches,
    and `unchecked` says why others were not compared to the bit.
    """

    criterion: str
    launches: int
    steps: int
    mismatches: Mapping[str, str]
    same_bits: Sequence[str] = ()
    unchecked: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_valid(self) -> bool:
        return not self.mismatches

    def __str__(self) -> str:
        found = [f"{name} {why}" for name, why in self.mismatches.items()]
        if self.is_valid:
            found = [f"losses of {self.steps} steps and parameters agree in {self.launches} launches: {self.criterion}"]
        if self.same_bits:
            found.append(f"to the bit ({SEPARATELY}): {', '.join(self.same_bits)}")
        for reason in dict.fromkeys(self.unchecked.values()):
            names = ", ".join(name for name, why in self.unchecked.items() if why == reason)
            found.append(f"not checked to the bit: {names} ({reason})")
        return "; ".join(found)


def check_equivalence(launches: Launches) -> Equivalence:
    """Compare losses and parameters of all launches with the result that most launches agree on.

    Two ranks on CPUs can sum in one order only, so they must be bit-identical; see Note [equivalent training].
    """
    every = [launch for found in launches.values() for launch in found]
    if not every:
        return Equivalence(BIT_IDENTICAL, 0, 0, {})
    is_exact = all(len(launch.ranks) <= 2 and launch.first.device == "cpu" for launch in every)
    common, _ = Counter(map(_outcome, every)).most_common(1)[0]
    expected = next(launch for launch in every if _outcome(launch) == common)
    mismatches = {}
    for name, found in launches.items():
        reasons = (_mismatch(launch, expected, is_exact) for launch in found)
        if (first := next(filter(None, reasons), None)) is not None:
            mismatches[name] = first
    worst = max(max(_loss_differences(launch, expected), default=0.0) for launch in every)
    criterion = BIT_IDENTICAL if is_exact else _criterion(expected, worst)
    return Equivalence(criterion, len(every), len(expected.losses), mismatches)


def check_bits(equivalence: Equivalence, ordered: Mapping[str, Launch | str]) -> Equivalence:
    """Add the comparison of the launches with ordered sums, by contender; a text says why there is none."""
    unchecked = {name: each for name, each in ordered.items() if isinstance(each, str)}
    launches = {name: each for name, each in ordered.items() if not isinstance(each, str)}
    asking = [name for name, each in launches.items() if each.first.reduction == "unordered"]
    unchecked |= dict.fromkeys(asking, "the program asks for unordered sums itself")
    digests = {name: {rank.digest for rank in each.ranks} for name, each in launches.items() if name not in asking}
    if len(digests) < 2:
        unchecked |= dict.fromkeys(digests, "there is no other to compare it with")
        return replace(equivalence, unchecked=unchecked)
    common = Counter(digest for found in digests.values() for digest in found).most_common(1)[0][0]
    same = [name for name, found in digests.items() if found == {common}]
    fault = f"ended with other bits than {same[0] if same else 'others'} with ordered sums, which is a fault"
    mismatches = {name: fault for name in digests if name not in same} | dict(equivalence.mismatches)
    same_bits = same if len(same) > 1 else []
    return replace(equivalence, mismatches=mismatches, same_bits=same_bits, unchecked=unchecked)


def _criterion(expected: Launch, worst: float) -> str:
    losses = f"losses up to rounding and its growth in training, {worst:.0e} at most"
    # A contender that never steps, or half as far, must be detectable.
    if worst <= LOSS_TOLERANCE and _allowed_distance(expected) < _movement(expected) / 2:
        return f"{losses}, parameters within {MOVEMENT_TOLERANCE:g} of how far training moved them"
    has_grown = worst > LOSS_TOLERANCE
    why = "rounding has grown too far" if has_grown else "training moved them hardly more than rounding does"
    return f"{losses}; parameters not comparable, as {why}"


def _outcome(launch: Launch) -> tuple[str, tuple[str, ...]]:
    return launch.first.digest, tuple(map(str, launch.losses))  # compared as text, since NaN does not equal itself


def _mismatch(launch: Launch, expected: Launch, is_exact: bool) -> str | None:
    """Return how the launch's training differs from the expected one, None if it does not."""
    if len({rank.digest for rank in launch.ranks}) > 1:
        return "ended with different parameters on different ranks"
    if len(launch.losses) != len(expected.losses):
        return f"took {len(launch.losses)} steps, others {len(expected.losses)}"
    is_ours = expected.first.device == "cpu" and expected.batch is not None  # a script's batch is unknown
    unit = ROUNDINGS * expected.first.rounding if is_ours else LOSS_TOLERANCE
    unit, worst = (0.0, 0.0) if is_exact else (unit, expected.first.rounding)
    for step, difference in enumerate(_loss_differences(launch, expected), 1):
        if difference > (unit if step <= 2 else max(unit, GROWTH * worst)):
            losses = (launch.losses[step - 1], expected.losses[step - 1])
            one, others = ("none" if loss is None else f"{loss:.9g}" for loss in losses)
            return f"had a different loss at step {step} ({one}, others {others})"
        worst = max(worst, difference)
    if is_exact:
        return None if launch.first.digest == expected.first.digest else "ended with different parameters"
    apart = distance(launch.first.sample, expected.first.sample)
    if worst > LOSS_TOLERANCE or apart <= _allowed_distance(expected):
        return None
    return f"ended with parameters {apart:.1e} from those of others, which training moved by {_movement(expected):.1e}"


def _loss_differences(launch: Launch, expected: Launch) -> list[float]:
    return [relative_difference(*each) for each in zip(launch.losses, expected.losses, strict=False)]


def relative_difference(one: float | None, other: float | None) -> float:
    """Return the relative difference, infinite if only one is a number."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if _is_same(one, other):
        return 0.0
    relative = abs(one - other) / max(abs(one), abs(other))
    return math.inf if math.isnan(relative) else relative


def _movement(launch: Launch) -> float:
    """Return how far training moved the parameters that stayed finite."""
    both = [each for each in zip(launch.first.start, launch.first.sample, strict=False) if math.isfinite(each[1])]
    return distance([start for start, _ in both], [end for _, end in both])


def _allowed_distance(expected: Launch) -> float:
    """Return the allowed distance between final parameters; every step rounds them once more, at random."""
    size = math.hypot(*filter(math.isfinite, expected.first.sample))
    rounding = expected.first.rounding * size * math.sqrt(len(expected.losses))
    return max(MOVEMENT_TOLERANCE * _movement(expected), rounding)


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the Euclidean distance, infinite for different lengths; equal infinities and NaNs count as equal."""
    if len(one) != len(other):
        return math.inf
    return math.hypot(*(a - b for a, b in zip(one, other, strict=True) if not _is_same(a, b)))


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


Kind = Literal["faster", "no difference", "too few", "alone", "invalid", "nothing"]
HEADLINES: Mapping[Kind, str] = {
    "no difference": "No clear winner",
    "too few": "No verdict yet",
    "alone": "Only one candidate",
    "invalid": "Not the same training",
    "nothing": "Nothing was measured",
}


@dataclass(frozen=True)
class Verdict:
    """Verdict on the candidates; `ratio` is the runner-up's step time over the winner's."""

    kind: Kind
    sentence: str
    winner: str | None = None
    runner_up: str | None = None
    ratio: MedianInterval | None = None

    @property
    def headline(self) -> str:
        """Return the verdict in a few words."""
        if self.kind != "faster" or self.ratio is None:
            return HEADLINES[self.kind]
        return f"{self.winner} is {_digits(self.ratio)[0]}x faster"


def rank_by_speed(launches: Launches) -> list[str]:
    """Return the names, fastest first, by the median over rounds of the step time relative to the round's median.

    A round counts for the contenders that took part in it; names without launches are left out.
    """
    rounds = sorted({launch.round for found in launches.values() for launch in found})
    relative: dict[str, list[float]] = {name: [] for name, found in launches.items() if found}
    for number in rounds:
        here = {name: each.step_s for name, found in launches.items() for each in found if each.round == number}
        for name, seconds in here.items():
            relative[name].append(seconds / median(here.values()))
    return sorted(relative, key=lambda name: median(relative[name]))


def paired_steps(one: Sequence[Launch], other: Sequence[Launch]) -> list[tuple[float, float]]:
    """Return the step times of both in the rounds in which both ran."""
    others = {launch.round: launch.step_s for launch in other}
    return [(launch.step_s, others[launch.round]) for launch in one if launch.round in others]


def step_ratio(over: Sequence[Launch], under: Sequence[Launch], *, comparisons: int = 1) -> MedianInterval | None:
    """Return the ratio of the step times; None if no round has both."""
    logs = [math.log(a / b) for a, b in paired_steps(over, under)]
    if not logs:
        return None
    found = median_interval(logs, comparisons=comparisons)
    return replace(found, value=math.exp(found.value), low=math.exp(found.low), high=math.exp(found.high))


def judge(launches: Launches, equivalence: Equivalence, enough: str = "--budget") -> Verdict:
    """Return the verdict; candidates that were not launched yet have an empty list, and `enough` is what to try."""
    if not equivalence.is_valid:
        return Verdict("invalid", f"INVALID: the contenders did not train the same model: {equivalence}")
    order = rank_by_speed(launches)
    if not order:
        return Verdict("nothing", "no candidate completed a launch")
    if len(order) == 1 and len(launches) > 1:
        sentence = f"no verdict: only {order[0]} of {len(launches)} candidates was launched; try {enough}"
        return Verdict("too few", sentence, order[0])
    if len(order) == 1:
        return Verdict("alone", f"{order[0]} is the only candidate that ran here", order[0])
    winner, runner_up = order[:2]
    ratio = step_ratio(launches[runner_up], launches[winner])
    if ratio is None:
        return Verdict("too few", f"no round has both {winner} and {runner_up}; try {enough}", winner, runner_up)
    if ratio.value < 1:  # the order by all rounds may differ from that in the rounds that both took part in
        winner, runner_up, ratio = runner_up, winner, ratio.inverse()
    kind, sentence = _describe(winner, runner_up, ratio, enough)
    if equivalence.same_bits:
        sentence += f"; {len(equivalence.same_bits)} contenders gave the same bits ({SEPARATELY})"
    return Verdict(kind, sentence, winner, runner_up, ratio)


def _digits(ratio: MedianInterval) -> list[str]:
    digits = 3 if ratio.value < 1.1 else 2
    return [f"{each:.{digits}f}" for each in (ratio.value, ratio.low, ratio.high)]


def _describe(one: str, other: str, ratio: MedianInterval, enough: str) -> tuple[Kind, str]:
    value, low, high = _digits(ratio)
    launches = f"{ratio.launches} launch" + ("" if ratio.launches == 1 else "es")
    if not ratio.has_enough_launches:
        seen = f"ratio {value}" if low == high else f"ratio {value}, observed {low} to {high}"
        return "too few", (
            f"{launches} {'is' if ratio.launches == 1 else 'are'} too few to compare {one} with {other} ({seen}): "
            f"a verdict needs {MIN_LAUNCHES} of each; try {enough}"
        )
    interval = f"95% interval {low} to {high}, {launches} each"
    if ratio.excludes(1.0) and ratio.value > 1:
        return "faster", f"{one} is {value}x faster than {other} ({interval})"
    return "no difference", f"no significant difference between {one} and {other} (ratio {value}, {interval})"


def _conditions(rank: RankRecord, ranks: Sequence[RankRecord]) -> ChoiceConditions:
    return ChoiceConditions(
        rank.processor,
        rank.cores,
        rank.device,
        rank.launcher,
        rank.mpi,
        rank.ranks,
        rank.threads,
        sum(other.node_rank == rank.node_rank for other in ranks),
    )


def choices_to_save(candidates: Launches, timestamp: str) -> Iterator[SavedChoice | str]:
    """Yield the fastest candidate of every launcher that ran two or more, or a sentence why there is none.

    Candidates of different launchers are no choice, as backend="auto" cannot change the launcher. At least one other
    candidate must be slower with 95% confidence; any pair may come first, hence the number of comparisons.
    """
    groups: dict[ChoiceConditions, dict[str, Sequence[Launch]]] = {}
    for label, launches in candidates.items():
        jobs = {_conditions(rank, launches[0].ranks) for rank in launches[0].ranks}
        if len(jobs) > 1:
            yield f"nothing saved of {label}: its hosts differ, {'; '.join(sorted(map(str, jobs)))}"
            continue
        groups.setdefault(jobs.pop(), {})[label] = launches
    for conditions, found in groups.items():
        if len(found) < 2:
            yield f"nothing saved for {conditions}: {next(iter(found))} is its only candidate"
            continue
        fastest, *others = rank_by_speed(found)
        pairs = len(found) * (len(found) - 1) // 2
        ratios = {other: step_ratio(found[other], found[fastest], comparisons=pairs) for other in others}
        slower = {other: each for other, each in ratios.items() if each and each.value > 1 and each.excludes(1.0)}
        if slower:
            why = ", ".join(f"{each.value:.2f}x faster than {other}" for other, each in slower.items())
            rank = found[fastest][0].first
            yield SavedChoice(conditions, rank.backend, rank.transport, timestamp, why)
        elif any(each and each.has_enough_launches for each in ratios.values()):
            yield f"nothing saved for {conditions}: no significant difference"
        else:
            yield f"nothing saved for {conditions}: {len(found)} candidates need {min_launches(pairs)} launches of each"
