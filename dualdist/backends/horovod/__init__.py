"""Backend over Horovod's engine, whose controller runs on MPI or on Gloo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualdist.backends.registry import HOROVOD, HOROVOD_LIBRARY, NO_TORCH, Availability, BackendSpec
from dualdist.errors import BackendUnavailableError, UnsupportedError

if TYPE_CHECKING:
    from dualdist.backends.base import Backend, InitContext
    from dualdist.horovod_build.record import BuildRecord


CONTROLLER = "HOROVOD_CONTROLLER"


def select_controller(context: InitContext) -> str:
    """Return "mpi" or "gloo" for Horovod's controller: as requested, else MPI if the launcher started it."""
    topology = context.topology
    requested = context.transport if context.transport in ("gloo", "mpi") else context.environ.get(CONTROLLER, "")
    requested = requested.lower()
    if requested == "mpi" and not topology.mpi and topology.size > 1:
        raise UnsupportedError(
            f"Horovod over MPI was requested (DUALDIST_TRANSPORT or {CONTROLLER} is mpi), but MPI was not started by "
            f"{topology.launcher}: use mpirun, horovodrun --mpi or srun --mpi=pmix, or set DUALDIST_TRANSPORT=gloo"
        )
    if requested in ("gloo", "mpi"):
        return requested
    if not topology.mpi:
        return "gloo"
    from dualdist.backends.horovod import backend

    return "mpi" if backend.is_built_with_mpi() else "gloo"


def start(context: InitContext) -> Backend:
    from dualdist.backends.horovod import backend

    return backend.start_on_gloo(context)


def start_early(context: InitContext) -> Backend | None:
    """Start Horovod if its controller runs on MPI, which connects the ranks; else return None."""
    if select_controller(context) != "mpi":
        return None
    from dualdist.backends.horovod import backend

    return backend.start_on_mpi(context)


def availability(versions: Mapping[str, str | None], record: BuildRecord | None) -> Availability:
    torch = versions["torch"]
    if record is None:
        return Availability(False, None, "Horovod is not installed")
    reason = ""
    if torch is None:
        reason = NO_TORCH
    elif not record.fits(torch):
        reason = f"built for torch {record.torch}, but torch {torch} is installed"
    return Availability(
        not reason, record.horovod, reason, record.torch, gloo=record.gloo, mpi=record.mpi, nccl=record.nccl
    )


def problem(transport: str) -> str | None:
    """Return why the installed Horovod cannot run over a transport; imports it."""
    from dualdist.backends.horovod import backend

    try:
        backend.import_horovod()
    except BackendUnavailableError as error:
        return str(error)
    if transport == "mpi" and not backend.is_built_with_mpi():
        return "this Horovod was built without MPI"
    return None


SPEC = BackendSpec(
    HOROVOD,
    start,
    start_early=start_early,
    transports=("gloo", "mpi", "nccl"),
    launcher="horovodrun",
    library=HOROVOD_LIBRARY,
    availability=availability,
    problem=problem,
)
