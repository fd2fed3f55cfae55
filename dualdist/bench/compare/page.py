"""A comparison as a folder that a person can read without us: a page with everything in it, pictures, CSV and JSON."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dualdist.bench.compare.figures import CellFigures, ComparisonResult
from dualdist.bench.compare.launches import Launch, by_cell
from dualdist.bench.compare.plots import plots
from dualdist.bench.compare.tables import curve_table, tables, write_csv
from dualdist.bench.report import dumps, last_words, size_words
from dualdist.utils.machine import Machine

TEMPLATE = "page.html.j2"
PAGE, DATA, TABLE = "report.html", "comparison.json", "launches.csv"


def write(
    folder: Path,
    result: ComparisonResult,
    kept: Mapping[str, Any],
    launches: Sequence[Launch],
    labels: Mapping[str, str],
) -> Path:
    """The page's path; beside it lie its pictures and its data."""
    pictures = plots(result, by_cell(launches))
    for name, png in pictures.items():
        (folder / f"{name}.png").write_bytes(png)
    raw = dumps(kept).encode()
    (folder / DATA).write_bytes(raw)
    write_csv(folder / TABLE, launches, labels)
    page = folder / PAGE
    page.write_text(render(result, kept, launches, labels, pictures, raw))
    return page


def render(
    result: ComparisonResult,
    kept: Mapping[str, Any],
    launches: Sequence[Launch],
    labels: Mapping[str, str],
    pictures: Mapping[str, bytes],
    raw: bytes,
) -> str:
    """The page, which needs no other file and no network."""
    environment = Environment(
        loader=PackageLoader("dualdist.bench", "compare"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    settings = {name: value for name, value in kept["settings"].items() if value not in ({}, [], None)}
    return environment.get_template(TEMPLATE).render(
        result=result,
        kept={**kept, "machine_words": str(Machine(**kept["machine"]))},
        settings_words=", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items()),
        tables=list(tables(result)),
        curves=curve_table(result.cells),
        classes={cell.label: _class(cell, result) for cell in result.cells},
        plots={name: b64encode(png).decode() for name, png in pictures.items()},
        facts=_facts(kept, settings),
        launches=[_row(launch, labels) for launch in launches],
        commands={labels.get(launch.cell, launch.cell): launch.command for launch in launches},
        raw=b64encode(raw).decode(),
        raw_words=size_words(len(raw)),
    )


def _class(cell: CellFigures, result: ComparisonResult) -> str:
    if result.verdict.kind == "faster" and cell.label == result.verdict.winner:
        return "winner"
    return "" if cell.is_contender else "reference"


def _facts(kept: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    return {
        "command": kept["command"],
        "at": kept["at"],
        "machine": str(Machine(**kept["machine"])),
        "versions": ", ".join(f"{name} {version}" for name, version in kept["versions"].items()),
        **{name.replace("_", " "): str(value) for name, value in settings.items()},
    }


def _row(launch: Launch, labels: Mapping[str, str]) -> tuple[str, ...]:
    label = labels.get(launch.cell, launch.cell)
    if launch.error is not None or not launch.steps:
        return (label, str(launch.round + 1), *["-"] * 5, last_words(launch.error or ""))
    rate = "-" if launch.batch is None else f"{launch.batch / launch.step_s:.4g}"
    foreign = "-" if launch.foreign_cores is None else f"{launch.foreign_cores:.2f}"
    step = f"{launch.step_s * 1e3:.2f}"
    return (label, str(launch.round + 1), step, rate, f"{launch.startup_s:.1f}", foreign, launch.first.digest[:12], "")
