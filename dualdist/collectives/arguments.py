"""What callers pass, as the ranks compare it: plain numbers and words, of whatever kind the caller's were."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat, SupportsIndex, TypeVar

from dualdist.errors import UsageError

if TYPE_CHECKING:
    from dualdist.collectives.group import Group


T = TypeVar("T")


def name_of(group: Group, kind: str, name: str | None) -> str:
    """The operation's name: the caller's, or where there is none the next of its kind."""
    if name is not None and not isinstance(name, str):
        raise UsageError(f"name={name!r}: expected a str, not a {type(name).__name__}")
    return str(name) if name else group.next_name(kind)


def as_ints(numbers: Iterable[SupportsIndex], what: str) -> list[int]:
    """The numbers, NumPy's and tensors too, as int; UsageError unless they are integers."""
    given: object = numbers
    try:
        given = list(numbers)
        return [operator.index(number) for number in given]
    except TypeError:
        raise UsageError(f"{what} {given}: expected integers") from None


def as_list(given: Iterable[T]) -> list[T]:
    """What a grouped operation takes."""
    try:
        return list(given)
    except TypeError:
        raise UsageError(f"expected a list of tensors, not a {type(given).__name__}") from None


def as_path(given: str | os.PathLike[str]) -> Path:
    """A path in the file system."""
    try:
        return Path(given)
    except TypeError:
        raise UsageError(f"expected a path, not a {type(given).__name__}") from None


def root_of(group: Group, root: SupportsIndex) -> tuple[int, int]:
    """One of the job's ranks, and its place in the group."""
    (rank,) = as_ints([root], "root")
    return rank, group.group_rank_of(rank)


def scales_of(prescale: SupportsFloat, postscale: SupportsFloat) -> tuple[float, float]:
    """Both factors as float; UsageError unless they are numbers."""
    try:
        return float(prescale), float(postscale)
    except (TypeError, ValueError):
        raise UsageError(f"prescale={prescale!r}, postscale={postscale!r}: expected numbers") from None


def require_flags(**flags: object) -> None:
    """UsageError where one is a part of a checkpoint that has the name of an argument."""
    for name, value in flags.items():
        if not isinstance(value, int):
            raise UsageError(f"{name}={value!r}: expected True or False; a part of a checkpoint needs another name")
