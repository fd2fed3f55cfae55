"""Words of error messages: valid choices, the closest match, shortened lists of ranks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from dualdist.errors import UsageError

SHOWN = 8  # tensors or ranks listed in an error at most


def require_choice(word: str, known: Iterable[str], what: str, where: str = "") -> str:
    """The word; UsageError, with those that are known and the one that was meant, where it is none of them."""
    words = list(known)
    if word not in words:
        raise UsageError(f"{what} {word!r}: expected one of {', '.join(words)}{where}{did_you_mean(word, words)}")
    return word


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a sentence about a mistyped word: the nearest of those that are known, if one is near."""
    close = difflib.get_close_matches(word, known, 1) if isinstance(word, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def format_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 0, 1, 2 and 61 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
