"""From what variables tell to a whole Topology: fields that none tells are filled in and listed as inferred."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dualdist.environments.env_values import (
    RENDEZVOUS,
    EnvValues,
    LauncherVariables,
    find_set,
    format_set,
    get_integer,
    get_value,
)
from dualdist.errors import TopologyError
from dualdist.topology import Rendezvous, Topology

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
MASTER = (MASTER_ADDR, MASTER_PORT)
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True)
class MainAddress:
    """The address and port of rank 0, or of the store that the launcher's agent serves in its place."""

    address: str
    port: int
    agent: bool = False
    names: tuple[str, str] = MASTER

    @property
    def is_loopback(self) -> bool:
        """Whether only ranks of one host can use the address."""
        return self.address in ("localhost", "::1") or self.address.startswith("127.")


def get_main_address(environ: Mapping[str, str], names: tuple[str, str] = MASTER) -> MainAddress | None:
    """Rank 0's address and port; None unless both are set.

    One alone is no error here: the launcher has another way for the ranks to meet, and it is left over from elsewhere.
    """
    if len(find_set(environ, names)) < 2:
        return None
    address, port = get_value(environ, names[0]), get_integer(environ, names[1])
    assert address is not None
    assert port is not None
    if not 0 < port < 65536:
        raise TopologyError(f"{names[1]}={port}: a port is between 1 and 65535; set {names[1]} to a free one")
    return MainAddress(address, port, get_value(environ, AGENT_STORE) == "True", names)


def require_main_address(
    environ: Mapping[str, str], size: int, size_name: str, names: tuple[str, str] = MASTER
) -> MainAddress | None:
    """Rank 0's address and port; an error where several ranks have no way to meet. DUALDIST_RENDEZVOUS is one."""
    master = get_main_address(environ, names)
    if master is None and size > 1 and get_value(environ, RENDEZVOUS) is None:
        missing = [name for name in names if get_value(environ, name) is None]
        raise TopologyError(
            f"{' and '.join(missing)} not set, but {format_set(environ, (size_name, *names))}: "
            "the ranks must know where "
            f"rank 0 listens; set both {' and '.join(names)}, or {RENDEZVOUS}=file:///a/shared/folder/name"
        )
    return master


def infer_topology(
    told: EnvValues,
    *,
    launcher: str,
    source: str,
    master: MainAddress | None = None,
    rendezvous: Rendezvous = "none",
    mpi: bool = False,
    names: LauncherVariables | None = None,
) -> Topology:
    """The rank's Topology; `rendezvous` is how the ranks meet where no address of rank 0 is given.

    `names` are the variables that told it.
    """
    local_rank, local_size = _local(told, one_host=master is not None and master.is_loopback)
    node, nodes = _node(told, local_rank, local_size)
    guesses = {
        "local_rank": told.local_rank,
        "local_size": told.local_size,
        "node_rank": told.node_rank,
        "num_nodes": told.num_nodes,
    }
    inferred = frozenset(name for name, value in guesses.items() if value is None)
    if told.size == 1:
        inferred = frozenset()
    elif told.num_nodes == 1 or told.local_size == told.size:  # one node: the rest follows
        inferred -= {"local_size", "node_rank", "num_nodes"}
    if told.size == 1:
        rendezvous = "none"
    elif master is not None:
        rendezvous = "agent" if master.agent else "address"
    return Topology(
        rank=told.rank,
        size=told.size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node,
        num_nodes=nodes,
        launcher=launcher,
        source=source,
        address=master.address if master else None,
        port=master.port if master else None,
        rendezvous=rendezvous,
        mpi=mpi,
        inferred=inferred,
        origins=tuple(_origins(told, names, master)),
    )


def _origins(told: EnvValues, names: LauncherVariables | None, master: MainAddress | None) -> Iterator[tuple[str, str]]:
    for part, name in names.by_field().items() if names is not None else ():
        if name is not None and getattr(told, part) is not None:
            yield part, name
    if master is not None:
        yield from zip(("address", "port"), master.names, strict=True)


def _local(told: EnvValues, *, one_host: bool) -> tuple[int, int]:
    """Local rank and local size: as told, or as on one host, or as with ranks spread in blocks over the nodes."""
    if told.local_rank is None and told.local_size is None and told.num_nodes is None:
        return (told.rank, told.size) if one_host else (0, 1)  # a pod each, as Kubernetes' PyTorchJob starts them
    local_size = told.local_size
    if local_size is None:
        least = 1 if told.local_rank is None else told.local_rank + 1
        if told.num_nodes is not None:
            local_size = max(least, _ceil(told.size, told.num_nodes))
        else:
            local_size = told.size if told.local_rank == told.rank else least
    local_rank = told.rank % local_size if told.local_rank is None else told.local_rank
    return local_rank, local_size


def _node(told: EnvValues, local_rank: int, local_size: int) -> tuple[int, int]:
    """Node and nodes: as told, or as with ranks placed by slot, or else by node in turn, or else anything possible."""
    least = 1 if told.node_rank is None else told.node_rank + 1
    nodes = max(least, _ceil(told.size, local_size)) if told.num_nodes is None else told.num_nodes
    if told.node_rank is not None:
        return told.node_rank, nodes
    by_slot = told.rank % local_size == local_rank
    by_node = told.rank // nodes == local_rank
    node = told.rank % nodes if by_node and not by_slot else told.rank // local_size
    return min(node, nodes - 1), nodes


def _ceil(total: int, part: int) -> int:
    return -(-total // part)
