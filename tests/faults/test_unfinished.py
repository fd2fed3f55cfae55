"""Operations that are begun and never finished: reported, and no rank hangs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from faults import rank
from faults.conftest import Refuses
from faults.ranks import LIMIT_S, RANK, assert_says
from harness.jobs import Launch, Outcome

CELLS = {
    "native": (["torchrun", "--standalone", "--nproc-per-node=2", *RANK[1:], "native"]),
    "horovod-gloo": (["torchrun", "--standalone", "--nproc-per-node=2", *RANK[1:], "horovod"]),
    "horovod-mpi": (["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *RANK, "horovod"]),
    "mpi": (["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *RANK, "mpi"]),
}


@pytest.fixture(scope="module", params=CELLS)
def waiting(
    request: pytest.FixtureRequest, base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    """One launch of a cell, at whose outcome three tests look."""
    launch = Launch(base_env, tmp_path_factory.mktemp("waiting"))
    return launch([*CELLS[request.param], "is waited for"], timeout_s=LIMIT_S, check=False)


def assert_both_have_done(what: Callable[[], None], outcome: Outcome) -> None:
    assert outcome.stdout.count(f"done: {what.__name__}") == 2, str(outcome)


def test_a_rank_may_come_late_to_what_others_have_begun(waiting: Outcome) -> None:
    assert_both_have_done(rank.last_rank_begins_late, waiting)


def test_who_has_joined_waits_for_those_who_compute(waiting: Outcome) -> None:
    assert_both_have_done(rank.joins_early, waiting)


def test_what_is_unfinished_at_shutdown_is_reported_by_name(waiting: Outcome) -> None:
    assert_both_have_done(rank.leaves_one_unfinished, waiting)
    assert waiting.rc == 0, str(waiting)
    assert "1 operation(s) unfinished" in waiting.stderr, str(waiting)
    assert "allreduce 'never.met' of float32(3,)" in waiting.stderr, str(waiting)


@pytest.mark.parametrize("backend", ["native", "horovod", "mpi"])
def test_who_has_joined_does_not_wait_for_a_stopped_rank(refuses: Refuses, backend: str) -> None:
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *RANK, backend, "joined"]
    assert_says(refuses(argv, timeout_s=LIMIT_S), "CollectiveTimeoutError", "join", "no answer from rank 1")
