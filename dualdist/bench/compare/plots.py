"""Plots of a comparison as SVG, for a light and a dark page: step times, allreduce and losses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import cycle
from typing import Any

from dualdist.bench.compare.launches import Launch
from dualdist.bench.compare.metrics import ComparisonResult, ContenderMetrics
from dualdist.bench.compare.runner import NOT_AVERAGED
from dualdist.bench.compare.verdict import relative_difference
from dualdist.bench.report import format_size

# Okabe and Ito's colours, which colour-blind readers can distinguish, and four that also stand out on both papers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#B8A800", "#9A6FD0", "#A65628")
INK, SOFT, LINE, PAPER = "#1c2430", "#5b6675", "#dfe4ea", "#ffffff"
# The colours of the page stand in the SVG itself, as not every viewer knows CSS; a dark page inverts their lightness.
NIGHT = "@media screen and (prefers-color-scheme: dark) {svg {filter: invert(0.9) hue-rotate(180deg)}}"
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 6.4, 0.7, 0.25, 0.8, 0.75  # inches, the same in every plot
ROW, LEGEND_ROW = 0.65, 0.22
STYLE: Any = {
    "font.size": 11,
    "svg.hashsalt": "dualdist",  # the same data give the same file
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.facecolor": "none",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "figure.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": LINE,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.markersize": 5,
}
BOX = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}  # behind text that a line would cross
# Slower steps are left out and counted: a single outlier would compress the rest.
SHOWN_QUANTILE = 0.99
LARGE = 1 << 20  # bytes from which an allreduce is a matter of bandwidth, not of latency

Launches = Mapping[str, Sequence[Launch]]  # the launches of each contender, by its key
Losses = Sequence[tuple[ContenderMetrics, Sequence[float]]]


@dataclass(frozen=True)
class Plot:
    """An SVG, and what it shows in words."""

    svg: str
    alt: str


def draw_plots(result: ComparisonResult, launches: Launches) -> dict[str, Plot]:
    """Return the plots by name, without those that have no data."""
    every = result.contenders
    colours = dict(zip(sorted(each.key for each in every), cycle(COLOURS), strict=False))
    swept = [each for each in every if each.bandwidth]
    found = [(each, launches[each.key][0].losses) for each in every if each.method not in NOT_AVERAGED]
    losses = [(each, [loss for loss in values if loss is not None]) for each, values in found if None not in values]
    drawn = {}
    if every:
        drawn["steps"] = _draw_steps(every, launches, colours)
    if swept:
        drawn["allreduce"] = _draw_allreduce(swept, colours)
    if losses and losses[0][1]:
        drawn["losses"] = _draw_losses(losses, colours)
    return drawn


def _render(
    title: str, subtitle: str, alt: str, height: float, draw: Callable[[Any], None], legend_rows: int = 0
) -> Plot:
    """Return a plot `height` inches high, of two panels if it has a legend; pyplot's global state is not used."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        legend, panels = LEGEND_ROW * legend_rows, 2 if legend_rows else 1
        top = TOP + 0.2 * (panels - 1)
        whole = top + height + BOTTOM + legend
        figure = Figure(figsize=(WIDTH, whole))
        edges = {"left": LEFT / WIDTH, "right": 1 - RIGHT / WIDTH, "top": 1 - top / whole}
        axes = figure.subplots(1, panels, gridspec_kw={**edges, "bottom": (BOTTOM + legend) / whole, "wspace": 0.35})
        figure.text(LEFT / WIDTH, 1 - 0.3 / whole, title, weight="bold", size=13)
        figure.text(LEFT / WIDTH, 1 - 0.54 / whole, subtitle, color=SOFT, size=10)
        draw(axes)
        if legend:
            place: Any = {"loc": "lower left", "bbox_to_anchor": (LEFT / WIDTH, 0.08 / whole), "borderaxespad": 0.0}
            figure.legend(*axes[0].get_legend_handles_labels(), **place, borderpad=0.0, handletextpad=0.5)
        file = StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": "dualdist compare", "Title": alt})
    return Plot(file.getvalue().replace("<defs>", f"<style>{NIGHT}</style>\n <defs>", 1), alt)


def _draw_steps(contenders: Sequence[ContenderMetrics], launches: Launches, colours: Mapping[str, str]) -> Plot:
    """Draw a box for the steps of each contender and a dot for the median of each launch; the fastest on top."""
    import numpy

    times = [[1e3 * step for launch in launches[each.key] for step in launch.steps] for each in contenders]
    most = max(float(numpy.quantile(each, SHOWN_QUANTILE)) for each in times)
    hidden = sum(step > most for each in times for step in each)

    def draw(axes: Any) -> None:
        for number, (contender, steps) in enumerate(zip(contenders, times, strict=True)):
            position, colour = len(contenders) - number, colours[contender.key]
            name_place: Any = {"transform": axes.get_yaxis_transform(), "va": "bottom"}
            axes.text(0, position + 0.34, contender.label, size=10, bbox=BOX, **name_place)
            line: Any = {"color": colour}
            box = {"facecolor": colour, "edgecolor": colour, "alpha": 0.35}
            style = {"boxprops": box, "medianprops": {**line, "linewidth": 2}, "whiskerprops": line, "capprops": line}
            row = {"positions": [position], "orientation": "horizontal", "widths": 0.4, "patch_artist": True}
            axes.boxplot([steps], whis=(5, 95), showfliers=False, manage_ticks=False, **row, **style)
            medians = [1e3 * launch.step_s for launch in launches[contender.key]]
            edge = {"markeredgecolor": PAPER, "markeredgewidth": 0.5}
            axes.plot(medians, [position] * len(medians), "o", **line, zorder=3, **edge)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_ylim(0.55, len(contenders) + 0.75)
        axes.set_xlim(0, most * 1.03)
        left_out = f"; {hidden} slower step{'s' * (hidden > 1)} left out" if hidden else ""
        axes.set_xlabel(f"step time of the slowest rank, ms{left_out}")

    alt = "Step times: " + ", ".join(f"{each.label} {1e3 * each.step_s.value:.2f} ms" for each in contenders)
    subtitle = "box: quartiles of steps; whiskers: 5% and 95%; dots: each launch's median"
    return _render("Step times", subtitle, alt, ROW * len(contenders), draw)


def _draw_allreduce(contenders: Sequence[ContenderMetrics], colours: Mapping[str, str]) -> Plot:
    """Draw the latency of small messages and the bus bandwidth of large ones, with the spread over launches."""
    points = contenders[0].bandwidth
    sizes = [[each.nbytes for each in points if (each.nbytes >= LARGE) is is_large] for is_large in (False, True)]

    def draw(panels: Any) -> None:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        for axes, shown, name in zip(panels, sizes, ("seconds", "bus_gb_s"), strict=True):
            if not shown:  # over a slow link no size is large
                axes.set_visible(False)
                continue
            scale = 1e6 if name == "seconds" else 1.0
            for number, contender in enumerate(contenders):
                colour, found = colours[contender.key], {each.nbytes: each for each in contender.bandwidth}
                shift = 0.5 * ((number + 0.5) / len(contenders) - 0.5)
                places = [place + shift for place in range(len(shown))]
                for prefix, fill, label in (("", colour, contender.label), ("raw_", PAPER, None)):
                    values = [getattr(found[nbytes], prefix + name) for nbytes in shown]
                    sides = [(each.value - each.low, each.high - each.value) for each in values]
                    spread = [[max(0.0, scale * each) for each in side] for side in zip(*sides, strict=True)]
                    style = {"color": colour, "label": label, "markerfacecolor": fill, "elinewidth": 1.2}
                    axes.errorbar(places, [scale * each.value for each in values], spread, fmt="o", **style)
            axes.set_xticks(range(len(shown)), [format_size(size) for size in shown])
            axes.set_xlim(-0.5, len(shown) - 0.5)
            axes.set_xlabel("size")
            axes.grid(axis="x", visible=False)
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panels[0].yaxis.set_minor_formatter(NullFormatter())
        panels[0].set_title("latency, us", loc="left", size=10, color=SOFT)
        panels[1].set_ylim(bottom=0)
        panels[1].set_title("bus bandwidth, GB/s", loc="left", size=10, color=SOFT)

    def describe(contender: ContenderMetrics) -> str:
        first, last = contender.bandwidth[0], contender.bandwidth[-1]
        return (
            f"{contender.label} {1e6 * first.seconds.value:.0f} us (raw library {1e6 * first.raw_seconds.value:.0f}) "
            f"and {last.bus_gb_s.value:.2g} GB/s (raw {last.raw_bus_gb_s.value:.2g})"
        )

    ends = f"{format_size(points[0].nbytes)} and {format_size(points[-1].nbytes)}"
    alt = f"Allreduce of {ends}: {'; '.join(map(describe, contenders))}"
    subtitle = "filled: dualdist; hollow: the raw library; line: spread over launches"
    return _render("Allreduce", subtitle, alt, 2.6, draw, len(contenders))


def _draw_losses(losses: Losses, colours: Mapping[str, str]) -> Plot:
    """Draw the loss of the first contender, and say how far the others are from it."""
    (first, expected), *others = losses
    differences = [relative_difference(*each) for _, values in others for each in zip(values, expected, strict=False)]
    largest = max(differences, default=0.0)
    if not others:
        difference = f"of {first.label}"
    elif largest == 0:
        difference = f"the same to the last bit in all {len(losses)} contenders"
    else:
        difference = f"largest difference from {first.label}: {largest:.1g} of the loss"

    def draw(axes: Any) -> None:
        axes.plot(range(1, len(expected) + 1), expected, color=colours[first.key])
        axes.locator_params(axis="x", integer=True)
        axes.set_xlim(1, max(2, len(expected)))
        axes.set_xlabel("step, warm-up included")

    alt = f"Loss of {len(expected)} steps, from {expected[0]:.3g} to {expected[-1]:.3g}; {difference}"
    return _render("Losses, mean over ranks", difference, alt, 2.6, draw)
