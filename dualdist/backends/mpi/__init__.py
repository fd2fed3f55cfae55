"""Backend over MPI by mpi4py, for launchers that start MPI."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dualdist.backends.registry import MPI, NO_TORCH, Availability, BackendSpec

if TYPE_CHECKING:
    from dualdist.backends.base import Backend, InitContext
    from dualdist.horovod_build.record import BuildRecord

NO_MPI4PY = "mpi4py is not installed"


def start(context: InitContext) -> Backend:
    from dualdist.backends.mpi import backend

    return backend.start(context)


def availability(versions: Mapping[str, str | None], record: BuildRecord | None) -> Availability:
    """Require mpi4py; the MPI that it finds is unknown until it starts, which may end this process."""
    mpi4py = versions["mpi4py"]
    if versions["torch"] is None:
        return Availability(False, mpi4py, NO_TORCH)
    return Availability(mpi4py is not None, mpi4py, "" if mpi4py else NO_MPI4PY)


def problem(transport: str) -> str | None:
    return None if find_spec("mpi4py") is not None else NO_MPI4PY


SPEC = BackendSpec(
    MPI,
    start,
    start_early=start,
    transports=("mpi",),
    launcher="mpirun",
    needs_mpi=True,
    library="mpi4py",
    availability=availability,
    problem=problem,
)
