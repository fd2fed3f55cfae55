"""Peers that speak garbage to whatever a job listens on, or say nothing for long: it goes on as if they were not."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults import training
from faults.cells import Cell
from faults.ranks import environment
from faults.strangers import WORDS, listening, strangers
from harness.effort import Effort
from harness.jobs import REPORT_DIR, Launch, collect

LIMIT_S = 120.0
PACE_S = "0.1"
# torch's store looks up the name of everybody who connects, and does nothing else until the resolver gives up, after
# 5 s a try.
TIMEOUT_S = "30"
CELLS = [
    Cell("run-torchrun", "native", "gloo"),
    Cell("torchrun", "horovod", "gloo"),
    Cell("torchrun", "native", "gloo"),
    Cell("run-spawn", "native", "shm"),
    Cell("spawn", "native", "gloo"),
    Cell("horovodrun", "native", "shm"),
    Cell("horovodrun", "horovod", "gloo"),
    Cell("run-horovodrun", "horovod", "gloo"),
]
# They take half a minute each.
IN_CI: list[Cell] = []


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_strangers_at_every_port_do_not_disturb_a_training(launch: Launch, cell: Cell, effort: Effort) -> None:
    if cell not in effort(IN_CI, CELLS):
        pytest.skip("only with --long")
    folder = launch.directory / "reports"
    folder.mkdir()
    argv = cell.argv(training.__file__, str(launch.directory), "", PACE_S, TIMEOUT_S)

    def ports() -> set[int]:
        """Once the ranks have met: while Horovod's Gloo connects, it takes any caller for a rank, and aborts."""
        has_met = all((launch.directory / f"pid-{rank}").exists() for rank in range(2))
        return listening(job.pid) if has_met else set()

    with launch.start(argv, env={**cell.env, REPORT_DIR: str(folder)}) as job, strangers(ports) as they:
        outcome = job.wait(LIMIT_S)
    assert outcome.rc == 0, f"{they.met}\n{outcome}"
    assert not outcome.left, str(outcome)
    assert len({seen["parameters"] for seen in collect(folder, 2, outcome)}) == 1
    assert they.words > len(WORDS) / 2
    effort.count("strangers at a job's ports", they.words)


@pytest.mark.smoke("native")
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_strangers_at_the_port_where_ranks_meet_keep_nobody_away(
    launch: Launch, free_port: int, backend: str, effort: Effort
) -> None:
    argv = [sys.executable, str(Path(training.__file__).with_name("rank.py")), backend]
    with ExitStack() as stack:
        jobs = [stack.enter_context(launch.start(argv, env=environment(rank, 2, free_port))) for rank in (0, 1)]
        they = stack.enter_context(strangers(lambda: listening(jobs[0].pid)))
        outcomes = [job.wait(LIMIT_S) for job in jobs]
    for outcome in outcomes:
        assert outcome.rc == 0, str(outcome)
    assert free_port in they.met
    effort.count("strangers at a job's ports", they.words)
