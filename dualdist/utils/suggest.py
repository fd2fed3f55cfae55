"""A word that must be one of several, and the one that was meant where it is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from dualdist.errors import UsageError


def one_of(word: str, known: Iterable[str], what: str, where: str = "") -> str:
    """The word; UsageError, with those that are known and the one that was meant, where it is none of them."""
    words = list(known)
    if word not in words:
        raise UsageError(f"{what} {word!r}: expected one of {', '.join(words)}{where}{meant(word, words)}")
    return word


def meant(word: object, known: Iterable[str]) -> str:
    """The end of a sentence about a mistyped word: the nearest of those that are known, if one is near."""
    close = difflib.get_close_matches(word, known, 1) if isinstance(word, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""
