"""Tables for a person, with rich where it is installed, and the record that goes with every figure as JSON."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from dualdist.errors import UsageError
from dualdist.launch.failure import find_exception
from dualdist.utils.machine import machine, versions
from dualdist.utils.redaction import redact_command

SCHEMA = 1
_NOTE = textwrap.TextWrapper(
    width=116, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
)


@dataclass(frozen=True)
class FigureTable:
    """A title, `words` columns of words and further ones of figures, and what must be said beside them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = field(default=())
    words: int = 1


def record(
    what: str, command: str, settings: dict[str, Any], jobs: list[dict[str, Any]], results: Any
) -> dict[str, Any]:
    """Everything that goes with the figures: `jobs` hold every command with what its ranks reported, round by round."""
    return {
        "schema": SCHEMA,
        "what": what,
        "command": command,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": asdict(machine()),
        "versions": versions() | _of_gpus(jobs),
        "settings": settings,
        "results": results,
        "jobs": jobs,
    }


def _of_gpus(jobs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The CUDA and the NCCL that ranks on GPUs had."""
    for rank in (rank for job in jobs for rank in job.get("ranks") or job.get("reports") or ()):
        if rank.get("cuda"):
            return {"CUDA": rank["cuda"], "NCCL": rank["nccl"]}
    return {}


def typed(words: Sequence[str]) -> str:
    """The command line of these words, without the values of secrets."""
    return shlex.join(["dualdist", *redact_command(words)])


def heading(kept: dict[str, Any]) -> str:
    """The lines that every table needs above it."""
    settings = kept["settings"]
    shared = ", ".join(f"{name} {value}" for name, value in settings.items() if value not in ({}, [], None))
    return (
        f"machine   {machine()}\n"
        f"versions  {', '.join(f'{name} {release}' for name, release in kept['versions'].items())}\n"
        f"settings  {shared}\n"
        f"command   {kept['command']}\n"
        f"at        {kept['at']}\n"
    )


def show(kept: dict[str, Any], tables: Sequence[FigureTable], out: TextIO) -> None:
    """Print the record's heading and the tables."""
    out.write(heading(kept))
    for table in tables:
        out.write("\n")
        if not _by_rich(table, out):
            out.write(plain(table))
        for note in table.notes:
            out.write(f"{_NOTE.fill(note)}\n")
    out.flush()


def plain(table: FigureTable) -> str:
    """The table in letters: words to the left, figures to the right."""
    widths = [max(len(row[i]) for row in (table.columns, *table.rows)) for i in range(len(table.columns))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < table.words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip() + "\n"

    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    return f"{table.title}\n{line(table.columns)}{rule}\n{''.join(map(line, table.rows))}"


def _by_rich(table: FigureTable, out: TextIO) -> bool:
    """Print by rich, on a terminal; False where it is not installed, or nobody looks."""
    if not out.isatty():
        return False
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable
    except ImportError:
        return False
    drawn = RichTable(title=escape(table.title), title_justify="left")
    for number, column in enumerate(table.columns):
        drawn.add_column(escape(column), justify="left" if number < table.words else "right")
    for row in table.rows:
        drawn.add_row(*(escape(cell) for cell in row))
    Console(file=out, highlight=False).print(drawn)
    return True


def dumps(data: Any, indent: int | None = None) -> str:
    """The data as JSON that any program reads: it knows no NaN and no infinity, for which null stands."""
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(each) for each in data] if isinstance(data, (list, tuple)) else data


def write_json(kept: dict[str, Any], where: str) -> None:
    """The record is in the file, or on standard output for -."""
    text = dumps(kept, indent=1)
    if where == "-":
        sys.stdout.write(f"{text}\n")
        return
    try:
        Path(where).write_text(f"{text}\n")
    except OSError as error:
        raise UsageError(
            f"--json {where}: cannot write it ({error.strerror}); name another file, or - for stdout"
        ) from error


def check_file(option: str, where: str | None, folder: str | None = None) -> None:
    """UsageError now rather than after an hour of measuring, where the file could not be written.

    The folder will be there by then.
    """
    if where in (None, "-"):
        return
    path = Path(str(where)).resolve()
    if folder is not None and path.parent == Path(folder).resolve() and not path.parent.exists():
        return
    if not path.parent.is_dir():
        raise UsageError(f"{option} {where}: there is no folder {path.parent}; name another file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {where}: this cannot be written; name another file")


def last_words(reason: str) -> str:
    """One line of an error that may be a whole output: the exception, else what names an error, else the first."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return find_exception(reason) or next(iter([*reversed(named), *lines]), "")


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def size_words(nbytes: float) -> str:
    """8 B, 64 KiB, 25 MiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.4g} B"
