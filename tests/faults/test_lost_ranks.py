"""A rank that ends, or does not arrive: every other rank ends in time, and names what it waited for."""

from __future__ import annotations

import pytest
from faults.conftest import Refuses
from faults.ranks import LAUNCHERS, LIMIT_S, RANK, assert_says
from harness.effort import Effort
from harness.jobs import Launch

CELLS = [*((launcher, backend) for launcher in LAUNCHERS for backend in ("native", "horovod")), ("mpirun", "mpi")]


# In CI every launcher, every backend and every case more than once; kills are tried elsewhere, too.
IN_CI = [
    *(("torchrun", "native", "raises"), ("torchrun", "horovod", "exits"), ("horovodrun", "horovod", "raises")),
    *(("horovodrun", "native", "exits"), ("mpirun", "native", "is killed"), ("mpirun", "mpi", "raises")),
    ("mpirun", "mpi", "exits"),
]


@pytest.mark.smoke("mpirun-mpi-raises", "mpirun-native-is killed")
@pytest.mark.parametrize("case", ["raises", "exits", "is killed"])
@pytest.mark.parametrize(("launcher", "backend"), CELLS)
def test_a_rank_that_ends_ends_the_job(
    refuses: Refuses, launcher: str, backend: str, case: str, effort: Effort
) -> None:
    if effort((launcher, backend, case) not in IN_CI, False):
        pytest.skip("only with --long")
    argv, first = LAUNCHERS[launcher]
    outcome = refuses([*argv, *RANK[first:], backend, case], timeout_s=LIMIT_S)
    if case == "raises":
        assert "this rank's own mistake" in outcome.stdout + outcome.stderr, str(outcome)
        if backend == "mpi":  # which ends the job at once
            assert "CollectiveTimeoutError" not in outcome.stderr, str(outcome)


@pytest.mark.smoke("native-stops")
@pytest.mark.parametrize("case", ["is late", "stops"])
@pytest.mark.parametrize("backend", ["native", "horovod", "mpi"])
def test_a_rank_that_does_not_arrive_is_named_with_the_operation(refuses: Refuses, backend: str, case: str) -> None:
    argv, first = LAUNCHERS["mpirun"]  # torchrun gives a stopped rank 30 seconds before it kills it
    outcome = refuses([*argv, *RANK[first:], backend, case], timeout_s=LIMIT_S)
    where = "rank 1 did not arrive: in the program" if case == "is late" else "no answer from rank 1: its process"
    assert_says(outcome, "CollectiveTimeoutError", "allreduce 'the.sum' of float32(3,): not all ranks", "6 s", where)
    seen = "time.sleep(3 * TIMEOUT_S)" if case == "is late" else "is stopped by a signal"
    assert seen in outcome.stderr, str(outcome)


@pytest.mark.parametrize("case", ["stops in a small step", "stops in a large step"])
def test_a_rank_that_stops_within_a_step_is_named_with_the_bucket(refuses: Refuses, case: str) -> None:
    """Small tensors are waited for by asking MPI; large ones are reduced in a call that would wait for ever."""
    argv, first = LAUNCHERS["mpirun"]
    outcome = refuses([*argv, *RANK[first:], "mpi", case], timeout_s=LIMIT_S)
    assert_says(outcome, "CollectiveTimeoutError", "allreduce 'gradients.", "of float32", "no answer from rank 1")


@pytest.mark.parametrize("backend", ["native", "horovod", "mpi"])
def test_a_stopped_first_rank_holds_nobody(refuses: Refuses, backend: str) -> None:
    """Rank 0 serves the store: the others must not wait for it to answer where everybody is."""
    argv, first = LAUNCHERS["mpirun"]
    outcome = refuses([*argv, *RANK[first:], backend, "the first stops"], timeout_s=LIMIT_S)
    assert_says(outcome, "CollectiveTimeoutError", "allreduce 'the.sum'", "no answer from rank 0: its process")


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_torchrun_restarts_a_failed_job(launch: Launch, backend: str) -> None:
    argv = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1", *RANK[1:], backend, "fails once"]
    assert "the first try fails" in launch(argv).stderr


def test_a_program_may_end_without_shutdown(launch: Launch, effort: Effort) -> None:
    """Gloo's threads abort about one such process in five that does not stop them before the interpreter ends."""
    for _ in range(effort(3, 20)):
        launch(["torchrun", "--standalone", "--nproc-per-node=2", *RANK[1:], "native", "no shutdown"])


@pytest.mark.parametrize(("case", "words"), [("to horovod", "DUALDIST_TRANSPORT=gloo"), ("to mpi", "new job")])
def test_mpi_cannot_start_again_and_says_so(refuses: Refuses, case: str, words: str) -> None:
    argv, first = LAUNCHERS["mpirun"]
    outcome = refuses([*argv, *RANK[first:], "native", case], timeout_s=LIMIT_S)
    assert_says(outcome, "UnsupportedError", "MPI was finished", words)


@pytest.mark.parametrize("case", ["to native", "to horovod"])
def test_other_backends_may_follow_one_that_leaves_mpi_running(launch: Launch, case: str) -> None:
    argv, first = LAUNCHERS["mpirun"]
    launch([*argv, *RANK[first:], "mpi", case], timeout_s=LIMIT_S)


def test_a_program_may_end_without_shutdown_of_mpi(launch: Launch) -> None:
    argv, first = LAUNCHERS["mpirun"]
    launch([*argv, *RANK[first:], "mpi", "no shutdown"], timeout_s=LIMIT_S)
