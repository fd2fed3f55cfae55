"""A rank that does not come back is named on every other rank, with where in its program it is, and the job ends."""

from __future__ import annotations

import sys
from pathlib import Path

from faults import late_rank
from faults.conftest import Refuses
from faults.ranks import LIMIT_S, together
from harness.jobs import Launch

from dualdist.monitoring.process_state import BUSY
from dualdist.monitoring.rank_probe import IN_PROGRAM

PROGRAM = str(Path(late_rank.__file__))
SOURCE = Path(PROGRAM).read_text().splitlines()
LATE = "not all ranks arrived within 6 s; "


def stack_line(words: str, function: str) -> str:
    """Of the line of the program in which these words stand."""
    number = next(number for number, line in enumerate(SOURCE, 1) if words in line)
    return f'File "{PROGRAM}", line {number}, in {function}'


def test_every_rank_is_told_who_is_late_and_where(refuses: Refuses, tmp_path: Path) -> None:
    """Also the one that would have waited on when the launcher ends the job because of the first."""
    run = [sys.executable, "-m", "dualdist", "run", "-np", "3", "--launcher", "mpirun"]
    refuses([*run, "--log-dir", str(tmp_path / "logs"), PROGRAM, "horovod", "loops", "step"], timeout_s=LIMIT_S)
    for rank in range(3):
        said = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        told = [line for line in said.splitlines() if line.startswith("dualdist: rank 0 gives up: allreduce ")]
        assert len(told) == 1, said
        assert f"{LATE}rank 1 did not arrive: {IN_PROGRAM}, for " in told[0]
        assert stack_line("CASES[case].get(", "arrive") in said
        assert "in loops_for_ever" in said
        assert rank or "dualdist.errors.CollectiveTimeoutError: allreduce " in said


def test_one_that_keeps_pythons_lock_is_seen_from_outside(refuses: Refuses) -> None:
    argv = ["torchrun", "--standalone", "--nproc-per-node=4", PROGRAM, "native", "loops and keeps"]
    outcome = refuses(argv, timeout_s=LIMIT_S)
    told = [line for line in outcome.stderr.splitlines() if "gives up: allreduce 'the.sum' of float32(3,): " in line]
    words = (LATE, "no answer from rank 3: its process", BUSY, f"rank 1 did not arrive: {IN_PROGRAM}")
    assert any(all(word in line for word in words) for line in told), str(outcome)
    assert stack_line("re.match(", "keeps_the_lock") in outcome.stderr, str(outcome)
    assert "in loops_for_ever" in outcome.stderr, str(outcome)


def test_a_job_ends_without_a_launcher_that_ends_it(launch: Launch, tmp_path: Path) -> None:
    """The late one when nobody waits for it any more; those that go on regardless not as if all were well."""
    argv = [sys.executable, PROGRAM, "native", "never comes back", "regardless"]
    meeting = {"DUALDIST_SIZE": "3", "DUALDIST_RENDEZVOUS": (tmp_path / "rank0").as_uri()}
    outcomes = together(launch, argv, [{**meeting, "DUALDIST_RANK": str(rank)} for rank in range(3)])
    assert "rank 1 is unresponsive 6 s after its peers gave up" in outcomes[1].stderr, str(outcomes[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.rc == 1, str(outcome)
        assert f"rank 1 did not arrive: {IN_PROGRAM}" in outcome.stderr, str(outcome)
        assert "the program continued after a failed collective; exits with status 1 regardless" in outcome.stderr
