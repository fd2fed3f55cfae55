"""Checks and conversions of callers' arguments; loads without torch."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol, SupportsFloat, SupportsIndex, TypeVar

from dualdist.errors import UsageError
from dualdist.utils.suggest import require_choice, type_name

T = TypeVar("T")
Reduction = Literal["ordered", "unordered"]
REDUCTIONS = ("ordered", "unordered")


class Members(Protocol):
    """The part of a group that checks of arguments use."""

    def next_name(self, kind: str) -> str:
        """Return a name for an unnamed collective."""

    def group_rank_of(self, rank: int) -> int:
        """Return the index in the group of a rank of the job."""


def name_of(group: Members, kind: str, name: str | None) -> str:
    """Return the caller's name for a collective, or the next numbered one."""
    if name is not None and not isinstance(name, str):
        raise UsageError(f"name={name!r}: expected a str, not {type_name(name)}")
    return str(name) if name else group.next_name(kind)


def as_tensor(given: T) -> T:
    """Return `given`, or a list of it where it is no tensor: a list of tensors is for grouped collectives."""
    import torch

    return given if isinstance(given, torch.Tensor) else [given]  # type: ignore[return-value]


def as_list(given: Iterable[T]) -> list[T]:
    """Return the tensors of a grouped collective as a list; of anything else a list that is refused."""
    return list(given) if isinstance(given, Iterable) else [given]


def check_limit(timeout_s: object) -> None:
    """Raise UsageError unless this is a number of seconds that can be waited."""
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise UsageError(f"timeout_s={timeout_s!r}: expected seconds above 0 and below {threading.TIMEOUT_MAX:g}")


def as_ints(numbers: Iterable[SupportsIndex], what: str) -> list[int]:
    """Return the numbers, also NumPy's and tensors, as int; raise UsageError unless they are integers."""
    given: object = numbers
    try:
        given = list(numbers)
        return [operator.index(number) for number in given]
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without values
        raise UsageError(f"{what} {given}: expected integers") from None


def as_path(given: str | os.PathLike[str]) -> Path:
    """Return `given` as a Path; raise UsageError unless it is a path."""
    try:
        return Path(given)
    except TypeError:
        raise UsageError(f"expected a path, not {type_name(given)}") from None


def root_of(group: Members, root: SupportsIndex) -> tuple[int, int]:
    """Return a rank of the job as int, and its index in the group."""
    (rank,) = as_ints([root], "root")
    return rank, group.group_rank_of(rank)


def scales_of(prescale: SupportsFloat, postscale: SupportsFloat) -> tuple[float, float]:
    """Return both factors as float; raise UsageError unless they are numbers."""
    try:
        return float(prescale), float(postscale)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"prescale={prescale!r}, postscale={postscale!r}: expected numbers") from None


def check_reduction(reduction: str, op: str) -> None:
    """Raise UsageError unless `op` can be computed in this way."""
    require_choice(reduction, REDUCTIONS, "reduction")
    if reduction == "ordered" and op == "adasum":
        raise UsageError(
            "reduction='ordered' with op 'adasum': Adasum combines pairs of ranks, and is no sum that could be "
            "added in rank order; choose one of the two"
        )


def require_flags(**flags: object) -> None:
    """Raise UsageError unless all are bools: a part of a checkpoint was given the name of an argument."""
    for name, value in flags.items():
        if not isinstance(value, int):
            raise UsageError(f"{name}={value!r}: expected True or False; a part of a checkpoint needs another name")
