"""Ranks that MPI starts in unusual ways: messages larger than MPI counts, one thread at a time, MPICH."""

import sys
from pathlib import Path

import pytest
from harness.installed import lack
from harness.jobs import Launch
from harness.mpi import MPICH, PYPIS_MPICH, OpenMPI, of_mpich, of_pypis_mpich
from launch.running import TINY_RANK, check

PROGRAM = str(Path(__file__).with_name("mpi_program.py"))


@pytest.mark.parametrize(("case", "ranks"), [("pieces", 3), ("one-thread", 2)])
def test_every_collective_is_exact(openmpi: OpenMPI, launch: Launch, case: str, ranks: int) -> None:
    """Tensors that MPI cannot count in one call; an MPI that the program has started, for one thread at a time."""
    launch.reports([*openmpi.run(ranks), sys.executable, PROGRAM, case], ranks)


@pytest.mark.parametrize("backend", ["native", "mpi"])
@pytest.mark.parametrize("whose", ["debian", "pypi"])
def test_mpich_ranks_train(request: pytest.FixtureRequest, launch: Launch, whose: str, backend: str) -> None:
    if whose == "debian":
        mpich, env = request.getfixturevalue("mpich"), of_mpich(launch.directory)
    else:
        if not (PYPIS_MPICH / "bin" / "mpiexec").exists():
            lack("PyPI's MPICH", "mpich", f"pip install --no-deps --ignore-installed --prefix {PYPIS_MPICH}")
        mpich, env = MPICH(str(PYPIS_MPICH / "bin" / "mpiexec")), of_pypis_mpich()
    reports = launch.reports([*mpich.run(2), sys.executable, TINY_RANK, backend], 2, env=env)
    check(reports, (2,), launcher="mpirun", backend=backend)
