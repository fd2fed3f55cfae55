"""Says on standard error how far a comparison is, and about how long the rest takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Tell(Protocol):
    """Called after every launch: what was launched, how many of how many are done, and seconds left."""

    def __call__(self, what: str, done: int, total: int, left_s: float) -> None: ...


@contextmanager
def progress() -> Iterator[Tell]:
    """A bar where somebody looks, else a line for every launch."""
    if not sys.stderr.isatty():
        yield _line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, total: int, left_s: float) -> None:
            bar.update(task, completed=done, total=total, description=f"about {duration(left_s)} left; {what}")

        yield tell


def _line(what: str, done: int, total: int, left_s: float) -> None:
    print(f"[{done}/{total}] {what} (about {duration(left_s)} left)", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
