"""Output of a comparison: tables, CSV, and a folder with an HTML page, its plots and the raw data."""

from __future__ import annotations

import csv
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualdist.bench.compare.launches import Launch, group_by_cell
from dualdist.bench.compare.metrics import CellMetrics, ComparisonResult
from dualdist.bench.report import (
    ReportTable,
    dump_json,
    error_summary,
    failure_table,
    format_ms,
    format_settings,
    format_size,
    format_us,
    format_versions,
)
from dualdist.bench.statistics import MIN_LAUNCHES
from dualdist.utils.machine import Machine

TEMPLATE = "page.html.j2"
PAGE, DATA, TABLE = "report.html", "comparison.json", "launches.csv"
SPEED = ("contender", "launches", "samples/s", "95%", "per rank", "step ms", "/ fastest", "95% ")
SPEED_OF_SCRIPT = ("contender", "launches", "steps/s", "95%", "step ms", "/ fastest", "95% ")
COST = (
    *("contender", "exposed ms", "efficiency", "8 B us", "bus GB/s", "start s"),
    *("host MiB", "GPU MiB", "TCP MiB/step", "CPU ms/step"),
)
SPEED_NOTE = (
    "step: of the slowest rank, the median of its launch; / fastest: step time over that of the fastest contender, "
    "launches of the same round"
)
COST_NOTE = (
    "exposed: step time minus that without communication; efficiency: against one rank with its share of the batch; "
    "8 B, bus: latency of an allreduce, and bus bandwidth of the largest (as nccl-tests); start: from the launch to "
    "the end of the first step; host, GPU: peak memory, maximum over ranks; TCP: bytes a rank sends over TCP, which "
    "shared memory does not use; CPU: sum over ranks"
)
CSV_COLUMNS = (
    *("cell", "label", "launcher", "backend", "transport", "round", "began", "step_s", "samples_per_s", "startup_s"),
    *("init_s", "peak_bytes", "device_peak_bytes", "tcp_bytes_per_step", "cpu_s_per_step", "foreign_cores"),
    *("first_loss", "last_loss", "digest", "error"),
)


def tables(result: ComparisonResult) -> Iterator[ReportTable]:
    """Yield the tables of speed, of cost, and of cells that were not measured."""
    if result.cells:
        yield _speed_table(result.cells)
        yield _cost_table(result.cells)
    if result.refused:
        yield failure_table([(each.cell.label, each.reason) for each in result.refused])


def _speed_table(cells: Sequence[CellMetrics]) -> ReportTable:
    is_script = all(cell.samples_per_s is None for cell in cells)
    too_few = min(cell.launches for cell in cells) < MIN_LAUNCHES
    note = (
        f"; with fewer than {MIN_LAUNCHES} launches the range of values instead of the 95% interval" if too_few else ""
    )
    columns = SPEED_OF_SCRIPT if is_script else SPEED
    return ReportTable("Speed", columns, tuple(_speed(cell, is_script) for cell in cells), (SPEED_NOTE + note,))


def _speed(cell: CellMetrics, is_script: bool) -> tuple[str, ...]:
    ratio, rate = cell.ratio_to_fastest, cell.samples_per_s or cell.step_s.inverse()
    by_rank = cell.samples_per_s_by_rank
    return (
        cell.label,
        str(cell.launches),
        _number(rate.value),
        f"{_number(rate.low)} to {_number(rate.high)}",
        *(() if is_script else ("-" if by_rank is None else _range(by_rank),)),
        format_ms(cell.step_s.value),
        "-" if ratio is None else f"{ratio.value:.3f}",
        "-" if ratio is None else f"{ratio.low:.3f} to {ratio.high:.3f}",
    )


def _range(values: Sequence[float]) -> str:
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Format with three significant digits or more, without an exponent: 1.23, 45.6, 12345."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cost_table(cells: Sequence[CellMetrics]) -> ReportTable:
    """Return the table without columns that are unknown for all cells."""
    rows = [_cost(cell) for cell in cells]
    known = [column for column in range(len(COST)) if any(row[column] != "-" for row in rows)]
    columns, *shown = (tuple(row[column] for column in known) for row in (COST, *rows))
    return ReportTable("Cost", columns, tuple(shown), (COST_NOTE,))


def _cost(cell: CellMetrics) -> tuple[str, ...]:
    exposed, efficiency = cell.exposed_s, cell.scaling_efficiency
    return (
        cell.label,
        "-" if exposed is None else format_ms(exposed.value),
        "-" if efficiency is None else f"{efficiency.value:.0%}",
        "-" if cell.latency_s is None else f"{cell.latency_s * 1e6:.0f}",
        "-" if cell.bus_gb_s is None else f"{cell.bus_gb_s:.3g}",
        f"{cell.startup_s:.1f}",
        *("-" if peak is None else f"{peak / 2**20:.0f}" for peak in (cell.peak_bytes, cell.device_peak_bytes)),
        "-" if cell.tcp_bytes is None else f"{cell.tcp_bytes / 2**20:.2f}",
        "-" if cell.cpu_s is None else f"{cell.cpu_s * 1e3:.1f}",
    )


def bandwidth_table(cells: Sequence[CellMetrics]) -> ReportTable:
    """Return the allreduce table by contender and size."""
    rows = tuple(
        (
            cell.label,
            format_size(point.nbytes),
            format_us(point.seconds),
            format_us(point.raw_seconds),
            f"{point.bus_gb_s:.3g}",
            f"{point.raw_bus_gb_s:.3g}",
        )
        for cell in cells
        for point in cell.bandwidth
    )
    return ReportTable("Allreduce", ("contender", "size", "us", "us, raw library", "bus GB/s", "raw library"), rows)


def write_csv(path: Path, launches: Sequence[Launch], labels: Mapping[str, str]) -> None:
    """Write one line per launch, failed ones included."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        writer.writerows(_csv_row(launch, labels.get(launch.cell, launch.cell)) for launch in launches)


def _csv_row(launch: Launch, label: str) -> Iterator[object]:
    yield from (launch.cell, label)
    error = error_summary(launch.error or "")
    if not launch.ranks:
        yield from ("", "", "", launch.round, launch.began, *[""] * (len(CSV_COLUMNS) - 8), error)
        return
    first, losses = launch.first, launch.losses
    yield from (first.launcher, first.backend, first.transport, launch.round, launch.began)
    yield launch.step_s if launch.steps else ""
    yield "" if launch.batch is None or not launch.steps else launch.batch / launch.step_s
    yield from (launch.startup_s, launch.init_s, launch.peak_bytes, launch.device_peak_bytes)
    yield from (launch.tcp_bytes, launch.cpu_s, launch.foreign_cores, losses[0], losses[-1], first.digest, error)


def write_folder(
    folder: Path,
    result: ComparisonResult,
    record: Mapping[str, Any],
    launches: Sequence[Launch],
    labels: Mapping[str, str],
) -> Path:
    """Write page, plots, CSV and JSON to the folder; return the path of the page."""
    from dualdist.bench.compare.plots import draw_plots

    plots = draw_plots(result, group_by_cell(launches))
    for name, png in plots.items():
        (folder / f"{name}.png").write_bytes(png)
    data = dump_json(record).encode()
    (folder / DATA).write_bytes(data)
    write_csv(folder / TABLE, launches, labels)
    page = folder / PAGE
    page.write_text(render_page(result, record, launches, labels, plots, data))
    return page


def render_page(
    result: ComparisonResult,
    record: Mapping[str, Any],
    launches: Sequence[Launch],
    labels: Mapping[str, str],
    plots: Mapping[str, bytes],
    data: bytes,
) -> str:
    """Return the HTML page, which needs no other file and no network."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    settings, machine = format_settings(record["settings"]), str(Machine(**record["machine"]))
    setup = {
        "command": record["command"],
        "time": record["timestamp"],
        "machine": machine,
        "versions": format_versions(record["versions"]),
        **settings,
    }
    return environment.get_template(TEMPLATE).render(
        result=result,
        machine=machine,
        timestamp=record["timestamp"],
        settings=", ".join(f"{name} {value}" for name, value in settings.items()),
        tables=list(tables(result)),
        bandwidth=bandwidth_table(result.cells),
        classes={cell.label: _css_class(cell, result) for cell in result.cells},
        plots={name: b64encode(png).decode() for name, png in plots.items()},
        setup=setup,
        launches=[_page_row(launch, labels) for launch in launches],
        commands={labels.get(launch.cell, launch.cell): launch.command for launch in launches},
        data=b64encode(data).decode(),
        data_size=format_size(len(data)),
    )


def _css_class(cell: CellMetrics, result: ComparisonResult) -> str:
    if result.verdict.kind == "faster" and cell.label == result.verdict.winner:
        return "winner"
    return "" if cell.is_contender else "baseline"


def _page_row(launch: Launch, labels: Mapping[str, str]) -> tuple[str, ...]:
    label, number = labels.get(launch.cell, launch.cell), str(launch.round + 1)
    if launch.error is not None or not launch.steps:
        return (label, number, *["-"] * 5, error_summary(launch.error or ""))
    return (
        label,
        number,
        format_ms(launch.step_s),
        "-" if launch.batch is None else f"{launch.batch / launch.step_s:.4g}",
        f"{launch.startup_s:.1f}",
        "-" if launch.foreign_cores is None else f"{launch.foreign_cores:.2f}",
        launch.first.digest[:12],
        "",
    )
