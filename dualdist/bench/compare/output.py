"""Output of a comparison: tables, and a folder with an HTML page of these and the plots, and the raw data."""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualdist.bench.compare.launches import Launch, group_by_contender
from dualdist.bench.compare.metrics import ComparisonResult, ContenderMetrics
from dualdist.bench.compare.plots import draw_plots
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

MIB = 2**20
SPEED = (
    *("contender", "launches", "samples/s", "95% of samples/s", "per rank", "step ms", "step / fastest", "95% of it"),
)
# Metric, format, scale and meaning of each column.
COST = {
    "exposed ms": ("exposed_s", ".2f", 1e3, "step time minus that without communication"),
    "efficiency": ("scaling_efficiency", ".0%", 1, "against one rank with its share of the batch"),
    "8 B us": ("latency_s", ".0f", 1e6, "latency of an allreduce"),
    "bus GB/s": ("bus_gb_s", ".3g", 1, "bus bandwidth of the largest allreduce, as nccl-tests define it"),
    "start s": ("startup_s", ".1f", 1, "from the launch to the end of the first step"),
    "host MiB": ("peak_bytes", ".0f", 1 / MIB, "peak memory, maximum over ranks"),
    "GPU MiB": ("device_peak_bytes", ".0f", 1 / MIB, "the same of GPUs"),
    "TCP MiB/step": ("tcp_bytes", ".2f", 1 / MIB, "what a rank sends over TCP, which shared memory does not use"),
    "sent MiB/step": ("sent_bytes", ".3g", 1 / MIB, "gradients that a rank gives to the reduction, as they are sent"),
    "CPU ms/step": ("cpu_s", ".1f", 1e3, "sum over ranks"),
}
NOTES = {name: note for name, (*_, note) in COST.items()} | {
    "step ms": "the slowest rank's, the median of its launch",
    "step / fastest": "step time over that of the fastest candidate in the same round; the rows are in this order",
    "95% of it": "a bootstrap interval over launches, for this pair alone",
}


def tables(result: ComparisonResult) -> Iterator[ReportTable]:
    """Yield the tables of speed, of cost, and of contenders that were not measured."""
    if result.contenders:
        yield _table("Speed", SPEED, result.contenders, _speed)
        yield _table("Cost", ("contender", *COST), result.contenders, _cost)
    if result.refused:
        yield failure_table("contender", [(each.contender.label, each.reason) for each in result.refused])


def _table(
    title: str,
    columns: Sequence[str],
    contenders: Sequence[ContenderMetrics],
    cells: Callable[[ContenderMetrics], Sequence[str]],
) -> ReportTable:
    """Return a table without columns that are empty in all rows, explained below."""
    rows = [cells(each) for each in contenders]
    known = [number for number, values in enumerate(zip(*rows, strict=True)) if set(values) != {""}]
    names = tuple(columns[number] for number in known)
    notes = [f"{name}: {NOTES[name]}" for name in names if name in NOTES]
    if any(name.startswith("95%") for name in names) and min(each.launches for each in contenders) < MIN_LAUNCHES:
        notes.append(f"95%: the interval, or of fewer than {MIN_LAUNCHES} launches the range of values")
    return ReportTable(title, names, tuple(tuple(row[number] for number in known) for row in rows), ("; ".join(notes),))


def _speed(contender: ContenderMetrics) -> tuple[str, ...]:
    ratio, rate, by_rank = contender.ratio_to_fastest, contender.samples_per_s, contender.samples_per_s_by_rank
    return (
        contender.label,
        str(contender.launches),
        "" if rate is None else _number(rate.value),
        "" if rate is None else _interval(rate, _number),
        "" if by_rank is None else " to ".join(dict.fromkeys(map(_number, (min(by_rank), max(by_rank))))),
        format_ms(contender.step_s.value),
        "" if ratio is None else f"{ratio.value:.3f}",
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


def _number(value: float) -> str:
    """Format with three significant digits or more, without an exponent: 1.23, 45.6, 12345."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cost(contender: ContenderMetrics) -> list[str]:
    cells = (_known(getattr(contender, metric), spec, scale) for metric, spec, scale, _ in COST.values())
    return [contender.label, *cells]


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


def write_folder(folder: Path, result: ComparisonResult, record: Mapping[str, Any], launches: Sequence[Launch]) -> Path:
    """Write plots, JSON and a page that needs no other file and no network; return the path of the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    plots = draw_plots(result, group_by_contender(launches))
    for name, plot in plots.items():
        (folder / f"{name}.svg").write_text(plot.svg)
    data = dump_json(record).encode()
    (folder / "comparison.json").write_bytes(data)
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
    text = environment.get_template("page.html.j2").render(
        result=result,
        setup=setup,
        summary=", ".join(f"{settings[name]} {name}" for name in ("ranks", "model", "script") if name in settings),
        tables=list(tables(result)),
        bandwidth=_bandwidth_table(result.contenders),
        classes={each.label: _css_class(each, result) for each in result.contenders},
        plots=[(plot.alt, b64encode(plot.svg.encode()).decode()) for plot in plots.values()],
        launches=[*map(_page_row, launches)],
        commands={launch.label: launch.command for launch in launches},
        data=b64encode(data).decode(),
        data_size=format_size(len(data)),
    )
    page = folder / "report.html"
    page.write_text(text)
    return page


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
