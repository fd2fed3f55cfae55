"""Output of a comparison: tables, CSV, plots, and a folder with an HTML page of all of them and the raw data."""

from __future__ import annotations

import csv
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

from dualdist.bench.compare.launches import OVER_RANKS, Launch, group_by_contender
from dualdist.bench.compare.metrics import ComparisonResult, ContenderMetrics
from dualdist.bench.compare.runner import NOT_AVERAGED
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
SPEED = ("contender", "launches", "samples/s", "95%", "per rank", "step ms", "/ fastest", "95% ")
SPEED_OF_SCRIPT = ("contender", "launches", "steps/s", "95%", "step ms", "/ fastest", "95% ")
COST = (
    *("contender", "exposed ms", "efficiency", "8 B us", "bus GB/s", "start s"),
    *("host MiB", "GPU MiB", "TCP MiB/step", "CPU ms/step"),
)
SPEED_NOTE = (
    "step: of the slowest rank, the median of its launch; / fastest: step time over that of the fastest candidate, "
    "launches of the same round"
)
COST_NOTE = (
    "exposed: step time minus that without communication; efficiency: against one rank with its share of the batch; "
    "8 B, bus: latency of an allreduce, and bus bandwidth of the largest (as nccl-tests); start: from the launch to "
    "the end of the first step; host, GPU: peak memory, maximum over ranks; TCP: bytes a rank sends over TCP, which "
    "shared memory does not use; CPU: sum over ranks"
)
CSV_COLUMNS = (
    *("contender", "label", "launcher", "backend", "transport", "round", "began", "step_s", "samples_per_s"),
    *("startup_s", "init_s", "peak_bytes", "device_peak_bytes", "tcp_bytes_per_step", "cpu_s_per_step"),
    *("foreign_cores", "first_loss", "last_loss", "digest", "error"),
)


def tables(result: ComparisonResult) -> Iterator[ReportTable]:
    """Yield the tables of speed, of cost, and of contenders that were not measured."""
    if result.contenders:
        yield _speed_table(result.contenders)
        yield _cost_table(result.contenders)
    if result.refused:
        yield failure_table("contender", [(each.contender.label, each.reason) for each in result.refused])


def _speed_table(contenders: Sequence[ContenderMetrics]) -> ReportTable:
    is_script = all(each.samples_per_s is None for each in contenders)
    too_few = min(each.launches for each in contenders) < MIN_LAUNCHES
    note = (
        f"; with fewer than {MIN_LAUNCHES} launches the range of values instead of the 95% interval" if too_few else ""
    )
    columns = SPEED_OF_SCRIPT if is_script else SPEED
    return ReportTable("Speed", columns, tuple(_speed(each, is_script) for each in contenders), (SPEED_NOTE + note,))


def _speed(contender: ContenderMetrics, is_script: bool) -> tuple[str, ...]:
    ratio, rate = contender.ratio_to_fastest, contender.samples_per_s or contender.step_s.inverse()
    by_rank = contender.samples_per_s_by_rank
    return (
        contender.label,
        str(contender.launches),
        _number(rate.value),
        f"{_number(rate.low)} to {_number(rate.high)}",
        *(() if is_script else ("-" if by_rank is None else _range(by_rank),)),
        format_ms(contender.step_s.value),
        _known(ratio, ".3f"),
        "-" if ratio is None else f"{ratio.low:.3f} to {ratio.high:.3f}",
    )


def _known(value: MedianInterval | float | None, spec: str, scale: float = 1) -> str:
    """Format a value times a scale, or "-" for None."""
    number = value.value if isinstance(value, MedianInterval) else value
    return "-" if number is None else format(number * scale, spec)


def _range(values: Sequence[float]) -> str:
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Format with three significant digits or more, without an exponent: 1.23, 45.6, 12345."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cost_table(contenders: Sequence[ContenderMetrics]) -> ReportTable:
    """Return the table without columns that are unknown for all contenders."""
    rows = [_cost(each) for each in contenders]
    known = [column for column in range(len(COST)) if any(row[column] != "-" for row in rows)]
    columns, *shown = (tuple(row[column] for column in known) for row in (COST, *rows))
    return ReportTable("Cost", columns, tuple(shown), (COST_NOTE,))


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
        _known(contender.cpu_s, ".1f", 1e3),
    )


def _bandwidth_table(contenders: Sequence[ContenderMetrics]) -> ReportTable:
    rows = tuple(
        (
            contender.label,
            format_size(point.nbytes),
            format_us(point.seconds),
            format_us(point.raw_seconds),
            f"{point.bus_gb_s:.3g}",
            f"{point.raw_bus_gb_s:.3g}",
        )
        for contender in contenders
        for point in contender.bandwidth
    )
    return ReportTable("Allreduce", ("contender", "size", "us", "us, raw library", "bus GB/s", "raw library"), rows)


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
    of_step = {"tcp_bytes": "tcp_bytes_per_step", "cpu_s": "cpu_s_per_step"}
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
    for name, png in plots.items():
        (folder / f"{name}.png").write_bytes(png)
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
        bandwidth=_bandwidth_table(result.contenders),
        classes={each.label: _css_class(each, result) for each in result.contenders},
        plots={name: b64encode(png).decode() for name, png in plots.items()},
        setup=setup,
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
        return (label, number, *["-"] * 5, error_summary(launch.error or ""))
    return (
        label,
        number,
        format_ms(launch.step_s),
        "-" if launch.batch is None else f"{launch.batch / launch.step_s:.4g}",
        f"{launch.startup_s:.1f}",
        _known(launch.foreign_cores, ".2f"),
        launch.first.digest[:12],
        "",
    )


# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000", "#B8A800", "#6A3D9A")
WIDTH, DPI = 9.0, 144
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
# Slower steps are left out and counted: a single outlier would compress the rest.
SHOWN_QUANTILE = 0.99
WIDEST, THINNEST = 7.0, 1.2  # lines of losses, in points

Launches = Mapping[str, Sequence[Launch]]  # by the key of a contender
Colours = Mapping[str, str]


def draw_plots(result: ComparisonResult, launches: Launches) -> dict[str, bytes]:
    """Return PNGs by name, without plots that have no data."""
    every = result.contenders
    colours = dict(zip(sorted(each.key for each in every), cycle(COLOURS), strict=False))
    swept = [each for each in every if each.bandwidth]
    one = next((each.samples_per_s for each in every if each.method == "one"), None)
    scaled = [each for each in every if each.method != "one" and each.samples_per_s is not None]
    losses = [(each, launches[each.key][0].losses) for each in every if each.method not in NOT_AVERAGED]
    losses = [(each, values) for each, values in losses if values and None not in values]
    drawn = {}
    if every:
        drawn["steps"] = _render(1.4 + 0.42 * len(every), _draw_steps, every, launches, colours)
    if swept:
        drawn["bandwidth"] = _render(4.6, _draw_bandwidth, swept, colours)
    if one is not None and scaled:
        drawn["scaling"] = _render(1.4 + 0.42 * len(scaled), _draw_scaling, scaled, one.value, colours)
    if losses:
        drawn["losses"] = _render(3.8, _draw_losses, losses, colours)
    return drawn


def _render(height: float, draw: Callable[..., None], *data: Any) -> bytes:
    """Return the PNG of one plot, without a display or pyplot's global state."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        draw(figure.subplots(), *data)
        file = BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _label_rows(axes: Any, contenders: Sequence[ContenderMetrics]) -> list[int]:
    """Label a row for each contender, the first on top; return their positions."""
    positions = list(range(len(contenders), 0, -1))
    axes.set_yticks(positions, [each.label for each in contenders])
    axes.grid(axis="y", visible=False)
    return positions


def _draw_steps(axes: Any, contenders: Sequence[ContenderMetrics], launches: Launches, colours: Colours) -> None:
    """Draw a box for the steps of each contender and a dot for the median of each launch; the fastest on top."""
    import numpy

    times = [[1e3 * step for launch in launches[each.key] for step in launch.steps] for each in contenders]
    most = max(float(numpy.quantile(each, SHOWN_QUANTILE)) for each in times)
    for contender, steps, position in zip(contenders, times, _label_rows(axes, contenders), strict=True):
        line: Any = {"color": colours[contender.key]}
        box = {"facecolor": colours[contender.key], "edgecolor": colours[contender.key], "alpha": 0.35}
        style: Any = {"boxprops": box, "medianprops": {**line, "linewidth": 2}, "whiskerprops": line, "capprops": line}
        row: Any = {"positions": [position], "orientation": "horizontal", "widths": 0.55, "patch_artist": True}
        axes.boxplot([steps], whis=(5, 95), showfliers=False, **row, **style)
        medians = [1e3 * launch.step_s for launch in launches[contender.key]]
        edge: Any = {"markeredgecolor": "white", "markeredgewidth": 0.5}
        axes.plot(medians, [position] * len(medians), "o", **line, markersize=5, alpha=0.9, zorder=3, **edge)
    _label_rows(axes, contenders)  # boxplot has replaced the labels
    axes.set_xlim(0, most * 1.03)
    hidden = sum(step > most for each in times for step in each)
    left_out = f"; {hidden} slower step{'s' * (hidden > 1)} left out" if hidden else ""
    axes.set_xlabel(
        f"step time of the slowest rank, ms{left_out}\n"
        "box: quartiles of all steps; whiskers: 5% to 95%; dots: median of each launch"
    )
    axes.set_title("Step times")


def _draw_bandwidth(axes: Any, contenders: Sequence[ContenderMetrics], colours: Colours) -> None:
    """Draw bus bandwidth by size: dualdist solid, the raw library dashed."""
    for contender in contenders:
        sizes, colour = [point.nbytes for point in contender.bandwidth], colours[contender.key]
        ours, raw = zip(*((point.bus_gb_s, point.raw_bus_gb_s) for point in contender.bandwidth), strict=True)
        axes.plot(sizes, ours, "o-", color=colour, label=contender.label, markersize=4)
        axes.plot(sizes, raw, "--", color=colour, linewidth=1, alpha=0.8)
    axes.plot([], [], "--", color="#555555", linewidth=1, label="raw library")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [point.nbytes for point in contenders[0].bandwidth]
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("size of the allreduce")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_title("Allreduce")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_scaling(axes: Any, contenders: Sequence[ContenderMetrics], one_rank: float, colours: Colours) -> None:
    """Draw samples per second, with those of one rank and of linear scaling."""
    rates = [each.samples_per_s for each in contenders if each.samples_per_s is not None]
    ranks = len(contenders[0].samples_per_s_by_rank or ())
    for contender, rate, position in zip(contenders, rates, _label_rows(axes, contenders), strict=True):
        axes.barh(position, rate.value, height=0.6, color=colours[contender.key], alpha=0.75)
        axes.plot([rate.low, rate.high], [position, position], color="#222222", linewidth=1.5)
        share = "" if contender.scaling_efficiency is None else f"{contender.scaling_efficiency.value:.0%}"
        where, box = (max(rate.high, rate.value), position), {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(share, where, xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, bbox=box)
    top = len(contenders) + 0.55
    for value, text in ((one_rank, "one rank"), (ranks * one_rank, f"{ranks} x one rank")):
        axes.axvline(value, color="#222222", linestyle=":", linewidth=1.2)
        axes.annotate(text, (value, top), ha="center", va="bottom", fontsize=8, annotation_clip=False)
    axes.set_xlim(0, 1.12 * max(ranks * one_rank, *(rate.high for rate in rates)))
    axes.set_ylim(0.4, top)
    line = "; black line: 95% interval" if any(rate.low < rate.high for rate in rates) else ""
    axes.set_xlabel(f"samples per second on {ranks} ranks\n%: scaling efficiency against one rank{line}")
    axes.set_title("Scaling", pad=18)


def _draw_losses(axes: Any, losses: Sequence[tuple[ContenderMetrics, Sequence[Any]]], colours: Colours) -> None:
    """Draw the loss of every step, wider lines below, so that equal losses stay visible on top of each other."""
    narrower = (WIDEST - THINNEST) / max(len(losses) - 1, 1)
    for number, (contender, values) in enumerate(losses):
        style: Any = {"color": colours[contender.key], "linewidth": WIDEST - narrower * number}
        axes.plot(range(1, len(values) + 1), values, label=contender.label, solid_capstyle="round", **style)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlim(left=1)
    axes.set_xlabel("step, warm-up included")
    axes.set_ylabel("loss, mean over ranks")
    axes.set_title("Losses, drawn on top of each other")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
