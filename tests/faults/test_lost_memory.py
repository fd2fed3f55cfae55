"""Ranks that share memory, in a job: where there is too little of it, and where they are killed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from faults.conftest import Refuses
from faults.memory import with_little_memory
from faults.ranks import LAUNCHERS, LIMIT_S, RANK
from harness.jobs import REPORT_DIR, Launch, Outcome, collect
from harness.tiny_rank import __file__ as TINY_RANK


def run(launch: Launch, argv: list[str]) -> tuple[list[dict[str, Any]], Outcome]:
    """What both ranks reported, and what the launcher printed."""
    folder = launch.directory / "reports"
    folder.mkdir()
    outcome = launch(argv, env={REPORT_DIR: str(folder)})
    return collect(folder, 2, outcome), outcome


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_a_small_dev_shm_is_said_in_one_line_and_training_goes_on(launch: Launch, backend: str) -> None:
    argv = ["torchrun", "--standalone", "--nproc-per-node=2", TINY_RANK, backend]
    reports, outcome = run(launch, with_little_memory("64m", argv))
    assert {seen["transport"] for seen in reports} == {"gloo"}
    said = [line for line in outcome.stderr.splitlines() if "shared memory" in line]
    assert len(said) == (1 if backend == "native" else 0), str(outcome)
    assert all("--shm-size" in line for line in said)


def test_without_any_room_everything_still_works(launch: Launch) -> None:
    argv = ["torchrun", "--standalone", "--nproc-per-node=2", TINY_RANK, "native"]
    reports, _ = run(launch, with_little_memory("4k", argv))
    assert [seen["sum"][0] for seen in reports] == [3, 3]


@pytest.mark.smoke("is killed")
@pytest.mark.parametrize("case", ["is killed", "exits", "raises"])
def test_nothing_stays_of_the_memory_of_ranks_that_end(refuses: Refuses, case: str) -> None:
    argv, first = LAUNCHERS["torchrun"]
    outcome = refuses(with_little_memory("1g", [*argv, *RANK[first:], "native", case]), timeout_s=LIMIT_S)
    left = re.search(r"left in memory: (\d+) names, +(\d+) KiB", outcome.stdout)
    assert left is not None, str(outcome)
    assert left.groups() == ("0", "0"), str(outcome)
