"""Launcher variables: names, values and bounds. Errors name the variables that are missing or wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dualdist.errors import TopologyError
from dualdist.topology import Topology

RENDEZVOUS = "DUALDIST_RENDEZVOUS"
OVERRIDE = "DUALDIST_RANK and DUALDIST_SIZE"
INTEGER = re.compile(r"[0-9]{1,9}")
SHOWN = 40  # characters of a value in an error
FIELDS = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")
UPPER_BOUNDS = (
    ("rank", "size", "a rank must be below the size"),
    ("local_rank", "local_size", "a local rank must be below the number of ranks of its node"),
    ("local_rank", "size", "a local rank must be below the size"),
    ("node_rank", "num_nodes", "a node's index must be below the number of nodes"),
    ("node_rank", "size", "a node's index must be below the number of ranks"),
)
COUNTS = (
    ("local_size", "a node has between one and all of the ranks"),
    ("num_nodes", "there are between one node and one node per rank"),
)


@dataclass(frozen=True)
class LauncherVariables:
    """Names of the variables that a launcher sets, None for those it lacks, and the command that starts it."""

    launcher: str
    command: str
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    node_rank: str | None = None
    num_nodes: str | None = None

    def given(self) -> list[str]:
        """Return the names of the variables that the launcher sets."""
        return [name for name in self.by_field().values() if name is not None]

    def by_field(self) -> dict[str, str | None]:
        """Return the variable's name for each field of a Topology."""
        return {field: getattr(self, field) for field in FIELDS}


@dataclass(frozen=True)
class EnvValues:
    """The values that variables give, None where there is no variable."""

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None


def get_value(environ: Mapping[str, str], name: str) -> str | None:
    """Return the variable's value, stripped, or None if it is unset or empty."""
    return environ.get(name, "").strip() or None


def find_present(environ: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return those of `names` that are set and not empty, in the same order."""
    return [name for name in names if get_value(environ, name) is not None]


def format_present(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Return "NAME=value, ..." of those of `names` that are set, for an error."""
    return ", ".join(f"{name}={(get_value(environ, name) or '')[:SHOWN]}" for name in find_present(environ, names))


def get_integer(environ: Mapping[str, str], name: str) -> int | None:
    """Return the variable as an integer of at least 0, or None if it is unset or empty."""
    value = get_value(environ, name)
    if value is None:
        return None
    if not INTEGER.fullmatch(value):
        raise TopologyError(
            f"{name}={value[:SHOWN]!r}: expected a whole number of at least 0; unset {name}, or restart the job"
        )
    return int(value)


def require_all(environ: Mapping[str, str], variables: LauncherVariables, needed: Sequence[str] | None = None) -> None:
    """Raise TopologyError unless all needed variables are set; called where at least one is."""
    needed = variables.given() if needed is None else needed
    missing = [name for name in needed if get_value(environ, name) is None]
    if missing:
        raise TopologyError(
            f"{' and '.join(missing)} not set, but {format_present(environ, needed)}: "
            f"{variables.launcher} sets all of {', '.join(needed)}; "
            f"start with `{variables.command}`, unset leftover variables, or set {OVERRIDE}"
        )


def read_values(environ: Mapping[str, str], variables: LauncherVariables) -> EnvValues:
    """Return the values of `variables`, checked; rank and size must be set."""
    values = {
        field: None if name is None else get_integer(environ, name) for field, name in variables.by_field().items()
    }
    rank, size = values.pop("rank"), values.pop("size")
    assert rank is not None
    assert size is not None
    found = EnvValues(rank, size, **values)
    check_bounds(found, variables)
    return found


def check_bounds(values: EnvValues, variables: LauncherVariables) -> None:
    """Raise TopologyError, naming the variables, if the values are impossible."""
    if values.size < 1:
        raise TopologyError(
            f"{variables.size}={values.size}: a job has at least one rank; start with `{variables.command}`"
        )
    hint = f"was this started with `{variables.command}`? Unset leftover variables, or set {OVERRIDE}"
    for field, bound_field, rule in UPPER_BOUNDS:
        value, bound = getattr(values, field), getattr(values, bound_field)
        if value is not None and bound is not None and value >= bound:
            raise TopologyError(
                f"{getattr(variables, field)}={value} but {getattr(variables, bound_field)}={bound}: {rule}; {hint}"
            )
    for field, rule in COUNTS:
        value = getattr(values, field)
        if value is not None and not 1 <= value <= values.size:
            raise TopologyError(
                f"{getattr(variables, field)}={value} but {variables.size}={values.size}: {rule}; {hint}"
            )


def require_agreement(environ: Mapping[str, str], topology: Topology, other: LauncherVariables) -> None:
    """Raise TopologyError if the other launcher's variables give another rank or size than `topology`."""
    names = (other.rank, other.size)
    for name, expected in zip(names, (topology.rank, topology.size), strict=True):
        value = get_integer(environ, name)
        if value is not None and value != expected:
            raise TopologyError(
                f"{format_present(environ, names)}, but {topology.source} say rank {topology.rank} of "
                f"{topology.size}: `unset {' '.join(find_present(environ, names))}` if {topology.launcher} "
                f"starts the ranks, or set {OVERRIDE}"
            )
