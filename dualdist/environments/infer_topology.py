"""Topology from partial values: fields without a variable are inferred, and listed as such."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dualdist.environments.env_values import (
    FIELDS,
    RENDEZVOUS,
    EnvValues,
    LauncherVariables,
    find_present,
    format_present,
    get_integer,
    get_value,
)
from dualdist.errors import TopologyError
from dualdist.topology import Rendezvous, Topology

MASTER = ("MASTER_ADDR", "MASTER_PORT")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True)
class MainAddress:
    """Address and port of rank 0, or of the store that the launcher's agent serves for it."""

    address: str
    port: int
    has_agent: bool = False
    variables: tuple[str, str] = MASTER

    @property
    def is_loopback(self) -> bool:
        """Return True if only ranks of one host can use the address."""
        return self.address in ("localhost", "::1") or self.address.startswith("127.")


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
    return MainAddress(address, port, get_value(environ, AGENT_STORE) == "True", variables)


def require_main_address(
    environ: Mapping[str, str], size: int, size_name: str, variables: tuple[str, str] = MASTER
) -> MainAddress | None:
    """Return rank 0's address; raise TopologyError if several ranks have neither that nor DUALDIST_RENDEZVOUS."""
    main = get_main_address(environ, variables)
    if main is None and size > 1 and get_value(environ, RENDEZVOUS) is None:
        missing = [name for name in variables if get_value(environ, name) is None]
        raise TopologyError(
            f"{' and '.join(missing)} not set, but {format_present(environ, (size_name, *variables))}: the ranks need "
            f"rank 0's address; set both {' and '.join(variables)}, or {RENDEZVOUS}=file:///a/shared/folder/name"
        )
    return main


def infer_topology(
    values: EnvValues,
    variables: LauncherVariables | None = None,
    *,
    launcher: str,
    source: str,
    main: MainAddress | None = None,
    rendezvous: Rendezvous = "none",
    mpi: bool = False,
) -> Topology:
    """Return the Topology of `values`, read from `variables`; `rendezvous` is used if there is no main address."""
    local_rank, local_size = _infer_local(values, one_host=main is not None and main.is_loopback)
    node_rank, num_nodes = _infer_node(values, local_rank, local_size)
    inferred = frozenset(field for field in FIELDS if getattr(values, field) is None)
    if values.size == 1:
        inferred, rendezvous = frozenset(), "none"
    elif main is not None:
        rendezvous = "agent" if main.has_agent else "address"
    if values.num_nodes == 1 or values.local_size == values.size:  # one node: these fields follow
        inferred -= {"local_size", "node_rank", "num_nodes"}
    return Topology(
        rank=values.rank,
        size=values.size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        launcher=launcher,
        source=source,
        address=main.address if main else None,
        port=main.port if main else None,
        rendezvous=rendezvous,
        mpi=mpi,
        inferred=inferred,
        origins=tuple(_origins(values, variables, main)),
    )


def _origins(
    values: EnvValues, variables: LauncherVariables | None, main: MainAddress | None
) -> Iterator[tuple[str, str]]:
    for field, name in variables.by_field().items() if variables is not None else ():
        if name is not None and getattr(values, field) is not None:
            yield field, name
    if main is not None:
        yield from zip(("address", "port"), main.variables, strict=True)


def _infer_local(values: EnvValues, *, one_host: bool) -> tuple[int, int]:
    """Return local rank and local size: as given, or as on one host, or as with ranks in blocks over the nodes."""
    if values.local_rank is None and values.local_size is None and values.num_nodes is None:
        return (values.rank, values.size) if one_host else (0, 1)  # one pod per rank, as in Kubernetes' PyTorchJob
    local_size = values.local_size
    if local_size is None:
        least = 1 if values.local_rank is None else values.local_rank + 1
        if values.num_nodes is not None:
            local_size = max(least, _ceil_div(values.size, values.num_nodes))
        else:
            local_size = values.size if values.local_rank == values.rank else least
    local_rank = values.rank % local_size if values.local_rank is None else values.local_rank
    return local_rank, local_size


def _infer_node(values: EnvValues, local_rank: int, local_size: int) -> tuple[int, int]:
    """Return node rank and number of nodes: as given, or as with ranks placed by slot, else by node, else possible."""
    least = 1 if values.node_rank is None else values.node_rank + 1
    num_nodes = max(least, _ceil_div(values.size, local_size)) if values.num_nodes is None else values.num_nodes
    if values.node_rank is not None:
        return values.node_rank, num_nodes
    by_slot = values.rank % local_size == local_rank
    by_node = values.rank // num_nodes == local_rank
    node_rank = values.rank % num_nodes if by_node and not by_slot else values.rank // local_size
    return min(node_rank, num_nodes - 1), num_nodes


def _ceil_div(total: int, part: int) -> int:
    return -(-total // part)
