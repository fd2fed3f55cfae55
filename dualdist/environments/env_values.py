"""Launcher variables: names, values and bounds; and the Topology that they give.

Errors name the variables that are missing or wrong. Fields without a variable are inferred, and listed as such.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dualdist.errors import TopologyError
from dualdist.topology import Rendezvous, Topology
from dualdist.utils.network_interfaces import is_loopback, without_brackets

MASTER = ("MASTER_ADDR", "MASTER_PORT")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RENDEZVOUS = "DUALDIST_RENDEZVOUS"
OVERRIDE = "DUALDIST_RANK and DUALDIST_SIZE"
INTEGER = re.compile(r"[0-9]{1,9}")
SHOWN = 40  # characters of a value in an error
FIELDS = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")
# A field, its bound, and the rule: an index counts from 0, a number of things from 1.
BOUNDS = (
    ("rank", "size", 0, "a rank must be below the size"),
    ("local_rank", "local_size", 0, "a local rank must be below the number of ranks of its node"),
    ("local_rank", "size", 0, "a local rank must be below the size"),
    ("node_rank", "num_nodes", 0, "a node's index must be below the number of nodes"),
    ("node_rank", "size", 0, "a node's index must be below the number of ranks"),
    ("local_size", "size", 1, "a node has between one and all of the ranks"),
    ("num_nodes", "size", 1, "there are between one node and one node per rank"),
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

    def given(self) -> tuple[str, ...]:
        return tuple(self.by_field().values())

    def by_field(self) -> dict[str, str]:
        return {field: name for field in FIELDS if (name := getattr(self, field)) is not None}


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


def read_values(environ: Mapping[str, str], variables: LauncherVariables) -> dict[str, int]:
    """Return the values of those of `variables` that are set, by field, checked; rank and size must be set."""
    names = variables.by_field()
    values = {field: value for field, name in names.items() if (value := get_integer(environ, name)) is not None}
    if values["size"] < 1:
        raise TopologyError(
            f"{variables.size}={values['size']}: a job has at least one rank; start with `{variables.command}`"
        )
    for field, bound, first, rule in BOUNDS:
        if field in values and bound in values and not first <= values[field] < first + values[bound]:
            raise TopologyError(
                f"{names[field]}={values[field]} but {names[bound]}={values[bound]}: {rule}; was this started with "
                f"`{variables.command}`? Unset leftover variables, or set {OVERRIDE}"
            )
    return values


def require_agreement(environ: Mapping[str, str], topology: Topology, other: LauncherVariables) -> None:
    """Raise TopologyError if the other launcher's variables give another rank or size than `topology`."""
    names = (other.rank, other.size)
    for name, expected in zip(names, (topology.rank, topology.size), strict=True):
        if get_integer(environ, name) not in (None, expected):
            raise TopologyError(
                f"{format_present(environ, names)}, but {topology.source} say rank {topology.rank} of "
                f"{topology.size}: `unset {' '.join(find_present(environ, names))}` if {topology.launcher} "
                f"starts the ranks, or set {OVERRIDE}"
            )


@dataclass(frozen=True)
class MainAddress:
    """Address and port of rank 0, or of the store that the launcher's agent serves for it."""

    address: str
    port: int
    has_agent: bool = False

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.address)


def get_main_address(environ: Mapping[str, str], variables: tuple[str, str] = MASTER) -> MainAddress | None:
    """Return rank 0's address and port, or None unless both are set.

    One alone is ignored as a leftover: the launcher has another rendezvous.
    """
    if len(find_present(environ, variables)) < 2:
        return None
    address, port = get_value(environ, variables[0]), get_integer(environ, variables[1])
    assert address is not None
    assert port is not None
    if not 0 < port < 65536:
        raise TopologyError(f"{variables[1]}={port}: a port is between 1 and 65535; set {variables[1]} to a free one")
    return MainAddress(without_brackets(address), port, get_value(environ, AGENT_STORE) == "True")


def read_topology(
    environ: Mapping[str, str],
    variables: LauncherVariables,
    *,
    launcher: str | None = None,
    needed: Sequence[str] | None = None,
    note: str | None = None,
    address: tuple[str, str] | None = MASTER,
    rendezvous: Rendezvous = "none",
    mpi: bool = False,
) -> Topology:
    """Return the Topology that `variables` give; all of `needed`, by default all, must be set.

    Args:
        launcher: its name for the user, by default that of the variables.
        note: follows the names of the variables in Topology.source, by default who sets them.
        address: the variables that may give rank 0's address; without a `rendezvous` several ranks need it.
        rendezvous: used if there is no such address.
    """
    require_all(environ, variables, needed)
    values = read_values(environ, variables)
    main = get_main_address(environ, address) if address is not None else None
    if main is None and rendezvous == "none" and values["size"] > 1 and get_value(environ, RENDEZVOUS) is None:
        names = address or MASTER
        missing = [name for name in names if get_value(environ, name) is None]
        raise TopologyError(
            f"{' and '.join(missing)} not set, but {format_present(environ, (variables.size, *names))}: the ranks need "
            f"rank 0's address; set both {' and '.join(names)}, or {RENDEZVOUS}=file:///a/shared/folder/name"
        )
    local_rank, local_size = _infer_local(values, one_host=main is not None and main.is_loopback)
    node_rank, num_nodes = _infer_node(values, local_rank, local_size)
    inferred = frozenset(FIELDS).difference(values)
    if values["size"] == 1:
        inferred, rendezvous = frozenset(), "none"
    elif main is not None:
        rendezvous = "agent" if main.has_agent else "address"
    if values.get("num_nodes") == 1 or values.get("local_size") == values["size"]:  # one node: these fields follow
        inferred -= {"local_size", "node_rank", "num_nodes"}
    given = [(field, name) for field, name in variables.by_field().items() if field in values]
    note = f" ({variables.launcher})" if note is None else note
    return Topology(
        rank=values["rank"],
        size=values["size"],
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        launcher=launcher or variables.launcher,
        source=", ".join(name.partition("[")[0] for _, name in given) + note,  # the same on every node
        address=main.address if main else None,
        port=main.port if main else None,
        rendezvous=rendezvous,
        mpi=mpi,
        inferred=inferred,
        origins=(*given, *zip(("address", "port"), address if main and address else (), strict=False)),
    )


def _infer_local(values: Mapping[str, int], *, one_host: bool) -> tuple[int, int]:
    """Return local rank and local size: as given, or as on one host, or as with ranks in blocks over the nodes."""
    rank, size = values["rank"], values["size"]
    if values.keys().isdisjoint(("local_rank", "local_size", "num_nodes")):
        return (rank, size) if one_host else (0, 1)  # one pod per rank, as in Kubernetes' PyTorchJob
    least = values.get("local_rank", 0) + 1
    if "local_size" in values:
        local_size = values["local_size"]
    elif "num_nodes" in values:
        local_size = max(least, -(-size // values["num_nodes"]))
    else:
        local_size = size if values["local_rank"] == rank else least
    return values.get("local_rank", rank % local_size), local_size


def _infer_node(values: Mapping[str, int], local_rank: int, local_size: int) -> tuple[int, int]:
    """Return node rank and number of nodes: as given, or as with ranks placed by slot, else by node, else possible."""
    rank, least = values["rank"], values.get("node_rank", 0) + 1
    num_nodes = values.get("num_nodes", max(least, -(-values["size"] // local_size)))
    if "node_rank" in values:
        return values["node_rank"], num_nodes
    by_slot, by_node = rank % local_size == local_rank, rank // num_nodes == local_rank
    node_rank = rank % num_nodes if by_node and not by_slot else rank // local_size
    return min(node_rank, num_nodes - 1), num_nodes
