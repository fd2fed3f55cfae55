"""From what variables tell to a whole Topology: fields that none tells are filled in and listed as inferred."""

from __future__ import annotations

from collections.abc import Iterator

from dualdist.environments.env_values import Names, Told
from dualdist.environments.master import Master
from dualdist.topology import Meeting, Topology


def topology(
    told: Told,
    *,
    launcher: str,
    source: str,
    master: Master | None = None,
    meeting: Meeting = "none",
    mpi: bool = False,
    names: Names | None = None,
) -> Topology:
    """The rank's Topology; `meeting` is how the ranks meet where no address of rank 0 is given.

    `names` are the variables that told it.
    """
    local_rank, local_size = _local(told, one_host=master is not None and master.is_loopback)
    node, nodes = _node(told, local_rank, local_size)
    guesses = {"local_rank": told.local_rank, "local_size": told.local_size, "node": told.node, "nodes": told.nodes}
    inferred = frozenset(name for name, value in guesses.items() if value is None)
    if told.size == 1:
        inferred = frozenset()
    elif told.nodes == 1 or told.local_size == told.size:  # one node: the rest follows
        inferred -= {"local_size", "node", "nodes"}
    if told.size == 1:
        meeting = "none"
    elif master is not None:
        meeting = "agent" if master.agent else "address"
    return Topology(
        rank=told.rank,
        size=told.size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        launcher=launcher,
        source=source,
        address=master.address if master else None,
        port=master.port if master else None,
        meeting=meeting,
        mpi=mpi,
        inferred=inferred,
        origins=tuple(_origins(told, names, master)),
    )


def _origins(told: Told, names: Names | None, master: Master | None) -> Iterator[tuple[str, str]]:
    for part, name in names.by_field().items() if names is not None else ():
        if name is not None and getattr(told, part) is not None:
            yield part, name
    if master is not None:
        yield from zip(("address", "port"), master.names, strict=True)


def _local(told: Told, *, one_host: bool) -> tuple[int, int]:
    """Local rank and local size: as told, or as on one host, or as with ranks spread in blocks over the nodes."""
    if told.local_rank is None and told.local_size is None and told.nodes is None:
        return (told.rank, told.size) if one_host else (0, 1)  # a pod each, as Kubernetes' PyTorchJob starts them
    local_size = told.local_size
    if local_size is None:
        least = 1 if told.local_rank is None else told.local_rank + 1
        if told.nodes is not None:
            local_size = max(least, _ceil(told.size, told.nodes))
        else:
            local_size = told.size if told.local_rank == told.rank else least
    local_rank = told.rank % local_size if told.local_rank is None else told.local_rank
    return local_rank, local_size


def _node(told: Told, local_rank: int, local_size: int) -> tuple[int, int]:
    """Node and nodes: as told, or as with ranks placed by slot, or else by node in turn, or else anything possible."""
    least = 1 if told.node is None else told.node + 1
    nodes = max(least, _ceil(told.size, local_size)) if told.nodes is None else told.nodes
    if told.node is not None:
        return told.node, nodes
    by_slot = told.rank % local_size == local_rank
    by_node = told.rank // nodes == local_rank
    node = told.rank % nodes if by_node and not by_slot else told.rank // local_size
    return min(node, nodes - 1), nodes


def _ceil(total: int, part: int) -> int:
    return -(-total // part)
