"""MPI: mpirun and mpiexec on PATH, mpi4py, and jobs that need MPI."""

from collections.abc import Iterator

from dualdist.doctor.checks import DoctorContext, Finding, Level, error, info, warning
from dualdist.doctor.facts import MPI_PROGRAMS, Mpi4pyProbe, mpi_name
from dualdist.launch.execute import parse_mpi_version
from dualdist.rendezvous.backend_selection import BACKEND


def find(context: DoctorContext) -> Iterator[Finding]:
    yield from _check_programs(context)
    yield from _check_mpi4py(context)
    yield from _check_requested(context)


def _check_programs(context: DoctorContext) -> Iterator[Finding]:
    programs = context.facts.mpi_programs
    first = [each for name in MPI_PROGRAMS if (each := context.facts.mpi_program(name)) is not None]
    if len({(each.family, each.version) for each in first}) > 1:
        yield warning(
            "two-mpis",
            f"mpirun is {first[0]}, but mpiexec is {first[1]}",
            "ranks that one MPI starts and that load the other MPI's library become 1-rank jobs",
            "put the folder of one MPI first on PATH, so that both programs come from it",
        )
    elif len({(each.family, each.version) for each in programs}) > 1:
        others = dict.fromkeys(str(each) for each in programs if each not in first)
        yield info(
            "two-mpis",
            f"besides {first[0]}, PATH has {', '.join(others)}",
            f"the first one starts the ranks on every host; mpi4py and Horovod must use {mpi_name(first[0].family)}",
            "remove one of them from PATH",
        )


def _check_mpi4py(context: DoctorContext) -> Iterator[Finding]:
    probe, mpirun, topology = context.facts.mpi4py, context.facts.mpi_program(), context.topology
    is_needed = context.requested_backend == "mpi" or (topology is not None and topology.rendezvous == "mpi")
    level: Level = "error" if context.is_distributed and is_needed else "warning"
    if isinstance(probe, str):
        yield Finding(
            level,
            "mpi4py-broken",
            f"mpi4py is installed, but cannot be imported: {probe}",
            "the mpi backend and the rendezvous under mpirun need it",
            "with PyPI's mpi4py, set MPI4PY_LIBMPI=/path/to/libmpi.so; else, with mpirun on PATH, pip install "
            "--force-reinstall --no-deps mpi4py",
        )
    elif isinstance(probe, Mpi4pyProbe) and mpirun is not None:
        family = parse_mpi_version(probe.library)
        if "unknown" not in (family, mpirun.family) and family != mpirun.family:
            files = f" ({', '.join(probe.files)})" if probe.files else ""
            yield Finding(
                level,
                "mpi4py-other-mpi",
                f"mpi4py uses {probe.library.partition(',')[0].strip()}{files}, but mpirun is {mpirun}",
                "under that mpirun MPI does not start, or every rank becomes a 1-rank job, which dd.init() refuses",
                f"put the mpirun of {mpi_name(family)} first on PATH, or set MPI4PY_LIBMPI to mpirun's libmpi.so",
            )


def _check_requested(context: DoctorContext) -> Iterator[Finding]:
    """Check that the mpi backend, if requested, is available."""
    topology, mpi = context.topology, context.backends["mpi"]
    if context.requested_backend != "mpi" or topology is None or topology.size == 1:
        return
    why = f"{BACKEND}=mpi requires it"
    if not topology.mpi:
        yield error(
            "mpi-not-started",
            f"{topology.launcher} did not start MPI",
            why,
            f"start with mpirun, mpiexec, horovodrun --mpi or srun --mpi=pmix, or unset {BACKEND}",
        )
    elif not mpi.available:
        command = context.command("pip", "install", "mpi4py")
        yield error("mpi4py-missing", mpi.reason, why, f"pip install mpi4py, or unset {BACKEND}", command)
