"""A real Slurm for the tests of launchers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from harness import slurm as slurm_cluster
from harness.installed import lack


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
