"""MPI: mpirun and mpiexec on PATH, and mpi4py."""

from collections.abc import Iterator

from dualdist.doctor.checks import DoctorContext, Finding, Level, warning
from dualdist.doctor.facts import MPI_PROGRAMS, Mpi4pyProbe, mpi_name
from dualdist.launch.execute import parse_mpi_version


def find(context: DoctorContext) -> Iterator[Finding]:
    yield from _check_programs(context)
    yield from _check_mpi4py(context)


def _check_programs(context: DoctorContext) -> Iterator[Finding]:
    mpirun, mpiexec = (context.facts.mpi_program(name) for name in MPI_PROGRAMS)
    if mpirun and mpiexec and (mpirun.family, mpirun.version) != (mpiexec.family, mpiexec.version):
        yield warning(
            "two-mpis",
            f"mpirun is {mpirun}, but mpiexec is {mpiexec}",
            "ranks that one MPI starts and that load the other MPI's library become 1-rank jobs",
            "put the folder of one MPI first on PATH, so that both programs come from it",
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
