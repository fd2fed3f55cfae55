"""What the launches of a comparison say of each cell, beside the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dualdist.bench.allreduce import bus_bandwidth
from dualdist.bench.compare.equivalence import Equivalence, sameness
from dualdist.bench.compare.launches import Launch, by_cell
from dualdist.bench.compare.matrix import APART, Cell, RefusedCell
from dualdist.bench.compare.verdict import Verdict, against, pairs, ranking, step_ratio, verdict
from dualdist.bench.paired import MedianInterval, centre, difference_of
from dualdist.bench.report import last_words
from dualdist.bench.statistics import LOADED_CORES, NOISY_ROUNDS, is_loaded

LATENCY_BYTES = 8


@dataclass(frozen=True)
class BandwidthPoint:
    """An allreduce of one size: the median over launches of our time, and of the library's below."""

    nbytes: int
    seconds: float
    raw_seconds: float
    bus_gb_s: float
    raw_bus_gb_s: float


@dataclass(frozen=True)
class CellFigures:
    """One cell. What is None was not measured, or cannot be known here; bytes and seconds of a step are a rank's."""

    key: str
    label: str
    kind: str
    is_contender: bool
    launcher: str
    backend: str
    transport: str
    device: str
    runs: int
    step_s: MedianInterval
    rate: MedianInterval | None  # samples a second, of all ranks
    rate_of_ranks: list[float] | None
    over_fastest: MedianInterval | None  # its step over the fastest contender's
    efficiency: (
        MedianInterval | None
    )  # of the ranks, against one rank on its own part of the batch; a script's is not known
    exposed_s: MedianInterval | None  # what a step takes more than without communication
    latency_s: float | None
    bus_gb_s: float | None  # of the largest allreduce
    curve: list[BandwidthPoint]
    startup_s: float
    init_s: float
    peak_bytes: int | None
    device_peak_bytes: int | None
    tcp_bytes: float | None
    cpu_s: float | None


@dataclass(frozen=True)
class ComparisonResult:
    """A comparison as far as it came; `ended` is "complete" or why it ended before."""

    verdict: Verdict
    further: Mapping[str, str]  # a sentence on the winner and each of the others
    same: Equivalence
    cells: list[CellFigures]
    refused: list[RefusedCell]  # cannot run here, were never launched, or failed, though perhaps not at once
    ended: str
    noise: str
    launches: int


def result(
    cells: Sequence[Cell], refused: Sequence[RefusedCell], launches: Sequence[Launch], ended: str
) -> ComparisonResult:
    """Judge what was launched."""
    found = by_cell(launches)
    failed = {launch.cell: launch for launch in launches if launch.error is not None}
    missing = [RefusedCell(cell, why) for cell in cells if (why := _missing(cell, found, failed, ended)) is not None]
    measured = [cell for cell in cells if cell.key in found]
    training = {cell.label: found[cell.key] for cell in measured if cell.kind not in APART}
    same = sameness(training)
    able = [cell for cell in cells if cell.key in found or cell.key not in failed]
    contending = {cell.label: found.get(cell.key, []) for cell in able if cell.is_contender}
    said = verdict(contending, same)
    order = ranking({cell.label: found[cell.key] for cell in measured})
    fastest = said.winner or next((label for label in order if label in contending), None)
    others = {label: training[label] for label in order if label in training}
    return ComparisonResult(
        verdict=said,
        further=against(said.winner, others) if said.winner in others else {},
        same=same,
        cells=[
            _figures(cell, found, contending.get(fastest or "", []))
            for cell in sorted(measured, key=lambda each: (each.kind in APART, order.index(each.label)))
        ],
        refused=[*refused, *missing],
        ended=ended,
        noise=_noise(launches),
        launches=len(launches),
    )


def _missing(cell: Cell, found: Mapping[str, list[Launch]], failed: Mapping[str, Launch], ended: str) -> str | None:
    """Why a cell has no launch, or no more of them; None where it never failed."""
    if cell.key not in failed:
        return None if cell.key in found else f"it was never launched: {ended}"
    last = failed[cell.key]
    if cell.key not in found:
        return last.error
    return f"in round {last.round + 1} it failed, and was not launched again: {last_words(last.error or '')}"


def _figures(cell: Cell, found: Mapping[str, list[Launch]], fastest: Sequence[Launch]) -> CellFigures:
    own = found[cell.key]
    first = own[0].first
    none, one = (_of_kind(found, kind) for kind in APART)
    batch = own[0].batch
    curve = _curve(own)
    return CellFigures(
        key=cell.key,
        label=cell.label,
        kind=cell.kind,
        is_contender=cell.is_contender,
        launcher=first.launcher,
        backend=first.backend,
        transport=first.transport,
        device=first.device,
        runs=len(own),
        step_s=centre([each.step_s for each in own]),
        rate=centre([batch / each.step_s for each in own]) if batch else None,
        rate_of_ranks=_rates(own, batch) if batch else None,
        over_fastest=step_ratio(own, fastest) if cell.kind not in APART else None,
        efficiency=step_ratio(one, own) if cell.kind != "one" and batch else None,
        exposed_s=_exposed(own, none) if cell.kind not in APART else None,
        latency_s=next((point.seconds for point in curve if point.nbytes == LATENCY_BYTES), None),
        bus_gb_s=curve[-1].bus_gb_s if curve else None,
        curve=curve,
        startup_s=median(each.startup_s for each in own),
        init_s=median(each.init_s for each in own),
        peak_bytes=_middle(own, lambda each: each.peak_bytes),
        device_peak_bytes=_middle(own, lambda each: each.device_peak_bytes),
        tcp_bytes=_middle(own, lambda each: each.tcp_bytes),
        cpu_s=_middle(own, lambda each: each.cpu_s),
    )


def _of_kind(found: Mapping[str, list[Launch]], kind: str) -> Sequence[Launch]:
    return next((each for key, each in found.items() if key.startswith(f"{kind}-")), [])


def _middle(launches: Sequence[Launch], figure: Callable[[Launch], Any]) -> Any:
    known = [value for each in launches if (value := figure(each)) is not None]
    return median(known) if known else None


def _rates(launches: Sequence[Launch], batch: int) -> list[float]:
    """Samples a second of each rank, by its own steps."""
    ranks = range(len(launches[0].ranks))
    return [batch / len(ranks) / median(median(each.ranks[rank].steps) for each in launches) for rank in ranks]


def _exposed(own: Sequence[Launch], none: Sequence[Launch]) -> MedianInterval | None:
    first, second = pairs(own, none)
    return difference_of([each.step_s for each in first], [each.step_s for each in second]) if first else None


def _curve(launches: Sequence[Launch]) -> list[BandwidthPoint]:
    known = [sizes for each in launches if (sizes := (each.allreduce or {}).get("sizes")) is not None]
    ranks, points = len(launches[0].ranks), []
    for sizes in zip(*known, strict=True):
        nbytes = sizes[0]["bytes"]
        ours, theirs = (median(median(size["seconds"][call]) for size in sizes) for call in ("dualdist_", "raw_"))
        rates = (bus_bandwidth(nbytes, seconds, ranks) for seconds in (ours, theirs))
        points.append(BandwidthPoint(nbytes, ours, theirs, *rates))
    return points


def _noise(launches: Sequence[Launch]) -> str:
    known = [each.foreign_cores for each in launches if each.foreign_cores is not None]
    if all(each.error is not None for each in launches):
        return "nothing ran that could tell how busy it was"
    if not known:
        return "this system does not tell how busy it was with the work of others"
    loaded = sum(map(is_loaded, known))
    judged = "NOISY, so that differences need more runs to be seen" if loaded > NOISY_ROUNDS * len(known) else "quiet"
    return (
        f"{judged} (others used {median(known):.2f} cores during the median launch, and more than {LOADED_CORES:g} "
        f"during {loaded} of {len(known)})"
    )
