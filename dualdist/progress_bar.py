"""How far a loop is, shown by rank 0 alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

from dualdist import session

T = TypeVar("T")

BAR_CELLS = 20
# A terminal is drawn so often; a file, as batch systems make of standard error, gets a line so often.
DRAW_S, LINE_S = 0.1, 60.0


def progress(items: Iterable[T], description: str = "", *, total: int | None = None) -> Iterator[T]:
    """The same items; rank 0 shows on standard error how far the loop is, the other ranks show nothing.

    On a terminal that is a bar; elsewhere a line a minute, and one at the end.

    >>> sum(dd.progress([1, 2, 3], "epoch 1"))
    6
    """
    if session.rank_and_size()[0] != 0:
        yield from items
        return
    if total is None:
        total = len(items) if hasattr(items, "__len__") else None  # type: ignore[arg-type]
    bar = _ProgressBar(description, total, sys.stderr, time.monotonic)
    try:
        for item in items:
            yield item
            bar.advance()
    finally:
        bar.close()


class _ProgressBar:
    """Draws how many of `total` are done."""

    def __init__(self, description: str, total: int | None, out: TextIO, now: Callable[[], float]) -> None:
        self._head = f"{description}: " if description else ""
        self._total = total
        self._out = out
        self._now = now
        self._is_terminal = out.isatty()
        self._done = 0
        self._began = self._drawn_at = now()
        self._width = 0

    def advance(self) -> None:
        self._done += 1
        if self._now() - self._drawn_at >= (DRAW_S if self._is_terminal else LINE_S):
            self._draw()

    def close(self) -> None:
        self._draw()
        if self._is_terminal:
            self._out.write("\n")
            self._out.flush()

    def _draw(self) -> None:
        self._drawn_at = self._now()
        text = self._head + self._text(self._drawn_at - self._began)
        if self._is_terminal:
            self._out.write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        else:
            self._out.write(f"{text}\n")
        self._out.flush()

    def _text(self, passed_s: float) -> str:
        rate = self._done / passed_s if passed_s > 0 else 0.0
        if self._total is None:
            return f"{self._done} in {_clock(passed_s)}, {rate:.3g}/s"
        share = self._done / self._total if self._total else 1.0
        cells = min(BAR_CELLS, int(share * BAR_CELLS))
        left = f", {_clock((self._total - self._done) / rate)} left" if rate and self._done < self._total else ""
        bar = f" |{'#' * cells}{'-' * (BAR_CELLS - cells)}|" if self._is_terminal else ""
        return f"{share:4.0%}{bar} {self._done}/{self._total} in {_clock(passed_s)}{left}, {rate:.3g}/s"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
