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


def draw_plots(result: ComparisonResult, launches: Launches) -> dict[str, bytes]:
    """Return PNGs by name, without plots that have no data."""
    if not result.cells:
        return {}
    colours = dict(zip(sorted(cell.key for cell in result.cells), cycle(COLOURS), strict=False))
    drawn = {
        "steps": _steps(result.cells, launches, colours),
        "bandwidth": _bandwidth(result.cells, colours),
        "scaling": _scaling(result.cells, colours),
        "losses": _losses(result.cells, launches, colours),
    }
    return {name: png for name, png in drawn.items() if png is not None}


def _render(height: float, draw: Callable[[Axes], None]) -> bytes:
    """Return the PNG of one plot, without a display or pyplot's global state."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        draw(figure.subplots())
        file = BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _steps(cells: Sequence[CellMetrics], launches: Launches, colours: Mapping[str, str]) -> bytes:
    """Draw a box for the steps of each cell and a dot for the median of each launch; the fastest on top."""
    times = [[1e3 * step for launch in launches[cell.key] for step in launch.steps] for cell in cells]
    most = max(float(numpy.quantile(each, SHOWN_QUANTILE)) for each in times)
    hidden = sum(step > most for each in times for step in each)

    def draw(axes: Axes) -> None:
        positions = list(range(len(cells), 0, -1))
        boxes = axes.boxplot(
            times,
            positions=positions,
            orientation="horizontal",
            widths=0.55,
            whis=(5, 95),
            showfliers=False,
            patch_artist=True,
        )
        for cell, box, middle in zip(cells, boxes["boxes"], boxes["medians"], strict=True):
            box.set(facecolor=colours[cell.key], alpha=0.35, edgecolor=colours[cell.key])
            middle.set(color=colours[cell.key], linewidth=2)
        ends = zip([cell for cell in cells for _ in range(2)], boxes["whiskers"], boxes["caps"], strict=True)
        for cell, whisker, cap in ends:
            whisker.set(color=colours[cell.key])
            cap.set(color=colours[cell.key])
        for cell, position in zip(cells, positions, strict=True):
            medians = [1e3 * launch.step_s for launch in launches[cell.key]]
            axes.plot(
                medians,
                [position] * len(medians),
                "o",
                color=colours[cell.key],
                markersize=4,
                alpha=0.9,
                markeredgecolor="white",
                markeredgewidth=0.5,
            )
        axes.set_yticks(positions, [cell.label for cell in cells])
        axes.set_xlim(0, most * 1.03)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("step time of the slowest rank, ms")
        left_out = f"; {hidden} slower step{'s' * (hidden > 1)} left out" if hidden else ""
        axes.set_title("Step times", pad=20)
        axes.annotate(
            f"box: quartiles of all steps; whiskers: 5% to 95%; dots: median of each launch{left_out}",
            (1, 1),
            ha="right",
            xycoords="axes fraction",
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=8,
            color="#555555",
        )

    return _render(1.3 + 0.42 * len(cells), draw)


def _bandwidth(cells: Sequence[CellMetrics], colours: Mapping[str, str]) -> bytes | None:
    """Draw bus bandwidth by size: dualdist solid, the raw library dashed."""
    measured = [cell for cell in cells if cell.bandwidth]
    if not measured:
        return None

    def draw(axes: Axes) -> None:
        for cell in measured:
            sizes = [point.nbytes for point in cell.bandwidth]
            axes.plot(
                sizes,
                [point.bus_gb_s for point in cell.bandwidth],
                "o-",
                color=colours[cell.key],
                label=cell.label,
                markersize=4,
            )
            axes.plot(
                sizes,
                [point.raw_bus_gb_s for point in cell.bandwidth],
                "--",
                color=colours[cell.key],
                linewidth=1,
                alpha=0.8,
            )
        axes.plot([], [], "--", color="#555555", linewidth=1, label="raw library")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = [point.nbytes for point in measured[0].bandwidth]
        axes.set_xticks(sizes, [format_size(size) for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("size of the allreduce")
        axes.set_ylabel("bus bandwidth, GB/s")
        axes.set_title("Allreduce")
        axes.legend(loc="upper left", fontsize=8)

    return _render(4.6, draw)


def _scaling(cells: Sequence[CellMetrics], colours: Mapping[str, str]) -> bytes | None:
    """Draw samples per second, with those of one rank and of linear scaling."""
    one = next((cell for cell in cells if cell.kind == "one" and cell.samples_per_s is not None), None)
    several = [(cell, rate) for cell in cells if cell.kind != "one" and (rate := cell.samples_per_s) is not None]
    if one is None or one.samples_per_s is None or not several:
        return None
    alone, ranks = one.samples_per_s.value, len(several[0][0].samples_per_s_by_rank or ())

    def draw(axes: Axes) -> None:
        positions = list(range(len(several), 0, -1))
        for (cell, rate), position in zip(several, positions, strict=True):
            axes.barh(position, rate.value, height=0.6, color=colours[cell.key], alpha=0.75)
            axes.plot([rate.low, rate.high], [position, position], color="#222222", linewidth=1.5)
            share = "" if cell.scaling_efficiency is None else f"{cell.scaling_efficiency.value:.0%}"
            axes.annotate(
                share,
                (max(rate.high, rate.value), position),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over a dotted line
            )
        for value, text in ((alone, "one rank"), (ranks * alone, f"{ranks} x one rank")):
            axes.axvline(value, color="#222222", linestyle=":", linewidth=1.2)
            axes.annotate(
                text, (value, len(several) + 0.55), ha="center", va="bottom", fontsize=8, annotation_clip=False
            )
        most = max([ranks * alone, *(rate.high for _, rate in several)])
        axes.set_xlim(0, most * 1.12)
        axes.set_ylim(0.4, len(several) + 0.55)
        axes.set_yticks(positions, [cell.label for cell, _ in several])
        axes.grid(axis="y", visible=False)
        line = "; black line: 95% interval" if any(rate.low < rate.high for _, rate in several) else ""
        axes.set_xlabel(f"samples per second on {ranks} ranks\n%: scaling efficiency against one rank{line}")
        axes.set_title("Scaling", pad=18)

    return _render(1.4 + 0.42 * len(several), draw)


def _losses(cells: Sequence[CellMetrics], launches: Launches, colours: Mapping[str, str]) -> bytes | None:
    """Draw the loss of every step, wider lines below, so that equal losses stay visible on top of each other."""
    shown = [cell for cell in cells if cell.kind not in NOT_AVERAGED]
    known = [(cell, launches[cell.key][0].losses) for cell in shown]
    known = [(cell, losses) for cell, losses in known if losses and None not in losses]
    if not known:
        return None

    def draw(axes: Axes) -> None:
        for position, (cell, losses) in enumerate(known):
            width = 1.2 + 1.4 * (len(known) - 1 - position)
            steps = range(1, len(losses) + 1)
            values: list[Any] = list(losses)
            axes.plot(
                steps,
                values,
                color=colours[cell.key],
                linewidth=width,
                label=cell.label,
                solid_capstyle="round",
                alpha=0.9,
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step, warm-up included")
        axes.set_ylabel("loss, mean over ranks")
        axes.set_title("Losses, drawn on top of each other")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return _render(3.8, draw)
