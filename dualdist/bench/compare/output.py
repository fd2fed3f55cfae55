"""Output of a comparison: tables, CSV, and a folder with an HTML page of these and the plots, and the raw data."""

import csv
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualdist.bench.compare.launches import OVER_RANKS, Launch, group_by_contender
from dualdist.bench.compare.metrics import ComparisonResult, ContenderMetrics
from dualdist.bench.compare.plots import Plot, draw_plots
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
from dualdist.bench.statistics import MIN_LAUNCHES, MedianInterval
from dualdist.utils.machine import Machine

TEMPLATE = "page.html.j2"
PAGE, DATA, TABLE = "report.html", "comparison.json", "launches.csv"
# What the columns of the tables mean; those that a table does not have are not explained.
SPEED: Mapping[str, str] = {
    "contender": "",
    "launches": "",
    "samples/s": "",
    "95% of samples/s": "",
    "per rank": "",
    "steps/s": "",
    "95% of steps/s": "",
    "step ms": "of the slowest rank, the median of its launch",
    "step / fastest": "step time over that of the fastest candidate in the same round; the rows are in this order",
    "95% of it": "a bootstrap interval over launches, for this pair alone",
}
COST: Mapping[str, str] = {
    "contender": "",
    "exposed ms": "step time minus that without communication",
    "efficiency": "against one rank with its share of the batch",
    "8 B us": "latency of an allreduce",
    "bus GB/s": "bus bandwidth of the largest allreduce, as nccl-tests define it",
    "start s": "from the launch to the end of the first step",
    "host MiB": "peak memory, maximum over ranks",
    "GPU MiB": "the same of GPUs",
    "TCP MiB/step": "what a rank sends over TCP, which shared memory does not use",
    "sent MiB/step": "gradients that a rank gives to the reduction, as they are sent",
    "CPU ms/step": "sum over ranks",
}
CSV_COLUMNS = (
    *("contender", "label", "launcher", "backend", "transport", "round", "began", "step_s", "samples_per_s"),
    *("startup_s", "init_s", "peak_bytes", "device_peak_bytes", "tcp_bytes_per_step", "sent_bytes_per_step"),
    *("cpu_s_per_step", "foreign_cores", "first_loss", "last_loss", "digest", "error"),
)


def tables(result: ComparisonResult) -> Iterator[ReportTable]:
    """Yield the tables of speed, of cost, and of contenders that were not measured."""
    if result.contenders:
        yield _speed_table(result.contenders)
        yield _table("Cost", COST, map(_cost, result.contenders))
    if result.refused:
        yield failure_table("contender", [(each.contender.label, each.reason) for each in result.refused])


def _table(title: str, columns: Mapping[str, str], rows: Iterable[Sequence[str]], interval: str = "") -> ReportTable:
    """Return a table without columns that are empty in all rows, explained below; `interval` explains those of 95%."""
    kept = list(rows)
    known = [number for number, values in enumerate(zip(*kept, strict=True)) if set(values) != {""}]
    names = [name for number, name in enumerate(columns) if number in known]
    notes = [f"{name}: {columns[name]}" for name in names if columns[name]]
    notes += [interval] if interval and any(name.startswith("95%") for name in names) else []
    values = tuple(tuple(row[number] for number in known) for row in kept)
    return ReportTable(title, tuple(names), values, ("; ".join(notes),))


def _speed_table(contenders: Sequence[ContenderMetrics]) -> ReportTable:
    too_few = min(each.launches for each in contenders) < MIN_LAUNCHES
    remark = f"95%: the interval, or of fewer than {MIN_LAUNCHES} launches the range of values"
    return _table("Speed", SPEED, map(_speed, contenders), remark if too_few else "")


def _speed(contender: ContenderMetrics) -> tuple[str, ...]:
    ratio, rate = contender.ratio_to_fastest, contender.samples_per_s or contender.step_s.inverse()
    rates = (_number(rate.value), _interval(rate, _number))
    per_rank = _range(contender.samples_per_s_by_rank or [])
    return (
        contender.label,
        str(contender.launches),
        *((*rates, per_rank, "", "") if contender.samples_per_s else ("", "", "", *rates)),
        format_ms(contender.step_s.value),
        "" if ratio is None else "1" if ratio.value == 1 else f"{ratio.value:.3f}",
        "" if ratio is None else _interval(ratio, "{:.3f}".format),
    )


def _interval(interval: MedianInterval, show: Callable[[float], str]) -> str:
    """Return "1.2 to 1.4", or nothing for an interval that is a point."""
    low, high = show(interval.low), show(interval.high)
    return "" if low == high else f"{low} to {high}"


def _known(value: MedianInterval | float | None, spec: str, scale: float = 1) -> str:
    """Format a value times a scale, or return nothing for None."""
    number = value.value if isinstance(value, MedianInterval) else value
    return "" if number is None else format(number * scale, spec)


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(_number(each) for each in (min(values), max(values)))) if values else ""


def _number(value: float) -> str:
    """Format with three significant digits or more, without an exponent: 1.23, 45.6, 12345."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cost(contender: ContenderMetrics) -> tuple[str, ...]:
    return (
        contender.label,
        _known(contender.exposed_s, ".2f", 1e3),
        _known(contender.scaling_efficiency, ".0%"),
        _known(contender.latency_s, ".0f", 1e6),
        _known(contender.bus_gb_s, ".3g"),
        f"{contender.startup_s:.1f}",
        _known(contender.peak_bytes, ".0f", 1 / 2**20),
        _known(contender.device_peak_bytes, ".0f", 1 / 2**20),
        _known(contender.tcp_bytes, ".2f", 1 / 2**20),
        _known(contender.sent_bytes, ".3g", 1 / 2**20),
        _known(contender.cpu_s, ".1f", 1e3),
    )


def _bandwidth_table(contenders: Sequence[ContenderMetrics]) -> ReportTable:
    rows = tuple(
        (
            contender.label,
            format_size(point.nbytes),
            format_us(point.seconds.value),
            format_us(point.raw_seconds.value),
            *(f"{rate.value:.3g}" if rate.value >= 0.01 else "<0.01" for rate in (point.bus_gb_s, point.raw_bus_gb_s)),
        )
        for contender in contenders
        for point in contender.bandwidth
    )
    return ReportTable(
        "Allreduce", ("contender", "size", "us", "us, raw library", "bus GB/s", "bus GB/s, raw library"), rows
    )


def write_csv(path: Path, launches: Sequence[Launch]) -> None:
    """Write one line per launch, failed ones included."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(map(_csv_row, launches))


def _csv_row(launch: Launch) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(launch, name) for name in ("contender", "label", "round", "began")}
    row["error"] = error_summary(launch.error or "")
    if not launch.ranks:
        return row
    first = launch.first
    row |= {name: getattr(first, name) for name in ("launcher", "backend", "transport", "digest")}
    row |= {name: getattr(launch, name) for name in ("startup_s", "init_s", "foreign_cores")}
    of_step = {name: f"{name}_per_step" for name in ("tcp_bytes", "sent_bytes", "cpu_s")}
    row |= {of_step.get(name, name): launch.over_ranks(name) for name in OVER_RANKS}
    row |= {"first_loss": launch.losses[0], "last_loss": launch.losses[-1]}
    if launch.steps:
        row |= {"step_s": launch.step_s}
        row |= {"samples_per_s": launch.batch / launch.step_s} if launch.batch is not None else {}
    return row


def write_folder(
    folder: Path,
    result: ComparisonResult,
    record: Mapping[str, Any],
    launches: Sequence[Launch],
) -> Path:
    """Write page, plots, CSV and JSON to the folder; return the path of the page."""
    plots = draw_plots(result, group_by_contender(launches))
    for name, plot in plots.items():
        (folder / f"{name}.svg").write_text(plot.svg)
    data = dump_json(record).encode()
    (folder / DATA).write_bytes(data)
    write_csv(folder / TABLE, launches)
    page = folder / PAGE
    page.write_text(_render_page(result, record, launches, plots, data))
    return page


def _render_page(
    result: ComparisonResult,
    record: Mapping[str, Any],
    launches: Sequence[Launch],
    plots: Mapping[str, Plot],
    data: bytes,
) -> str:
    """Return the HTML page, which needs no other file and no network."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    settings = format_settings(record["settings"])
    setup = {
        "command": record["command"],
        "time": record["timestamp"],
        "machine": str(Machine(**record["machine"])),
        "versions": format_versions(record["versions"]),
        **settings,
    }
    return environment.get_template(TEMPLATE).render(
        result=result,
        setup=setup,
        summary=", ".join(f"{settings[name]} {name}" for name in ("ranks", "model", "script") if name in settings),
        tables=list(tables(result)),
        bandwidth=_bandwidth_table(result.contenders),
        classes={each.label: _css_class(each, result) for each in result.contenders},
        plots=[(name, plot.alt, b64encode(plot.svg.encode()).decode()) for name, plot in plots.items()],
        launches=[*map(_page_row, launches)],
        commands={launch.label: launch.command for launch in launches},
        data=b64encode(data).decode(),
        data_size=format_size(len(data)),
    )


def _css_class(contender: ContenderMetrics, result: ComparisonResult) -> str:
    if result.verdict.kind == "faster" and contender.label == result.verdict.winner:
        return "winner"
    return "" if contender.is_candidate else "baseline"


def _page_row(launch: Launch) -> tuple[str, ...]:
    label, number = launch.label, str(launch.round + 1)
    if launch.error is not None or not launch.steps:
        return (label, number, *[""] * 5, error_summary(launch.error or ""))
    return (
        label,
        number,
        format_ms(launch.step_s),
        "" if launch.batch is None else f"{launch.batch / launch.step_s:.4g}",
        f"{launch.startup_s:.1f}",
        _known(launch.foreign_cores, ".2f"),
        launch.first.digest[:12],
        "",
    )
