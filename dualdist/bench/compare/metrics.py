"""Metrics of a comparison: what the launches of each cell measured, and the result with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dualdist.bench.allreduce import bus_bandwidth
from dualdist.bench.compare.launches import Launch, group_by_cell
from dualdist.bench.compare.matrix import NOT_AVERAGED, Cell, RefusedCell
from dualdist.bench.compare.verdict import (
    Equivalence,
    Verdict,
    check_equivalence,
    compare_with_winner,
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
    """An allreduce of one size, medians over launches, by dualdist and by the raw library."""

    nbytes: int
    seconds: float
    raw_seconds: float
    bus_gb_s: float
    raw_bus_gb_s: float


@dataclass(frozen=True)
class CellMetrics:
    """Metrics of one cell; None for what was not measured or is unknown here."""

    key: str
    label: str
    kind: str
    is_contender: bool
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
    latency_s: float | None  # of an allreduce of LATENCY_BYTES
    bus_gb_s: float | None  # of the largest allreduce
    bandwidth: list[BandwidthPoint]
    startup_s: float
    init_s: float
    peak_bytes: int | None
    device_peak_bytes: int | None
    tcp_bytes: float | None
    cpu_s: float | None


@dataclass(frozen=True)
class ComparisonResult:
    """Result of a comparison; `ended` is "complete" or why it stopped early."""

    verdict: Verdict
    pairwise: Mapping[str, str]  # a sentence on the winner and each other contender
    equivalence: Equivalence
    cells: list[CellMetrics]
    refused: list[RefusedCell]  # cannot run here, were not launched, or failed, maybe in a later round
    ended: str
    noise: str
    launches: int


def summarize(
    cells: Sequence[Cell], refused: Sequence[RefusedCell], launches: Sequence[Launch], ended: str
) -> ComparisonResult:
    """Evaluate the launches of a comparison."""
    found = group_by_cell(launches)
    failed = {launch.cell: launch for launch in launches if launch.error is not None}
    missing = [RefusedCell(cell, why) for cell in cells if (why := _missing(cell, found, failed, ended)) is not None]
    measured = [cell for cell in cells if cell.key in found]
    training = {cell.label: found[cell.key] for cell in measured if cell.kind not in NOT_AVERAGED}
    equivalence = check_equivalence(training)
    able = [cell for cell in cells if cell.key in found or cell.key not in failed]
    contending = {cell.label: found.get(cell.key, []) for cell in able if cell.is_contender}
    verdict = judge(contending, equivalence)
    order = rank_by_speed({cell.label: found[cell.key] for cell in measured})
    fastest = verdict.winner or next((label for label in order if label in contending), "")
    others = {label: training[label] for label in order if label in training}
    return ComparisonResult(
        verdict=verdict,
        pairwise=compare_with_winner(verdict.winner, others) if verdict.winner in others else {},
        equivalence=equivalence,
        cells=[
            _metrics(cell, found, contending.get(fastest, []))
            for cell in sorted(measured, key=lambda each: (each.kind in NOT_AVERAGED, order.index(each.label)))
        ],
        refused=[*refused, *missing],
        ended=ended,
        noise=_noise(launches),
        launches=len(launches),
    )


def _missing(cell: Cell, found: Mapping[str, list[Launch]], failed: Mapping[str, Launch], ended: str) -> str | None:
    """Return why a cell has no launch, or no more of them; None if it never failed."""
    if cell.key not in failed:
        return None if cell.key in found else f"it was never launched: {ended}"
    last = failed[cell.key]
    if cell.key not in found:
        return last.error
    return f"it failed in round {last.round + 1} and was not launched again: {error_summary(last.error or '')}"


def _metrics(cell: Cell, found: Mapping[str, list[Launch]], fastest: Sequence[Launch]) -> CellMetrics:
    own = found[cell.key]
    first, batch = own[0].first, own[0].batch
    without_communication, one_rank = (_of_kind(found, kind) for kind in NOT_AVERAGED)
    is_averaged = cell.kind not in NOT_AVERAGED
    bandwidth = _bandwidth(own)
    return CellMetrics(
        key=cell.key,
        label=cell.label,
        kind=cell.kind,
        is_contender=cell.is_contender,
        launcher=first.launcher,
        backend=first.backend,
        transport=first.transport,
        device=first.device,
        launches=len(own),
        step_s=median_interval([each.step_s for each in own]),
        samples_per_s=median_interval([batch / each.step_s for each in own]) if batch else None,
        samples_per_s_by_rank=_samples_per_s_by_rank(own, batch) if batch else None,
        ratio_to_fastest=step_ratio(own, fastest) if is_averaged else None,
        scaling_efficiency=step_ratio(one_rank, own) if cell.kind != "one" and batch else None,
        exposed_s=_exposed(own, without_communication) if is_averaged else None,
        latency_s=next((point.seconds for point in bandwidth if point.nbytes == LATENCY_BYTES), None),
        bus_gb_s=bandwidth[-1].bus_gb_s if bandwidth else None,
        bandwidth=bandwidth,
        startup_s=median(each.startup_s for each in own),
        init_s=median(each.init_s for each in own),
        peak_bytes=_median_known(own, lambda each: each.peak_bytes),
        device_peak_bytes=_median_known(own, lambda each: each.device_peak_bytes),
        tcp_bytes=_median_known(own, lambda each: each.tcp_bytes),
        cpu_s=_median_known(own, lambda each: each.cpu_s),
    )


def _of_kind(found: Mapping[str, list[Launch]], kind: str) -> Sequence[Launch]:
    return next((each for key, each in found.items() if key.startswith(f"{kind}-")), [])


def _median_known(launches: Sequence[Launch], metric: Callable[[Launch], Any]) -> Any:
    known = [value for each in launches if (value := metric(each)) is not None]
    return median(known) if known else None


def _samples_per_s_by_rank(launches: Sequence[Launch], batch: int) -> list[float]:
    ranks = range(len(launches[0].ranks))
    return [batch / len(ranks) / median(median(each.ranks[rank].steps) for each in launches) for rank in ranks]


def _exposed(own: Sequence[Launch], without: Sequence[Launch]) -> MedianInterval | None:
    pairs = list(zip(*paired_steps(own, without), strict=True))
    return median_interval([step - limit for step, limit in pairs]) if pairs else None


def _bandwidth(launches: Sequence[Launch]) -> list[BandwidthPoint]:
    known = [sizes for each in launches if (sizes := (each.allreduce or {}).get("sizes")) is not None]
    ranks, points = len(launches[0].ranks), []
    for sizes in zip(*known, strict=True):
        nbytes = sizes[0]["bytes"]
        times = [median(median(size["seconds"][call]) for size in sizes) for call in ("dualdist_", "raw_")]
        points.append(BandwidthPoint(nbytes, *times, *(bus_bandwidth(nbytes, seconds, ranks) for seconds in times)))
    return points


def _noise(launches: Sequence[Launch]) -> str:
    known = [each.foreign_cores for each in launches if each.foreign_cores is not None]
    if all(each.error is not None for each in launches):
        return "noise unknown, as no launch succeeded"
    if not known:
        return "noise unknown, as this system does not report the CPU use of other processes"
    loaded = sum(map(is_loaded, known))
    verdict = "NOISY: more launches are needed to show a difference" if loaded > NOISY_ROUNDS * len(known) else "quiet"
    return (
        f"{verdict} (other processes used {median(known):.2f} cores during the median launch, and more than "
        f"{LOADED_CORES:g} during {loaded} of {len(known)})"
    )
