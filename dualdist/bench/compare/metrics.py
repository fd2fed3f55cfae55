"""Metrics of a comparison: what the launches of each contender measured, and the result with its verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from dualdist.bench.allreduce import bus_bandwidth
from dualdist.bench.compare.launches import OVER_RANKS, Launch, group_by_contender
from dualdist.bench.compare.runner import NOT_AVERAGED, Contender, RefusedContender
from dualdist.bench.compare.verdict import (
    Equivalence,
    Verdict,
    check_bits,
    check_equivalence,
    judge,
    paired_steps,
    rank_by_speed,
    step_ratio,
)
from dualdist.bench.report import error_summary
from dualdist.bench.statistics import LOADED_CORES, NOISY_ROUNDS, MedianInterval, is_loaded, median_interval

LATENCY_BYTES = 8


@dataclass(frozen=True)
class BandwidthPoint:
    """An allreduce of one size by dualdist and by the raw library: over launches, the median of their medians."""

    nbytes: int
    seconds: MedianInterval
    raw_seconds: MedianInterval
    bus_gb_s: MedianInterval
    raw_bus_gb_s: MedianInterval


@dataclass(frozen=True)
class ContenderMetrics:
    """Metrics of one contender; None for what was not measured or is unknown here."""

    key: str
    label: str
    method: str
    is_candidate: bool
    launcher: str
    backend: str
    transport: str
    device: str
    launches: int
    step_s: MedianInterval
    samples_per_s: MedianInterval | None  # all ranks together; unknown for a script
    samples_per_s_by_rank: list[float] | None
    ratio_to_fastest: MedianInterval | None  # step time over the fastest contender's
    scaling_efficiency: MedianInterval | None  # against one rank with its share of the batch; unknown for a script
    exposed_s: MedianInterval | None  # communication not hidden: the step minus one without communication
    latency_s: float | None  # the time of an allreduce of LATENCY_BYTES
    bus_gb_s: float | None  # the bus bandwidth of the largest allreduce
    bandwidth: list[BandwidthPoint]
    startup_s: float
    init_s: float
    peak_bytes: int | None
    device_peak_bytes: int | None
    tcp_bytes: float | None
    sent_bytes: float | None
    cpu_s: float | None


@dataclass(frozen=True)
class ComparisonResult:
    """Result of a comparison; `ended` is "complete" or why it stopped early."""

    verdict: Verdict
    equivalence: Equivalence
    contenders: list[ContenderMetrics]
    refused: list[RefusedContender]  # cannot run here, were not launched, or failed, maybe in a later round
    ended: str
    noise: str
    launches: int


def summarize(
    contenders: Sequence[Contender],
    refused: Sequence[RefusedContender],
    launches: Sequence[Launch],
    ended: str,
    *,
    left_out: Sequence[Contender] = (),
    enough: str = "--budget",
) -> ComparisonResult:
    """Evaluate the launches of a comparison.

    `left_out` had no time within the budget; with the options `enough` everybody would have had.
    """
    checks = {replace(each, is_ordered=False): each for each in contenders if each.is_ordered}
    contenders = [each for each in contenders if not each.is_ordered]
    found = group_by_contender(launches)
    failed = {launch.contender: launch for launch in launches if launch.error is not None}
    reasons = ((each, _missing(each.key, found, failed, ended)) for each in contenders if each not in left_out)
    missing = [RefusedContender(each, reason) for each, reason in reasons if reason is not None]
    too_long = f"as the budget is too small for a verdict on all; about {enough} is enough"
    for each in left_out:
        count = len(found.get(each.key, ()))
        after = f" after {count} launch{'es' * (count > 1)}" if count else ""
        missing.append(RefusedContender(each, f"left out{after}, {too_long}"))
    measured = [each for each in contenders if each.key in found]
    training = {each.label: found[each.key] for each in measured if each.trains_alike}
    equivalence = check_equivalence(training)
    if checks:
        last = {launch.contender: launch for launch in launches}
        able = [each for each in measured if each.label in training and each.key not in failed and not each.copy]
        ordered = {each.label: _ordered(checks.get(each), last, ended) for each in able if each not in left_out}
        equivalence = check_bits(equivalence, ordered)
    able = [each for each in contenders if (each.key in found or each.key not in failed) and each not in left_out]
    candidates = {each.label: found.get(each.key, []) for each in able if each.is_candidate}
    verdict = judge(candidates, equivalence, enough)
    order = rank_by_speed({each.label: found[each.key] for each in measured})
    fastest = verdict.winner or next((label for label in order if label in candidates), "")
    metrics = [_metrics(each, found, candidates, fastest) for each in measured]

    def place(each: ContenderMetrics) -> tuple[bool, float, int]:
        ratio = math.inf if each.ratio_to_fastest is None else each.ratio_to_fastest.value
        return each.method in NOT_AVERAGED, ratio, order.index(each.label)

    return ComparisonResult(
        verdict=verdict,
        equivalence=equivalence,
        contenders=sorted(metrics, key=place),
        refused=[*refused, *missing],
        ended=ended,
        noise=_noise(launches),
        launches=len(launches),
    )


def _ordered(check: Contender | None, launches: Mapping[str, Launch], ended: str) -> Launch | str:
    """Return the launch of a check with ordered sums, or why there is none."""
    if check is None:
        return "a baseline adds in the order of its library"
    if check.key not in launches:
        return f"it was not launched: {ended}"
    launch = launches[check.key]
    return launch if launch.error is None else error_summary(launch.error)


def _missing(key: str, found: Mapping[str, list[Launch]], failed: Mapping[str, Launch], ended: str) -> str | None:
    """Return why a contender has no launch, or no more of them; None if it never failed."""
    if key not in failed:
        return None if key in found else f"it was never launched: {ended}"
    if key not in found:
        return failed[key].error
    error = error_summary(failed[key].error or "")
    return f"it failed in round {failed[key].round + 1} and was not launched again: {error}"


def _metrics(
    contender: Contender,
    found: Mapping[str, list[Launch]],
    candidates: Mapping[str, Sequence[Launch]],
    fastest: str,
) -> ContenderMetrics:
    own = found[contender.key]
    first, batch, bandwidth = own[0].first, own[0].batch, _bandwidth(own)
    without_communication, one_rank = (_launches_of(method, found) for method in NOT_AVERAGED)
    is_averaged = contender.method not in NOT_AVERAGED
    exposed = [step - limit for step, limit in paired_steps(own, without_communication)] if is_averaged else []
    over_ranks: dict[str, Any] = {}
    for name in OVER_RANKS:
        known = [value for value in (each.over_ranks(name) for each in own) if value is not None]
        over_ranks[name] = median(known) if known else None
    ranks = range(len(own[0].ranks))
    by_rank = [median(median(each.ranks[rank].steps) for each in own) for rank in ranks]
    return ContenderMetrics(
        key=contender.key,
        label=contender.label,
        method=contender.method,
        is_candidate=contender.label in candidates,
        **{name: getattr(first, name) for name in ("launcher", "backend", "transport", "device")},
        launches=len(own),
        step_s=median_interval([each.step_s for each in own]),
        samples_per_s=median_interval([batch / each.step_s for each in own]) if batch else None,
        samples_per_s_by_rank=[batch / len(ranks) / step_s for step_s in by_rank] if batch else None,
        ratio_to_fastest=step_ratio(own, candidates.get(fastest, [])) if is_averaged else None,
        scaling_efficiency=step_ratio(one_rank, own) if contender.method != "one" and batch else None,
        exposed_s=median_interval(exposed) if exposed else None,
        latency_s=next((point.seconds.value for point in bandwidth if point.nbytes == LATENCY_BYTES), None),
        bus_gb_s=bandwidth[-1].bus_gb_s.value if bandwidth else None,
        bandwidth=bandwidth,
        startup_s=median(each.startup_s for each in own),
        init_s=median(each.init_s for each in own),
        **over_ranks,
    )


def _launches_of(method: str, found: Mapping[str, list[Launch]]) -> list[Launch]:
    return next((launches for key, launches in found.items() if key.startswith(f"{method}-")), [])


def _bandwidth(launches: Sequence[Launch]) -> list[BandwidthPoint]:
    known = [sizes for each in launches if (sizes := (each.allreduce or {}).get("sizes")) is not None]
    ranks, points = len(launches[0].ranks), []
    for sizes in zip(*known, strict=True):
        nbytes = sizes[0]["bytes"]
        times = [[median(size["seconds"][call]) for size in sizes] for call in ("dualdist_", "raw_")]
        rates = [[bus_bandwidth(nbytes, seconds, ranks) for seconds in each] for each in times]
        points.append(BandwidthPoint(nbytes, *map(median_interval, [*times, *rates])))
    return points


def _noise(launches: Sequence[Launch]) -> str:
    known = [each.foreign_cores for each in launches if each.foreign_cores is not None]
    if all(each.error is not None for each in launches):
        return "noise unknown, as no launch succeeded"
    if not known:
        return "noise unknown, as this system does not report the CPU use of other processes"
    loaded = sum(map(is_loaded, known))
    verdict = "NOISY: small differences need more launches" if loaded > NOISY_ROUNDS * len(known) else "quiet"
    return (
        f"{verdict} (other processes used {median(known):.2f} cores during the median launch, and more than "
        f"{LOADED_CORES:g} during {loaded} of {len(known)})"
    )
