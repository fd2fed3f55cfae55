"""A rank that ends, is late or never arrives: every other rank ends in time and names it, with where its program is."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from faults import rank
from faults.starts import (
    LIMIT_S,
    RANK,
    STARTS,
    assert_error,
    assert_memory_is_free,
    fail_together,
    rank_argv,
    refused,
    with_small_memory,
)
from harness.effort import Effort
from harness.jobs import REPORT_DIR, Launch, Outcome, collect
from harness.tiny_rank import __file__ as TINY_RANK

from dualdist.liveness.process_state import BUSY
from dualdist.liveness.rank_probe import IN_PROGRAM

CELLS = [
    *((launcher, backend) for launcher in ("torchrun", "horovodrun", "mpirun") for backend in ("native", "horovod")),
    ("mpirun", "mpi"),
]
# In CI every launcher, every backend and every case more than once; kills are tried elsewhere, too.
IN_CI = [
    *(("torchrun", "native", "raises"), ("torchrun", "horovod", "exits"), ("horovodrun", "horovod", "raises")),
    *(("horovodrun", "native", "exits"), ("mpirun", "native", "is killed"), ("mpirun", "mpi", "raises")),
    ("mpirun", "mpi", "exits"),
]


@pytest.mark.smoke("mpirun-mpi-raises", "mpirun-native-is killed")
@pytest.mark.parametrize("case", ["raises", "exits", "is killed"])
@pytest.mark.parametrize(("launcher", "backend"), CELLS)
def test_a_rank_that_ends_ends_the_job(launch: Launch, launcher: str, backend: str, case: str, effort: Effort) -> None:
    effort.require_long(unless=(launcher, backend, case) in IN_CI)
    outcome = refused(launch, rank_argv(launcher, backend, case))
    if case == "raises":
        assert "this rank's own mistake" in outcome.stdout + outcome.stderr, str(outcome)
        if backend == "mpi":  # which ends the job at once
            assert "CollectiveTimeoutError" not in outcome.stderr, str(outcome)
    if launcher == "torchrun":
        cause = outcome.stderr.partition("Root Cause (first observed failure):")[2]
        assert "rank      : 1 " in cause, str(outcome)
        assert ("ValueError: this rank's own mistake" in cause) == (case == "raises"), str(outcome)


SUM = "allreduce 'the.sum'"
STOPPED = ("no answer from rank 1: its process",)
# By case: the words of the error, and what else is printed.
NOT_ARRIVED = {
    "is late": ((SUM, "of float32(3,): not all ranks", "6 s", "rank 1 did not arrive: in the program"), "time.sleep(3"),
    "stops": ((SUM, "of float32(3,): not all ranks", "6 s", *STOPPED), "is stopped by a signal"),
    "begins another": ((SUM, "of float32(3,): not all ranks began it within 6 s: rank 0 is", "'another'"), ""),
    # Rank 0 serves the store: the others must not wait for its answer.
    "the first stops": ((SUM, "no answer from rank 0: its process"), ""),
    "the first stops before a wrap": (("dd.wrap_optimizer", "no answer from rank 0: its process"), ""),
    "the first stops before a group": (("new_group", "no answer from rank 0: its process"), ""),
    "joined": (("join", "no answer from rank 1"), ""),
    # Small tensors are waited for by asking MPI; large ones are reduced in a call that would wait for ever.
    "stops in a small step": (("reduction of gradients", "of float32", "no answer from rank 1"), ""),
    "stops in a large step": (("reduction of gradients", "of float32", "no answer from rank 1"), ""),
}


@pytest.mark.smoke("stops-native", "stops-mpi", "begins another-native")
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "native") for case in NOT_ARRIVED if "step" not in case),
        *((case, "mpi") for case in ("is late", "stops", "stops in a small step", "stops in a large step")),
        *(("the first stops", "horovod"), ("joined", "horovod")),
    ],
)
def test_a_rank_that_does_not_arrive_is_named_with_the_operation(launch: Launch, backend: str, case: str) -> None:
    words, printed = NOT_ARRIVED[case]
    outcome = refused(launch, rank_argv("mpirun", backend, case))  # torchrun waits for a stopped rank for 30 s
    assert_error(outcome, "CollectiveTimeoutError", *words)
    assert printed in outcome.stderr, str(outcome)


LATE = "not all ranks arrived within 6 s; "


def stack_line(words: str, function: str) -> str:
    """Return a stack's line for the line of the program in which these words are."""
    number = next(number for number, line in enumerate(Path(RANK[-1]).read_text().splitlines(), 1) if words in line)
    return f'File "{RANK[-1]}", line {number}, in {function}'


def test_every_rank_prints_who_is_late_and_where(launch: Launch, tmp_path: Path) -> None:
    """Also a rank that would have waited longer when the launcher ends the job because of the first one's error."""
    run = [sys.executable, "-m", "dualdist", "run", "-np", "3", "--launcher", "mpirun"]
    refused(launch, [*run, "--log-dir", str(tmp_path / "logs"), RANK[-1], "horovod", "loops in a step"])
    for number in range(3):
        log = (tmp_path / "logs" / f"rank-{number}.log").read_text()
        reports = [
            line for line in log.splitlines() if line.startswith("dualdist: rank 0 gives up: reduction of gradients")
        ]
        assert len(reports) == 1, log
        assert f"{LATE}rank 1 did not arrive: {IN_PROGRAM}, for " in reports[0]
        assert stack_line("arrive()", "take_steps") in log
        assert "in loop_forever" in log
        assert number or "dualdist.errors.CollectiveTimeoutError: reduction of gradients" in log


def test_a_rank_that_holds_the_gil_is_described_from_outside(launch: Launch) -> None:
    argv = ["torchrun", "--standalone", "--nproc-per-node=4", RANK[-1], "native", "loops and holds the GIL"]
    outcome = refused(launch, argv)
    reports = [line for line in outcome.stderr.splitlines() if f"gives up: {SUM} of float32(3,): " in line]
    words = (LATE, "no answer from rank 3: its process", BUSY, f"rank 1 did not arrive: {IN_PROGRAM}")
    assert any(all(word in line for word in words) for line in reports), str(outcome)
    assert "in loop_forever" in outcome.stderr, str(outcome)


def test_a_job_without_a_launcher_ends(launch: Launch, tmp_path: Path) -> None:
    """The late rank when its peers gave up; those that continue after the error not with status 0."""
    env = {"DUALDIST_SIZE": "3", "DUALDIST_RENDEZVOUS": (tmp_path / "rank0").as_uri()}
    environments = [{**env, "DUALDIST_RANK": str(number)} for number in range(3)]
    outcomes = fail_together(launch, [*RANK, "native", "continues after errors"], environments)
    assert "rank 1 is unresponsive 6 s after its peers gave up" in outcomes[1].stderr, str(outcomes[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.rc == 1, str(outcome)
        assert f"rank 1 did not arrive: {IN_PROGRAM}" in outcome.stderr, str(outcome)
        assert "the program continued after a failed collective; exits with status 1 regardless" in outcome.stderr


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "native"), ("mpirun", "horovod"), ("mpirun", "mpi")])
def test_ranks_wait_for_late_and_joined_ones_and_report_what_is_unfinished(
    launch: Launch, launcher: str, backend: str
) -> None:
    outcome = launch(rank_argv(launcher, backend, "is waited for"), timeout_s=LIMIT_S)
    for happens in (rank.begin_late, rank.join_early, rank.work_long_before_a_barrier, rank.leave_one_unfinished):
        assert outcome.stdout.count(f"done: {happens.__name__}") == 2, str(outcome)
    assert "1 operation(s) unfinished" in outcome.stderr, str(outcome)
    assert "allreduce 'never.met' of float32(3,)" in outcome.stderr, str(outcome)


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_torchrun_restarts_a_failed_job(launch: Launch, backend: str) -> None:
    argv = [*STARTS["torchrun"], "--max-restarts=1", RANK[-1], backend, "fails once"]
    assert "the first try fails" in launch(argv).stderr


def test_a_program_may_end_without_shutdown(launch: Launch, effort: Effort) -> None:
    """Gloo's threads abort about one such process in five that does not stop them before the interpreter ends."""
    for _ in range(effort(3, 20)):
        launch(rank_argv("torchrun", "native", "no shutdown"))


@pytest.mark.parametrize(("case", "words"), [("to horovod", "DUALDIST_TRANSPORT=gloo"), ("to mpi", "new job")])
def test_starting_mpi_again_is_refused(launch: Launch, case: str, words: str) -> None:
    assert_error(refused(launch, rank_argv("mpirun", "native", case)), "UnsupportedError", "MPI was finished", words)


@pytest.mark.parametrize("case", ["to native", "to horovod", "no shutdown"])
def test_mpi_may_be_left_running(launch: Launch, case: str) -> None:
    """For another backend, or until the program ends."""
    launch(rank_argv("mpirun", "mpi", case), timeout_s=LIMIT_S)


def run_tiny_ranks(launch: Launch, backend: str, memory: str) -> tuple[list[Mapping[str, object]], Outcome]:
    """Return the reports of two ranks with so small a /dev/shm, and what the launcher printed."""
    folder = launch.directory / "reports"
    folder.mkdir()
    argv = with_small_memory(memory, [*STARTS["torchrun"], TINY_RANK, backend])
    outcome = launch(argv, env={REPORT_DIR: str(folder)})
    return [*collect(folder, 2, outcome)], outcome


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_a_small_dev_shm_is_reported_in_one_line_and_gloo_is_used(launch: Launch, backend: str) -> None:
    reports, outcome = run_tiny_ranks(launch, backend, "7m")
    assert {seen["transport"] for seen in reports} == {"gloo"}
    lines = [line for line in outcome.stderr.splitlines() if "shared memory" in line]
    assert len(lines) == (1 if backend == "native" else 0), str(outcome)
    assert all("--shm-size" in line for line in lines)


def test_collectives_work_with_a_full_dev_shm(launch: Launch) -> None:
    reports, _ = run_tiny_ranks(launch, "native", "4k")
    assert [seen["sum"] for seen in reports] == [[3, 1 << 41]] * 2


@pytest.mark.smoke("is killed")
@pytest.mark.parametrize("case", ["is killed", "exits", "raises"])
def test_ranks_that_end_leave_no_shared_memory(launch: Launch, case: str) -> None:
    assert_memory_is_free(refused(launch, with_small_memory("1g", rank_argv("torchrun", "native", case))))
