"""A comparison as tables for a terminal, and its launches as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dualdist.bench.compare.figures import CellFigures, ComparisonResult
from dualdist.bench.compare.launches import Launch
from dualdist.bench.paired import LEAST_LAUNCHES, MedianInterval
from dualdist.bench.report import FigureTable, last_words, size_words

SPEED = ("contender", "runs", "samples/s", "95%", "of each rank", "step ms", "/ fastest", "95% ")
SPEED_OF_SCRIPT = ("contender", "runs", "steps/s", "95%", "step ms", "/ fastest", "95% ")
COST = (
    "contender",
    "not hidden ms",
    "efficiency",
    "8 B us",
    "bus GB/s",
    "start s",
    "host MiB",
    "GPU MiB",
    "TCP MiB/step",
    "CPU ms/step",
)
SPEED_NOTE = (
    "a step is the slowest rank's, the median of its launch; / fastest: step time over the fastest's, round by round"
)
COST_NOTE = (
    "not hidden: what a step takes more than without communication; efficiency: against one rank with its own part of "
    "the batch; 8 B, bus: an allreduce's latency, and the bandwidth of the largest (nccl-tests' definition); start: "
    "from the launch to the end of the first step; host, GPU: the peak of the rank that needs most; TCP: what a rank "
    "sends over TCP, which shared memory does not use; CPU: of all ranks"
)
COLUMNS = (
    "cell",
    "label",
    "launcher",
    "backend",
    "transport",
    "round",
    "began",
    "step_s",
    "samples_per_s",
    "startup_s",
    "init_s",
    "peak_bytes",
    "device_peak_bytes",
    "tcp_bytes_per_step",
    "cpu_s_per_step",
    "foreign_cores",
    "first_loss",
    "last_loss",
    "digest",
    "error",
)


def tables(result: ComparisonResult) -> Iterator[FigureTable]:
    """Speed, cost, and what is missing."""
    if result.cells:
        yield speed_table(result.cells)
        yield cost_table(result.cells)
    if result.refused:
        rows = tuple((each.cell.label, last_words(each.reason)) for each in result.refused)
        yield FigureTable("Missing", ("contender", "why"), rows, words=2)


def speed_table(cells: Sequence[CellFigures]) -> FigureTable:
    is_script = all(cell.rate is None for cell in cells)
    few = min(cell.runs for cell in cells) < LEAST_LAUNCHES
    note = f"; below {LEAST_LAUNCHES} runs the range of what was seen stands for the interval" if few else ""
    columns = SPEED_OF_SCRIPT if is_script else SPEED
    return FigureTable("Speed", columns, tuple(_speed(cell, is_script) for cell in cells), (SPEED_NOTE + note,))


def _speed(cell: CellFigures, is_script: bool) -> tuple[str, ...]:
    over = cell.over_fastest
    step_s = cell.step_s
    rate = (
        MedianInterval(1 / step_s.value, 1 / step_s.high, 1 / step_s.low, cell.runs) if cell.rate is None else cell.rate
    )
    each = "-" if cell.rate_of_ranks is None else _range(cell.rate_of_ranks)
    return (
        cell.label,
        str(cell.runs),
        figure(rate.value),
        f"{figure(rate.low)} to {figure(rate.high)}",
        *(() if is_script else (each,)),
        f"{step_s.value * 1e3:.2f}",
        "-" if over is None else f"{over.value:.3f}",
        "-" if over is None else f"{over.low:.3f} to {over.high:.3f}",
    )


def _range(values: Sequence[float]) -> str:
    low, high = figure(min(values)), figure(max(values))
    return low if low == high else f"{low} to {high}"


def figure(value: float) -> str:
    """Three digits and more, without an exponent: 1.23, 45.6, 12345."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def cost_table(cells: Sequence[CellFigures]) -> FigureTable:
    """All but what is known of none."""
    rows = [_cost(cell) for cell in cells]
    known = [place for place in range(len(COST)) if any(row[place] != "-" for row in rows)]
    columns, *shown = (tuple(row[place] for place in known) for row in (COST, *rows))
    return FigureTable("Cost", columns, tuple(shown), (COST_NOTE,))


def _cost(cell: CellFigures) -> tuple[str, ...]:
    exposed, efficiency = cell.exposed_s, cell.efficiency
    return (
        cell.label,
        "-" if exposed is None else f"{exposed.value * 1e3:.2f}",
        "-" if efficiency is None else f"{efficiency.value:.0%}",
        "-" if cell.latency_s is None else f"{cell.latency_s * 1e6:.0f}",
        "-" if cell.bus_gb_s is None else f"{cell.bus_gb_s:.3g}",
        f"{cell.startup_s:.1f}",
        _mib(cell.peak_bytes),
        _mib(cell.device_peak_bytes),
        "-" if cell.tcp_bytes is None else f"{cell.tcp_bytes / 2**20:.2f}",
        "-" if cell.cpu_s is None else f"{cell.cpu_s * 1e3:.1f}",
    )


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.0f}"


def curve_table(cells: Sequence[CellFigures]) -> FigureTable:
    """Allreduce by size."""
    rows = tuple(
        (
            cell.label,
            size_words(point.nbytes),
            f"{point.seconds * 1e6:.1f}",
            f"{point.raw_seconds * 1e6:.1f}",
            f"{point.bus_gb_s:.3g}",
            f"{point.raw_bus_gb_s:.3g}",
        )
        for cell in cells
        for point in cell.curve
    )
    return FigureTable("Allreduce", ("contender", "size", "us", "us, library alone", "bus GB/s", "library alone"), rows)


def write_csv(path: Path, launches: Sequence[Launch], labels: Mapping[str, str]) -> None:
    """One line a launch, those that failed included."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(_line(launch, labels.get(launch.cell, launch.cell)) for launch in launches)


def _line(launch: Launch, label: str) -> Iterator[object]:
    yield launch.cell
    yield label
    if not launch.ranks:
        yield from ("", "", "", launch.round, launch.began, *[""] * (len(COLUMNS) - 8), last_words(launch.error or ""))
        return
    first, losses = launch.first, launch.losses
    yield from (first.launcher, first.backend, first.transport, launch.round, launch.began)
    yield launch.step_s if launch.steps else ""
    yield "" if launch.batch is None or not launch.steps else launch.batch / launch.step_s
    yield from (launch.startup_s, launch.init_s, launch.peak_bytes, launch.device_peak_bytes)
    yield from (launch.tcp_bytes, launch.cpu_s, launch.foreign_cores, losses[0], losses[-1], first.digest)
    yield "" if launch.error is None else last_words(launch.error)
