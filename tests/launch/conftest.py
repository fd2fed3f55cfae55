"""A real Slurm, and hosts with ssh, for the tests of launchers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

import pytest
from harness import hosts
from harness import slurm as slurm_cluster
from harness.installed import lack

LEFT_S = 5.0
"""How long what ran on the hosts may outlive `dualdist run`."""


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
    if lacking := hosts.missing(base_env["PATH"]):
        lack(", ".join(lacking), hosts.PACKAGES)
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with hosts.two_hosts(tmp_path_factory.mktemp("hosts"), base_env) as up:
        yield up


@pytest.fixture
def two_hosts(_two_hosts: hosts.Hosts) -> Iterator[hosts.Hosts]:
    """The session's hosts, idle; a rank or a launcher that is still there a little after the test fails it."""
    yield _two_hosts
    deadline = time.monotonic() + LEFT_S
    while (left := [*_two_hosts.processes("dualdist"), *_two_hosts.processes("_program.py")]) and (
        time.monotonic() < deadline
    ):
        time.sleep(hosts.POLL_S)
    assert not left, f"left on the hosts: {left}"
