"""Make the manual's pictures: a comparison on this machine, of which the plots and the report are kept.

    make docs-pictures              # compares for some minutes; then pictures of its output
    make docs-pictures FROM=report  # pictures of the output that is there
    make docs-pictures FROM=allreduce.json  # the chart of what `dualdist bench allreduce --json` wrote
    make docs-pictures FROM=docs/pages/benchmarks.md  # the chart of the page's table of steps

The picture of the report needs a browser: apt-get install chromium.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image

from dualdist.bench.compare.plots import COLOURS, INK, PAPER, STYLE
from dualdist.bench.report import format_size

IMAGES = Path(__file__).parent / "pages" / "images"
COMPARE = shlex.split("compare --model mlp --backends native,mpi --transports shm,gloo,mpi --baselines ddp --rounds 6")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1100, 1215  # of the report's picture
COLORS = 128  # of a picture, which keeps it below 200 KB


def keep(source: Path, name: str, width: int) -> None:
    """Write a picture, scaled and with few colors, to the manual."""
    with Image.open(source) as image:
        scaled = image.convert("RGB").resize(
            (width, round(image.height * width / image.width)), Image.Resampling.LANCZOS
        )
        scaled.quantize(COLORS).save(IMAGES / f"{name}.png", optimize=True)


def draw_allreduces(result: dict[str, Any], path: Path) -> None:
    """Draw the time of an allreduce by its size and dtype, of dualdist and of others in the same job."""
    from matplotlib import pyplot

    labels = {"dualdist_": "dualdist", "deepspeed_": "DeepSpeed", "raw_": result["library"]}
    dtypes = list(dict.fromkeys(size["dtype"] for size in result["sizes"]))
    with matplotlib.rc_context(STYLE):
        figure, panels = pyplot.subplots(1, len(dtypes), figsize=(4.2 * len(dtypes), 3.6), sharey=True, squeeze=False)
        for axes, dtype in zip(panels[0], dtypes, strict=True):
            sizes = [size for size in result["sizes"] if size["dtype"] == dtype]
            for colour, (call, label) in zip(COLOURS, labels.items(), strict=False):
                found = [(each["bytes"], each["calls"][call]["seconds"]) for each in sizes if call in each["calls"]]
                numbers, times = [nbytes for nbytes, _ in found], [each for _, each in found]
                spread = [
                    [1e6 * (each["value"] - each["low"]) for each in times],
                    [1e6 * (each["high"] - each["value"]) for each in times],
                ]
                axes.errorbar(
                    numbers, [1e6 * each["value"] for each in times], spread, fmt="o-", color=colour, label=label
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(numbers, [format_size(each) for each in numbers], rotation=45, size=9)
            axes.minorticks_off()
            axes.set_title(dtype, loc="left", color=INK)
        panels[0][0].set_ylabel("us")
        panels[0][0].legend()
        figure.tight_layout()
        figure.savefig(path, facecolor=PAPER, metadata={"Date": None})


def draw_steps(page: str, path: Path) -> None:
    """Draw the first table of the benchmarks' page: the ratios and intervals of each contender, for each model."""
    from matplotlib import pyplot

    head, *rows = [line.strip("| ").split(" | ") for line in page.split("\n\n| | ")[1].split("\n\n")[0].splitlines()]
    ratios = [[[float(number) for number in re.findall(r"\d+\.\d+", cell)] for cell in row[1:]] for row in rows[1:]]
    contenders, places = [row[0].replace("`", "") for row in rows[1:]], range(len(ratios))
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": "steps"}):
        figure, panels = pyplot.subplots(1, len(head), figsize=(3.2 * len(head), 2.6), sharey=True)
        for number, (axes, model) in enumerate(zip(panels, head, strict=True)):
            cells = [row[number] for row in ratios]
            medians = [median for median, _, _ in cells]
            spread = [[median - low for median, low, _ in cells], [high - median for median, _, high in cells]]
            axes.barh(places, medians, xerr=spread, height=0.6, color=COLOURS[0], ecolor=INK)
            axes.axvline(1, color=INK, linewidth=1)
            for place, median in enumerate(medians):
                axes.text(0.02, place, f"{median:.2f}", color=PAPER, verticalalignment="center")
            axes.set_yticks(places, contenders)
            axes.set_xlim(0, 1.15)
            axes.set_title(model, loc="left", color=INK)
        panels[0].invert_yaxis()
        figure.supxlabel("step time over that of DDP's defaults; lower is faster", size=10)
        figure.tight_layout()
        figure.savefig(path, facecolor=PAPER, metadata={"Date": None})


def main(arguments: list[str]) -> None:
    """Draw the chart of a record or a page, or make the pictures of a comparison, in the folder given or a new one."""
    if arguments and arguments[0].endswith(".json"):
        (result,) = json.loads(Path(arguments[0]).read_text())["results"]
        draw_allreduces(result, IMAGES / "allreduce.svg")
        return
    if arguments and arguments[0].endswith(".md"):
        draw_steps(Path(arguments[0]).read_text(), IMAGES / "steps.svg")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments[0]) if arguments else Path(scratch, "report")
        if not arguments:
            subprocess.run([sys.executable, "-m", "dualdist", *COMPARE, "--output", str(folder)], check=True)
        shutil.copy(folder / "steps.svg", IMAGES / "compare-steps.svg")
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            sys.exit("no browser for the picture of the report: apt-get install chromium")
        shot = Path(scratch, "shot.png")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        page = (folder / "report.html").resolve().as_uri()
        subprocess.run([browser, *options, f"--screenshot={shot}", page], check=True, timeout=120)
        keep(shot, "compare-report", 900)


if __name__ == "__main__":
    main(sys.argv[1:])
