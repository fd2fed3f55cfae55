"""A rank that ends, or does not arrive: every other rank ends in time, and names what it waited for."""

from __future__ import annotations

import pytest
from faults.conftest import Refuses
from faults.test_bad_input import LIMIT_S, RANK, assert_says

# Each with its own idea of what to do when one of its ranks fails.
LAUNCHERS = {
    "torchrun": (["torchrun", "--standalone", "--nproc-per-node=2"], 1),
    "horovodrun": (["horovodrun", "--gloo", "-np", "2"], 0),
    "mpirun": (["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"], 0),
}


@pytest.mark.parametrize("case", ["raises", "exits", "is killed"])
@pytest.mark.parametrize("backend", ["native", "horovod"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_ends_ends_the_job(refuses: Refuses, launcher: str, backend: str, case: str) -> None:
    argv, first = LAUNCHERS[launcher]
    outcome = refuses([*argv, *RANK[first:], backend, case], timeout_s=LIMIT_S)
    if case == "raises":
        assert "this rank's own mistake" in outcome.stdout + outcome.stderr, str(outcome)


@pytest.mark.parametrize("case", ["is late", "stops"])
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_a_rank_that_does_not_arrive_is_named_with_the_operation(refuses: Refuses, backend: str, case: str) -> None:
    argv, first = LAUNCHERS["mpirun"]  # torchrun gives a stopped rank 30 seconds before it kills it
    outcome = refuses([*argv, *RANK[first:], backend, case], timeout_s=LIMIT_S)
    where = "rank 1 is in the program" if case == "is late" else "No answer from rank 1"
    assert_says(outcome, "CollectiveTimeoutError", "allreduce 'the.sum' of float32(3,)", "6 s", where)
