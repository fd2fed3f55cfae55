"""The plots of a comparison, as PNG: step times, allreduce bandwidth, scaling, and losses on top of each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dualdist.bench.compare.figures import CellFigures, ComparisonResult
from dualdist.bench.compare.launches import Launch
from dualdist.bench.report import size_words
from dualdist.bench.statistics import quantile

# Okabe and Ito's colours, which people of any colour vision tell apart.
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
# Steps beyond are left out of the picture, and counted in its title: one that waited for somebody else hides the rest.
SHOWN = 0.99

Launches = Mapping[str, Sequence[Launch]]  # by the key of a cell


def plots(result: ComparisonResult, launches: Launches) -> dict[str, bytes]:
    """PNGs by name; a plot for which nothing was measured is left out."""
    if not result.cells:
        return {}
    chosen = cycle(COLOURS)
    colours = {cell.key: next(chosen) for cell in sorted(result.cells, key=lambda cell: cell.key)}
    drawn = {
        "steps": _steps(result.cells, launches, colours),
        "bandwidth": _bandwidth(result.cells, colours),
        "scaling": _scaling(result.cells, colours),
        "losses": _losses(result.cells, launches, colours),
    }
    return {name: png for name, png in drawn.items() if png is not None}


def _drawn(height: float, draw: Callable[[Axes], None]) -> bytes:
    """The PNG of one plot; without a display, and without matplotlib's own state."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        draw(figure.subplots())
        file = BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _steps(cells: Sequence[CellFigures], launches: Launches, colours: Mapping[str, str]) -> bytes:
    """A box for the steps of each cell, and a dot for the median of each of its launches; the fastest on top."""
    times = [sorted(1e3 * step for launch in launches[cell.key] for step in launch.steps) for cell in cells]
    most = max(quantile(each, SHOWN) for each in times)
    hidden = sum(step > most for each in times for step in each)

    def draw(axes: Axes) -> None:
        places = list(range(len(cells), 0, -1))
        boxes = axes.boxplot(
            times,
            positions=places,
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
        for cell, place in zip(cells, places, strict=True):
            medians = [1e3 * launch.step_s for launch in launches[cell.key]]
            axes.plot(
                medians,
                [place] * len(medians),
                "o",
                color=colours[cell.key],
                markersize=4,
                alpha=0.9,
                markeredgecolor="white",
                markeredgewidth=0.5,
            )
        axes.set_yticks(places, [cell.label for cell in cells])
        axes.set_xlim(0, most * 1.03)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("ms a step, on its slowest rank")
        left_out = f"; {hidden} slower step{'s' * (hidden > 1)} left out" if hidden else ""
        axes.set_title("Step times", pad=20)
        axes.annotate(
            f"box: middle half of all steps; whiskers: 5% to 95%; dots: the median of each launch{left_out}",
            (1, 1),
            ha="right",
            xycoords="axes fraction",
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=8,
            color="#555555",
        )

    return _drawn(1.3 + 0.42 * len(cells), draw)


def _bandwidth(cells: Sequence[CellFigures], colours: Mapping[str, str]) -> bytes | None:
    """Bus bandwidth by size: ours drawn through, the library below dashed."""
    measured = [cell for cell in cells if cell.curve]
    if not measured:
        return None

    def draw(axes: Axes) -> None:
        for cell in measured:
            sizes = [point.nbytes for point in cell.curve]
            axes.plot(
                sizes,
                [point.bus_gb_s for point in cell.curve],
                "o-",
                color=colours[cell.key],
                label=cell.label,
                markersize=4,
            )
            axes.plot(
                sizes,
                [point.raw_bus_gb_s for point in cell.curve],
                "--",
                color=colours[cell.key],
                linewidth=1,
                alpha=0.8,
            )
        axes.plot([], [], "--", color="#555555", linewidth=1, label="the library below, alone")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = [point.nbytes for point in measured[0].curve]
        axes.set_xticks(sizes, [size_words(size) for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("bytes of an allreduce")
        axes.set_ylabel("bus bandwidth, GB/s")
        axes.set_title("Allreduce")
        axes.legend(loc="upper left", fontsize=8)

    return _drawn(4.6, draw)


def _scaling(cells: Sequence[CellFigures], colours: Mapping[str, str]) -> bytes | None:
    """Samples a second beside those of one rank, times the number of ranks."""
    one = next((cell for cell in cells if cell.kind == "one" and cell.rate is not None), None)
    several = [cell for cell in cells if cell.kind != "one" and cell.rate is not None]
    if one is None or one.rate is None or not several:
        return None
    alone, ranks = one.rate.value, len(several[0].rate_of_ranks or ())

    def draw(axes: Axes) -> None:
        places = list(range(len(several), 0, -1))
        for cell, place in zip(several, places, strict=True):
            rate = cell.rate
            assert rate is not None
            axes.barh(place, rate.value, height=0.6, color=colours[cell.key], alpha=0.75)
            axes.plot([rate.low, rate.high], [place, place], color="#222222", linewidth=1.5)
            share = "" if cell.efficiency is None else f"{cell.efficiency.value:.0%}"
            axes.annotate(
                share,
                (max(rate.high, rate.value), place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over a dotted line
            )
        for rate_there, words in ((alone, "one rank"), (ranks * alone, f"{ranks} x one rank")):
            axes.axvline(rate_there, color="#222222", linestyle=":", linewidth=1.2)
            axes.annotate(
                words, (rate_there, len(several) + 0.55), ha="center", va="bottom", fontsize=8, annotation_clip=False
            )
        most = max([ranks * alone, *(cell.rate.high for cell in several if cell.rate is not None)])
        axes.set_xlim(0, most * 1.12)
        axes.set_ylim(0.4, len(several) + 0.55)
        axes.set_yticks(places, [cell.label for cell in several])
        axes.grid(axis="y", visible=False)
        has_interval = any(cell.rate.low < cell.rate.high for cell in several if cell.rate is not None)
        line = "; black line: 95% interval" if has_interval else ""
        axes.set_xlabel(
            f"samples a second on {ranks} ranks\n%: efficiency against one rank{line}"
        )  # one line is too long
        axes.set_title("Scaling", pad=18)

    return _drawn(1.4 + 0.42 * len(several), draw)


def _losses(cells: Sequence[CellFigures], launches: Launches, colours: Mapping[str, str]) -> bytes | None:
    """The loss of every step, one line a cell, the wider ones below: lines that agree lie on top of each other."""
    shown = [cell for cell in cells if cell.kind not in ("none", "one")]
    known = [(cell, launches[cell.key][0].losses) for cell in shown]
    known = [(cell, losses) for cell, losses in known if losses and None not in losses]
    if not known:
        return None

    def draw(axes: Axes) -> None:
        for place, (cell, losses) in enumerate(known):
            width = 1.2 + 1.4 * (len(known) - 1 - place)
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
        axes.set_ylabel("loss, the mean over ranks")
        axes.set_title("Losses, on top of each other")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return _drawn(3.8, draw)
