"""Topology: this rank's numbers in the job, and the address of rank 0."""

from dataclasses import dataclass, field
from typing import Literal

from dualdist.errors import TopologyError

# The way to rank 0: none needed; rank 0 listens at address and port; the launcher's agent serves a store there; the
# store of Horovod's launcher; MPI broadcast; `dualdist run --min-ranks`; a Slurm step's shared folder; dd.spawn's file.
Rendezvous = Literal["none", "address", "agent", "horovod", "mpi", "run", "slurm", "spawn"]


@dataclass(frozen=True)
class Topology:
    """One rank's numbers in the job.

    0 <= rank < size; 0 <= local_rank < local_size <= size; 0 <= node_rank < num_nodes <= size. `address` and `port` are
    those of rank 0, None if the launcher does not give them. `launcher` is the name that `dd.launcher()` returns;
    `source` says in a few words from which variables this was read. `inferred` names the fields that no variable gave
    and that were filled in by the usual placement; the session replaces them by what the ranks find at rendezvous.
    `mpi` says that the launcher started MPI, so that MPI_Init finds the other ranks. `origins` pairs the fields that
    variables gave with the variables' names.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    launcher: str
    source: str
    address: str | None = None
    port: int | None = None
    rendezvous: Rendezvous = "none"
    mpi: bool = False
    inferred: frozenset[str] = frozenset()
    origins: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for value_name, bound_name in (("rank", "size"), ("local_rank", "local_size"), ("node_rank", "num_nodes")):
            value, bound = getattr(self, value_name), getattr(self, bound_name)
            if not 0 <= value < bound:
                raise TopologyError(
                    f"{value_name}={value} but {bound_name}={bound} (from {self.source}): "
                    f"a {value_name} must be at least 0 and below the {bound_name}"
                )
        for part in ("local_size", "num_nodes"):
            if getattr(self, part) > self.size:
                raise TopologyError(
                    f"{part}={getattr(self, part)} but size={self.size} (from {self.source}): "
                    f"the {part} cannot exceed the number of ranks"
                )
        if self.port is not None and not 0 < self.port < 65536:
            raise TopologyError(f"port={self.port} (from {self.source}): a port is between 1 and 65535")


@dataclass(frozen=True)
class RankLocation:
    """A rank's node, its rank on that node, the lowest rank on its host, and its process.

    A node is the launcher's unit; on a host processes can share memory.
    """

    node_rank: int
    local_rank: int
    host: int = 0
    process: str = field(default="", compare=False)
