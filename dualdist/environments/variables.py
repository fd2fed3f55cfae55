"""Reading numbers out of variables: what is missing, half-set or impossible is an error that names the variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from dualdist.errors import TopologyError

RENDEZVOUS = "DUALDIST_RENDEZVOUS"
OVERRIDE = "DUALDIST_RANK and DUALDIST_SIZE"
INTEGER = re.compile(r"[0-9]{1,9}")
SHOWN = 40


@dataclass(frozen=True)
class Names:
    """The variables in which a launcher tells a rank's place; None for what it does not tell."""

    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    node: str | None = None
    nodes: str | None = None

    def given(self) -> list[str]:
        """The names that there are."""
        return [name for name in (getattr(self, field.name) for field in fields(self)) if name is not None]


@dataclass(frozen=True)
class Told:
    """A rank's place as far as variables tell it."""

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    nodes: int | None = None


def text(environ: Mapping[str, str], name: str) -> str | None:
    """The variable's value without surrounding blanks; None where it is unset or empty."""
    return environ.get(name, "").strip() or None


def present(environ: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Those of the names that are set and not empty, in the order given."""
    return [name for name in names if text(environ, name) is not None]


def shown(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """ "RANK=0, WORLD_SIZE=2" for those names that are set, in an error's words; long values are cut."""
    return ", ".join(f"{name}={(text(environ, name) or '')[:SHOWN]}" for name in present(environ, names))


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """The variable as a number of at least 0; None where it is unset or empty."""
    value = text(environ, name)
    if value is None:
        return None
    if not INTEGER.fullmatch(value):
        raise TopologyError(
            f"{name}={value[:SHOWN]!r}: expected a whole number of at least 0; unset {name}, or start the job anew"
        )
    return int(value)


def require(environ: Mapping[str, str], names: Sequence[str], launcher: str, command: str) -> None:
    """Raise a TopologyError unless all the names are set; called once any of them says that this launcher ran."""
    missing = [name for name in names if text(environ, name) is None]
    if missing:
        seen = shown(environ, names) or "none of " + ", ".join(names)
        raise TopologyError(
            f"{' and '.join(missing)} not set, but {seen}: {launcher} sets all of {', '.join(names)}; start with "
            f"`{command}`, unset what is left over, or set {OVERRIDE} to say it yourself"
        )


def read(environ: Mapping[str, str], names: Names) -> Told:
    """The numbers under these names, each below its bound; rank and size must be there."""
    told = Told(
        **{
            field.name: None if (name := getattr(names, field.name)) is None else integer(environ, name)
            for field in fields(names)
        }
    )
    check(told, names)
    return told


def check(told: Told, names: Names) -> None:
    """Raise a TopologyError that names the variables where the numbers cannot be."""
    if told.size < 1:
        raise TopologyError(f"{names.size}={told.size}: a job has at least one rank; start it anew with 1 or more")
    size = (names.size, told.size)
    bounds = (
        ((names.rank, told.rank), size, "a rank"),
        ((names.local_rank, told.local_rank), (names.local_size, told.local_size), "a local rank"),
        ((names.node, told.node), (names.nodes, told.nodes), "a node's index"),
        ((names.local_rank, told.local_rank), size, "a local rank"),
        ((names.node, told.node), size, "a node's index"),
    )
    for (name, value), (bound_name, bound), what in bounds:
        if value is not None and bound is not None and value >= bound:
            raise TopologyError(
                f"{name}={value} but {bound_name}={bound}: {what} must be below it; was every rank started by the same "
                f"launcher? Unset what is left over, or set {OVERRIDE}"
            )
    for name, part, what in (
        (names.local_size, told.local_size, "the ranks of one node"),
        (names.nodes, told.nodes, "the nodes"),
    ):
        if part is not None and part > told.size:
            raise TopologyError(
                f"{name}={part} but {names.size}={told.size}: {what} cannot be more than all ranks; "
                f"unset what is left over from another job, or set {OVERRIDE}"
            )
