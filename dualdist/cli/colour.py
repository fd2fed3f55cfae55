"""Colour, where a terminal shows it and nobody has said no (https://no-color.org)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

NO_COLOR = "NO_COLOR"
TERMINAL = "TERM"
CODES = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "bold": 1, "dim": 2}


def is_coloured(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether what is written there may have colours."""
    return stream.isatty() and not environ.get(NO_COLOR) and environ.get(TERMINAL, "dumb") != "dumb"


class Paint:
    """Colours words for a stream, or leaves them as they are."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str]) -> None:
        self._is_on = is_coloured(stream, environ)

    def __call__(self, text: str, *styles: str) -> str:
        codes = ";".join(str(CODES[style]) for style in styles)
        return f"\x1b[{codes}m{text}\x1b[0m" if self._is_on and codes else text
