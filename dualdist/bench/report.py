"""Reports of a benchmark: tables for the terminal, and the JSON record with hardware, versions and settings."""

import json
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, TextIO

from dualdist.launch.failure import find_exception
from dualdist.utils.machine import machine, versions
from dualdist.utils.redaction import redact_command

SCHEMA = 4
WIDTH = 116  # columns of a note; a table is as wide as it needs where output is no terminal
NAMES_WIDTH = 60  # columns of a cell that lists several names


@dataclass(frozen=True)
class ReportTable:
    """A table: the first `text_columns` columns hold text, the others numbers; notes follow below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = field(default=())
    text_columns: int = 1


def make_record(
    benchmark: str, command: str, settings: dict[str, Any], jobs: list[dict[str, Any]], results: Any
) -> dict[str, Any]:
    """Return the JSON record of a benchmark; `jobs` hold every command and the reports of its ranks."""
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "command": command,
        "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": asdict(machine()),
        "versions": versions() | _device_versions(jobs),
        "settings": settings,
        "results": results,
        "jobs": jobs,
    }


def _device_versions(jobs: Sequence[dict[str, Any]]) -> dict[str, str]:
    ranks = (rank for job in jobs for rank in job.get("ranks") or job.get("reports") or ())
    return next((rank["device_versions"] for rank in ranks if rank.get("device_versions")), {})


def format_command(arguments: Sequence[str]) -> str:
    """Return the dualdist command line with these arguments, with the values of secrets hidden."""
    return shlex.join(["dualdist", *redact_command(arguments)])


def format_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that are set, with readable names."""
    return {name.replace("_", " "): str(value) for name, value in settings.items() if value not in ({}, [], None)}


def format_versions(found: Mapping[str, str]) -> str:
    """Return "torch 2.13, dualdist 1.0"."""
    return ", ".join(f"{name} {version}" for name, version in found.items())


def print_report(record: dict[str, Any], tables: Sequence[ReportTable], out: TextIO) -> None:
    """Print the record's hardware, versions and settings, then the tables."""
    settings = ", ".join(f"{name} {value}" for name, value in format_settings(record["settings"]).items())
    out.write(
        f"machine   {machine()}\n"
        f"versions  {format_versions(record['versions'])}\n"
        f"settings  {settings}\n"
        f"command   {record['command']}\n"
        f"time      {record['timestamp']}\n"
    )
    for table in tables:
        print_table(table, out)
    out.flush()


def print_table(table: ReportTable, out: TextIO) -> None:
    """Print a table and its notes, with text aligned left and numbers right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(table.columns):
        is_list = number < table.text_columns - 1  # names, which stand before the reason that they share
        justify: Any = "left" if number < table.text_columns else "right"
        drawn.add_column(Text(column), justify=justify, max_width=NAMES_WIDTH if is_list else None)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    out.write(f"\n{table.title}\n")
    Console(file=out, highlight=False, width=None if out.isatty() else 1000).print(drawn)
    for note in table.notes:
        out.write(f"{textwrap.fill(note, WIDTH, initial_indent='  ', subsequent_indent='    ')}\n")


def dump_json(data: Any, indent: int | None = None) -> str:
    """Return standard JSON: null stands for NaN and infinity."""
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(each) for each in data] if isinstance(data, (list, tuple)) else data


def error_summary(text: str) -> str:
    """Return the line of an output that names the error: the exception, the last error line, or the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return find_exception(text) or next(iter([*reversed(named), *lines]), "")


def failure_table(column: str, failures: Sequence[tuple[str, str]]) -> ReportTable:
    """Return the table of what was not measured, from (name, reason): one row per reason, the names in `column`."""
    names: dict[str, list[str]] = {}
    for label, reason in failures:
        names.setdefault(error_summary(reason), []).append(label)
    rows = tuple((", ".join(labels), reason) for reason, labels in names.items())
    return ReportTable("Not measured", (column, "reason"), rows, text_columns=2)


def describe_runs(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part of a result that says how its reports, one of each launch, were measured."""
    first = reports[0]
    names = ("ranks", "num_nodes", "backend", "transport", "launcher", "device", "threads")
    return {
        **{name: first[name] for name in names},
        "rounds": first["options"]["rounds"],
        "launches": len(reports),
    }


def format_runs(result: Mapping[str, Any]) -> str:
    """Return the title's end: "4 ranks on 2 hosts, native over shm, torchrun, ..."."""
    hosts = f" on {result['num_nodes']} hosts" if result["num_nodes"] > 1 else ""
    return (
        f"{result['ranks']} ranks{hosts}, {result['backend']} over {result['transport']}, {result['launcher']}, "
        f"{result['device']}, {result['threads']} thread(s) per rank, "
        f"{result['launches']} launch(es) of {result['rounds']} rounds"
    )


def format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def format_us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def format_size(nbytes: float) -> str:
    """Return 8 B, 64 KiB or 25 MiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.4g} B"
