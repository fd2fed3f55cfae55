"""The one place that imports mpi4py, which starts MPI: used only where a launcher has started it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from dualdist.deadline import Deadline, call_within
from dualdist.errors import BackendUnavailableError, DualdistError, RendezvousError, TopologyError
from dualdist.topology import Topology
from dualdist.variables import variables_set

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# How Open MPI starts for one broadcast. Its OFI transport for one-sided operations would make MPI_Finalize wait for a
# second (4.1.8). Under another MPI's mpirun it is a job of one: it shall show so, not look for its daemon and abort.
OPENMPI_SETTINGS = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_ess_singleton_isolated": "1"}

OTHERWISE = "or let the ranks meet without MPI: set MASTER_ADDR and MASTER_PORT, or DUALDIST_RENDEZVOUS=file:///a/shared/folder/name"


def broadcast_text(text: str | None, topology: Topology, environ: MutableMapping[str, str], deadline: Deadline) -> str:
    """Rank 0's text, on every rank; all ranks of MPI_COMM_WORLD call it.

    TopologyError where MPI counts other ranks than the launcher's variables do. MPI is left as it was found: started
    here, it is also finished here, so that a rank that dies later cannot leave the others in MPI_Finalize.
    """

    def broadcast() -> str:
        with _world(topology, environ) as world:
            check_world(world.Get_rank(), world.Get_size(), topology)
            received: str = world.bcast(text, root=0)
        return received

    def late() -> DualdistError:
        return RendezvousError(
            f"rank {topology.rank} waited {deadline.timeout_s:g} s in MPI for all {topology.size} ranks: "
            "did one of them end, or never call dd.init()?"
        )

    return call_within(deadline.left_s(), broadcast, late)


def check_world(rank: int, size: int, topology: Topology) -> None:
    """TopologyError where MPI's rank and size are not the launcher's."""
    if (rank, size) != (topology.rank, topology.size):
        raise TopologyError(
            f"the launcher says rank {topology.rank} of {topology.size} ({topology.source}), "
            f"but MPI says rank {rank} of {size}: "
            "this mpi4py uses another MPI than the mpirun that started it; put that MPI's mpirun first on PATH, "
            f"or install mpi4py for this MPI, {OTHERWISE}"
        )


@contextlib.contextmanager
def _world(topology: Topology, environ: MutableMapping[str, str]) -> Iterator[Intracomm]:
    """MPI_COMM_WORLD; MPI is started and finished around the block unless it runs already."""
    try:
        import mpi4py

        with _started_by_hand(mpi4py.rc):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"{topology.launcher} started the ranks, and they meet through MPI, for which mpi4py is needed ({error}): "
            f"pip install mpi4py, {OTHERWISE}"
        ) from error
    if MPI.Is_finalized():
        raise RendezvousError(f"MPI was already finished in this process and cannot start again: {OTHERWISE}")
    if MPI.Is_initialized():
        yield MPI.COMM_WORLD
        return
    with variables_set(environ, {name: value for name, value in OPENMPI_SETTINGS.items() if name not in environ}):
        MPI.Init_thread()
    try:
        yield MPI.COMM_WORLD
    finally:
        MPI.Finalize()


@contextlib.contextmanager
def _started_by_hand(rc: Any) -> Iterator[None]:
    """While mpi4py is imported here, importing it does not start MPI."""
    before = rc.initialize, rc.finalize
    rc.initialize = rc.finalize = False
    try:
        yield
    finally:
        rc.initialize, rc.finalize = before


def ranks_in_world(comm: Any) -> list[int]:
    """The ranks in MPI_COMM_WORLD of an mpi4py communicator's processes, in its order."""
    from mpi4py import MPI

    group = comm.Get_group()
    return list(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), MPI.COMM_WORLD.Get_group()))


def has_ended() -> bool:
    """Whether MPI ran in this process and was finished, so that it cannot start again."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_finalized())
