"""Parts of error messages: valid choices, the closest match, shortened lists of ranks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from dualdist.errors import UsageError

SHOWN = 8  # at most so many tensors or ranks are listed in an error


def require_choice(word: str, known: Iterable[str], what: str, where: str = "") -> str:
    """Return the word; raise UsageError, with the choices and the closest one, if it is unknown."""
    words = list(known)
    if word not in words:
        raise UsageError(f"{what} {word!r}: expected one of {', '.join(words)}{where}{did_you_mean(word, words)}")
    return word


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the closest known word, or ""."""
    close = difflib.get_close_matches(word, known, 1) if isinstance(word, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def format_ranks(ranks: Sequence[int]) -> str:
    """Return e.g. "rank 3" or "ranks 0, 1, 2 and 61 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
