"""Plots of a comparison as PNG: step times, allreduce bandwidth, scaling, and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import cycle
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dualdist.bench.compare.launches import Launch
from dualdist.bench.compare.matrix import NOT_AVERAGED
from dualdist.bench.compare.metrics import CellMetrics, ComparisonResult
from dualdist.bench.report import format_size

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
# Slower steps are left out and counted in the title: a single outlier would compress the rest.
SHOWN_QUANTILE = 0.99

Launches = Mapping[str, Sequence[Launch]]  # by the key of a cell
Colours = Mapping[str, str]


def draw_plots(result: ComparisonResult, launches: Launches) -> dict[str, bytes]:
    """Return PNGs by name, without plots that have no data."""
    cells = result.cells
    colours = dict(zip(sorted(cell.key for cell in cells), cycle(COLOURS), strict=False))
    swept = [cell for cell in cells if cell.bandwidth]
    one = next((cell.samples_per_s for cell in cells if cell.kind == "one"), None)
    scaled = [cell for cell in cells if cell.kind != "one" and cell.samples_per_s is not None]
    losses = [(cell, launches[cell.key][0].losses) for cell in cells if cell.kind not in NOT_AVERAGED]
    losses = [(cell, values) for cell, values in losses if values and None not in values]
    drawn = {}
    if cells:
        drawn["steps"] = _render(1.4 + 0.42 * len(cells), _draw_steps, cells, launches, colours)
    if swept:
        drawn["bandwidth"] = _render(4.6, _draw_bandwidth, swept, colours)
    if one is not None and scaled:
        drawn["scaling"] = _render(1.4 + 0.42 * len(scaled), _draw_scaling, scaled, one.value, colours)
    if losses:
        drawn["losses"] = _render(3.8, _draw_losses, losses, colours)
    return drawn


def _render(height: float, draw: Callable[..., None], *data: Any) -> bytes:
    """Return the PNG of one plot, without a display or pyplot's global state."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        draw(figure.subplots(), *data)
        file = BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _label_rows(axes: Axes, cells: Sequence[CellMetrics]) -> list[int]:
    """Label a row for each cell, the first on top; return their positions."""
    positions = list(range(len(cells), 0, -1))
    axes.set_yticks(positions, [cell.label for cell in cells])
    axes.grid(axis="y", visible=False)
    return positions


def _draw_steps(axes: Axes, cells: Sequence[CellMetrics], launches: Launches, colours: Colours) -> None:
    """Draw a box for the steps of each cell and a dot for the median of each launch; the fastest on top."""
    times = [[1e3 * step for launch in launches[cell.key] for step in launch.steps] for cell in cells]
    most = max(float(numpy.quantile(each, SHOWN_QUANTILE)) for each in times)
    for cell, steps, position in zip(cells, times, _label_rows(axes, cells), strict=True):
        line: Any = {"color": colours[cell.key]}
        box = {"facecolor": colours[cell.key], "edgecolor": colours[cell.key], "alpha": 0.35}
        style: Any = {"boxprops": box, "medianprops": {**line, "linewidth": 2}, "whiskerprops": line, "capprops": line}
        row: Any = {"positions": [position], "orientation": "horizontal", "widths": 0.55, "patch_artist": True}
        axes.boxplot([steps], whis=(5, 95), showfliers=False, **row, **style)
        medians = [1e3 * launch.step_s for launch in launches[cell.key]]
        edge: Any = {"markeredgecolor": "white", "markeredgewidth": 0.5}
        axes.plot(medians, [position] * len(medians), "o", **line, markersize=4, alpha=0.9, **edge)
    _label_rows(axes, cells)  # boxplot has replaced the labels
    axes.set_xlim(0, most * 1.03)
    hidden = sum(step > most for each in times for step in each)
    left_out = f"; {hidden} slower step{'s' * (hidden > 1)} left out" if hidden else ""
    axes.set_xlabel(
        "step time of the slowest rank, ms\n"
        f"box: quartiles of all steps; whiskers: 5% to 95%; dots: median of each launch{left_out}"
    )
    axes.set_title("Step times")


def _draw_bandwidth(axes: Axes, cells: Sequence[CellMetrics], colours: Colours) -> None:
    """Draw bus bandwidth by size: dualdist solid, the raw library dashed."""
    for cell in cells:
        sizes, colour = [point.nbytes for point in cell.bandwidth], colours[cell.key]
        ours, raw = zip(*((point.bus_gb_s, point.raw_bus_gb_s) for point in cell.bandwidth), strict=True)
        axes.plot(sizes, ours, "o-", color=colour, label=cell.label, markersize=4)
        axes.plot(sizes, raw, "--", color=colour, linewidth=1, alpha=0.8)
    axes.plot([], [], "--", color="#555555", linewidth=1, label="raw library")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [point.nbytes for point in cells[0].bandwidth]
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("size of the allreduce")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_title("Allreduce")
    axes.legend(loc="upper left", fontsize=8)


def _draw_scaling(axes: Axes, cells: Sequence[CellMetrics], one_rank: float, colours: Colours) -> None:
    """Draw samples per second, with those of one rank and of linear scaling."""
    rates = [cell.samples_per_s for cell in cells if cell.samples_per_s is not None]
    ranks = len(cells[0].samples_per_s_by_rank or ())
    for cell, rate, position in zip(cells, rates, _label_rows(axes, cells), strict=True):
        axes.barh(position, rate.value, height=0.6, color=colours[cell.key], alpha=0.75)
        axes.plot([rate.low, rate.high], [position, position], color="#222222", linewidth=1.5)
        share = "" if cell.scaling_efficiency is None else f"{cell.scaling_efficiency.value:.0%}"
        where, box = (max(rate.high, rate.value), position), {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(share, where, xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, bbox=box)
    top = len(cells) + 0.55
    for value, text in ((one_rank, "one rank"), (ranks * one_rank, f"{ranks} x one rank")):
        axes.axvline(value, color="#222222", linestyle=":", linewidth=1.2)
        axes.annotate(text, (value, top), ha="center", va="bottom", fontsize=8, annotation_clip=False)
    axes.set_xlim(0, 1.12 * max(ranks * one_rank, *(rate.high for rate in rates)))
    axes.set_ylim(0.4, top)
    line = "; black line: 95% interval" if any(rate.low < rate.high for rate in rates) else ""
    axes.set_xlabel(f"samples per second on {ranks} ranks\n%: scaling efficiency against one rank{line}")
    axes.set_title("Scaling", pad=18)


def _draw_losses(axes: Axes, losses: Sequence[tuple[CellMetrics, Sequence[Any]]], colours: Colours) -> None:
    """Draw the loss of every step, wider lines below, so that equal losses stay visible on top of each other."""
    for number, (cell, values) in enumerate(losses, 1):
        style: Any = {"color": colours[cell.key], "linewidth": 1.2 + 1.4 * (len(losses) - number), "alpha": 0.9}
        axes.plot(range(1, len(values) + 1), values, label=cell.label, solid_capstyle="round", **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step, warm-up included")
    axes.set_ylabel("loss, mean over ranks")
    axes.set_title("Losses, drawn on top of each other")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
