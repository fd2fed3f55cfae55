"""MPI: mpirun, mpi4py, and ranks that only MPI can bring together."""

from __future__ import annotations

from collections.abc import Iterator

from dualdist.doctor.context import DoctorContext
from dualdist.doctor.facts import called, family_of
from dualdist.doctor.findings import Finding
from dualdist.environments.env_values import RENDEZVOUS, get_value
from dualdist.rendezvous.backend_selection import BACKEND
from dualdist.utils.package_probe import Mpi4pyProbe

OTHERWISE = f"set MASTER_ADDR and MASTER_PORT, or {RENDEZVOUS}=file:///a/shared/folder/name"


def find(case: DoctorContext) -> Iterator[Finding]:
    """What is wrong with MPI, or with asking for it here."""
    yield from _of_starters(case)
    yield from _of_mpi4py(case)
    yield from _of_asking(case)
    yield from _of_meeting(case)


def _of_starters(case: DoctorContext) -> Iterator[Finding]:
    first = [starter for program in ("mpirun", "mpiexec") if (starter := case.facts.starter(program)) is not None]
    kinds = {(starter.family, starter.version): starter for starter in reversed(case.facts.starters)}
    if len({(starter.family, starter.version) for starter in first}) > 1:
        yield Finding(
            "two-mpis",
            "warning",
            f"mpirun is {first[0]}, and mpiexec is {first[1]}",
            "ranks that one MPI starts, and another one's library joins, are jobs of one rank each",
            "put one MPI's folder first on PATH, so that both come from there",
        )
    elif len(kinds) > 1:
        others = [str(starter) for starter in case.facts.starters if starter not in first]
        yield Finding(
            "two-mpis",
            "info",
            f"besides {first[0]}, PATH has {', '.join(dict.fromkeys(others))}",
            f"the one that comes first starts the ranks, on every host alike, and mpi4py and Horovod must use "
            f"{called(first[0].family)}, too",
            "leave one of them off PATH",
        )


def _of_mpi4py(case: DoctorContext) -> Iterator[Finding]:
    said, mpirun = case.facts.mpi4py, case.facts.starter()
    needs_it = case.asked == "mpi" or (case.topology is not None and case.topology.rendezvous == "mpi")
    if isinstance(said, str):
        yield Finding(
            "mpi4py-broken",
            "error" if case.is_started and needs_it else "warning",
            f"mpi4py is installed, but cannot be imported: {said}",
            "the backend mpi needs it, and ranks under mpirun meet through it",
            "MPI4PY_LIBMPI=/path/to/libmpi.so names the MPI for an mpi4py of PyPI; else pip install --force-reinstall "
            "--no-deps mpi4py, with mpirun on PATH",
        )
    elif isinstance(said, Mpi4pyProbe) and mpirun is not None:
        own = family_of(said.library)
        if "unknown" not in (own, mpirun.family) and own != mpirun.family:
            where = f" ({', '.join(said.files)})" if said.files else ""
            yield Finding(
                "mpi4py-other-mpi",
                "error" if case.is_started and needs_it else "warning",
                f"mpi4py uses {said.library.partition(',')[0].strip()}{where}, and mpirun is {mpirun}",
                "under that mpirun MPI does not start, or every rank is a job of one, which dd.init() refuses",
                f"put the mpirun of {called(own)} first on PATH, or name its libmpi.so in MPI4PY_LIBMPI",
            )


def _of_asking(case: DoctorContext) -> Iterator[Finding]:
    """The backend mpi, asked for where it cannot be had."""
    topology, mpi = case.topology, case.backends["mpi"]
    if case.asked != "mpi" or topology is None or topology.size == 1:
        return
    why = f"{BACKEND}=mpi asks for it"
    if not topology.mpi:
        yield Finding(
            "mpi-not-started",
            "error",
            f"MPI was not started by {topology.launcher}",
            why,
            f"start with mpirun, mpiexec, horovodrun --mpi or srun --mpi=pmix, or unset {BACKEND}",
        )
    elif not mpi.available:
        do = f"pip install mpi4py, or unset {BACKEND}"
        yield Finding("mpi4py-missing", "error", mpi.reason, why, do, case.pip("install", "mpi4py"))


def _of_meeting(case: DoctorContext) -> Iterator[Finding]:
    """Ranks that only MPI can bring together, without anything that speaks MPI."""
    topology, horovod = case.topology, case.backends["horovod"]
    if topology is None or topology.rendezvous != "mpi" or get_value(case.environ, RENDEZVOUS) is not None:
        return
    if case.facts.versions.get("mpi4py") is None and not (horovod.available and horovod.mpi is not False):
        yield Finding(
            "ranks-cannot-meet",
            "error",
            f"mpi4py is not installed, and {topology.launcher} gives no address of rank 0",
            "the ranks find each other through MPI",
            f"pip install mpi4py, or {OTHERWISE}",
            case.pip("install", "mpi4py"),
        )
