"""Operations that are begun and never finished: reported, and no rank hangs."""

from __future__ import annotations

import pytest
from faults.conftest import Refuses
from faults.ranks import LIMIT_S, RANK, assert_says
from harness.jobs import Launch

CELLS = {
    "native": (["torchrun", "--standalone", "--nproc-per-node=2", *RANK[1:], "native"]),
    "horovod-gloo": (["torchrun", "--standalone", "--nproc-per-node=2", *RANK[1:], "horovod"]),
    "horovod-mpi": (["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *RANK, "horovod"]),
    "mpi": (["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *RANK, "mpi"]),
}


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_unfinished_at_shutdown_is_reported_by_name(launch: Launch, cell: str) -> None:
    outcome = launch([*CELLS[cell], "unfinished"], timeout_s=LIMIT_S)
    assert "1 operation(s) unfinished" in outcome.stderr, str(outcome)
    assert "allreduce 'never.met' of float32(3,)" in outcome.stderr, str(outcome)


@pytest.mark.parametrize("cell", CELLS)
def test_who_has_joined_waits_for_those_who_compute(launch: Launch, cell: str) -> None:
    launch([*CELLS[cell], "late joined"], timeout_s=LIMIT_S)


@pytest.mark.parametrize("backend", ["native", "horovod", "mpi"])
def test_who_has_joined_does_not_wait_for_a_stopped_rank(refuses: Refuses, backend: str) -> None:
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *RANK, backend, "joined"]
    assert_says(refuses(argv, timeout_s=LIMIT_S), "CollectiveTimeoutError", "join", "no answer from rank 1")


@pytest.mark.parametrize("cell", CELLS)
def test_a_rank_may_come_late_to_what_others_have_begun(launch: Launch, cell: str) -> None:
    launch([*CELLS[cell], "late begun"], timeout_s=LIMIT_S)
