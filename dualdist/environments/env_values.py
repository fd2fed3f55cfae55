"""Reading numbers out of variables: what is half-set, no number or impossible is an error that names the variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dualdist.errors import TopologyError
from dualdist.topology import Topology

RENDEZVOUS = "DUALDIST_RENDEZVOUS"
OVERRIDE = "DUALDIST_RANK and DUALDIST_SIZE"
INTEGER = re.compile(r"[0-9]{1,9}")
SHOWN = 40
FIELDS = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")


@dataclass(frozen=True)
class LauncherVariables:
    """The variables in which a launcher tells a rank's place, None for what it does not tell, and how it is started."""

    launcher: str
    command: str
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    node_rank: str | None = None
    num_nodes: str | None = None

    def given(self) -> list[str]:
        """The variables that there are."""
        return [name for name in self.by_field().values() if name is not None]

    def by_field(self) -> dict[str, str | None]:
        """The variable of each field of a Topology, None where there is none."""
        return {part: getattr(self, part) for part in FIELDS}


@dataclass(frozen=True)
class EnvValues:
    """A rank's place as far as variables tell it."""

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None


def get_value(environ: Mapping[str, str], name: str) -> str | None:
    """The variable's value without surrounding blanks; None where it is unset or empty."""
    return environ.get(name, "").strip() or None


def find_set(environ: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Those of the names that are set and not empty, in the order given."""
    return [name for name in names if get_value(environ, name) is not None]


def format_set(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """The names that are set, with their values, as an error shows them; long values are cut."""
    return ", ".join(f"{name}={(get_value(environ, name) or '')[:SHOWN]}" for name in find_set(environ, names))


def get_integer(environ: Mapping[str, str], name: str) -> int | None:
    """The variable as a number of at least 0; None where it is unset or empty."""
    value = get_value(environ, name)
    if value is None:
        return None
    if not INTEGER.fullmatch(value):
        raise TopologyError(
            f"{name}={value[:SHOWN]!r}: expected a whole number of at least 0; unset {name}, or start the job anew"
        )
    return int(value)


def require_all(environ: Mapping[str, str], names: LauncherVariables, needed: Sequence[str] | None = None) -> None:
    """Raise a TopologyError unless all are set; called where one of them is, which says that this launcher ran."""
    needed = names.given() if needed is None else needed
    missing = [name for name in needed if get_value(environ, name) is None]
    if missing:
        raise TopologyError(
            f"{' and '.join(missing)} not set, but {format_set(environ, needed)}: "
            f"{names.launcher} sets all of {', '.join(needed)}; "
            f"start with `{names.command}`, unset what is left over, or set {OVERRIDE}"
        )


def read_values(environ: Mapping[str, str], names: LauncherVariables) -> EnvValues:
    """The numbers under these names, each below its bound; rank and size are there, as `require` made sure."""
    rank, size = get_integer(environ, names.rank), get_integer(environ, names.size)
    assert rank is not None
    assert size is not None
    others = (names.local_rank, names.local_size, names.node_rank, names.num_nodes)
    told = EnvValues(rank, size, *(None if name is None else get_integer(environ, name) for name in others))
    check_bounds(told, names)
    return told


def check_bounds(told: EnvValues, names: LauncherVariables) -> None:
    """Raise a TopologyError that names the variables where the numbers cannot be."""
    if told.size < 1:
        raise TopologyError(f"{names.size}={told.size}: a job has at least one rank; start with `{names.command}`")
    size = (names.size, told.size)
    for name, value, (bound_name, bound), law in (
        (names.rank, told.rank, size, "a rank must be below the size"),
        (
            names.local_rank,
            told.local_rank,
            (names.local_size, told.local_size),
            "a local rank is below its node's ranks",
        ),
        (names.local_rank, told.local_rank, size, "a local rank must be below the size"),
        (
            names.node_rank,
            told.node_rank,
            (names.num_nodes, told.num_nodes),
            "a node's index must be below the number of nodes",
        ),
        (names.node_rank, told.node_rank, size, "a node's index must be below the number of ranks"),
    ):
        if value is not None and bound is not None and value >= bound:
            raise TopologyError(
                f"{name}={value} but {bound_name}={bound}: {law}; was this started with `{names.command}`? "
                f"Unset what is left over, or set {OVERRIDE}"
            )
    for name, value, law in (
        (names.local_size, told.local_size, "a node has at least one of the ranks, and at most all"),
        (names.num_nodes, told.num_nodes, "there is at least one node, and at most one a rank"),
    ):
        if value is not None and not 1 <= value <= told.size:
            raise TopologyError(
                f"{name}={value} but {names.size}={told.size}: {law}; was this started with `{names.command}`? "
                f"Unset what is left over, or set {OVERRIDE}"
            )


def require_agreement(environ: Mapping[str, str], found: Topology, other: LauncherVariables) -> None:
    """Raise a TopologyError where the other variables are set and say another rank or size than the topology."""
    names = (other.rank, other.size)
    for name, value in zip(names, (found.rank, found.size), strict=True):
        said = get_integer(environ, name)
        if said is not None and said != value:
            raise TopologyError(
                f"{format_set(environ, names)}, but {found.source} says rank {found.rank} of {found.size}: "
                "which is true? "
                f"`unset {' '.join(find_set(environ, names))}` if {found.launcher} starts the ranks, or set {OVERRIDE}"
            )
