"""The store where ranks meet is killed or stopped: who waits there says so in time, who trains goes on or ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

import psutil
import pytest
from faults import training
from faults.cells import Cell
from faults.ranks import LIMIT_S, RANK, assert_says, environment
from harness.effort import Effort
from harness.jobs import Job, Launch

CELLS = [
    Cell("torchrun", "native", "gloo"),
    Cell("horovodrun", "horovod", "gloo"),
    Cell("torchrun", "native", "shm"),
    Cell("torchrun", "horovod", "gloo"),
    Cell("horovodrun", "native", "shm"),
]
IN_CI = CELLS[:2]


def wait_until(holds: Callable[[], object], job: Job) -> None:
    deadline = time.monotonic() + 40
    while not holds():
        assert job.is_running(), job.output()
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.02)


def program_of(job: Job) -> psutil.Process:
    """The command itself, below its guard."""
    return psutil.Process(job.pid).children()[0]


def is_connected(job: Job, port: int) -> bool:
    """Whether some process of the job talks to the port."""
    for process in psutil.Process(job.pid).children(recursive=True):
        for found in process.net_connections("tcp"):
            if found.status == psutil.CONN_ESTABLISHED and found.raddr and found.raddr.port == port:
                return True
    return False


@pytest.mark.smoke("native-9")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_who_waits_for_the_others_is_told_that_the_store_is_gone(
    launch: Launch, free_port: int, backend: str, number: signal.Signals
) -> None:
    """Rank 0 serves it; the third rank never comes."""
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(launch.start([*RANK, backend], env=environment(rank, 3, free_port))) for rank in (0, 1)
        ]
        wait_until(lambda: is_connected(jobs[1], free_port), jobs[1])
        began = time.monotonic()
        program_of(jobs[0]).send_signal(number)
        outcome = jobs[1].wait(LIMIT_S)
    assert not outcome.timed_out, str(outcome)
    assert outcome.rc != 0, str(outcome)
    assert time.monotonic() - began < 20
    assert_says(outcome, "RendezvousError", f":{free_port}")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_training_goes_on_or_ends_where_its_launcher_is_killed_with_the_store(
    launch: Launch, cell: Cell, effort: Effort
) -> None:
    """Nobody is there to end the ranks: they do that themselves."""
    if cell not in effort(IN_CI, CELLS):
        pytest.skip("only with --long")
    argv = cell.argv(training.__file__, str(launch.directory), "", "0.05")
    with Job(argv, env={**launch.env, **cell.env}, cwd=launch.directory, grace_s=LIMIT_S) as job:
        wait_until(lambda: list(launch.directory.glob("run/checkpoint-*.pt")), job)
        ranks = [psutil.Process(int((launch.directory / f"pid-{rank}").read_text())) for rank in (0, 1)]
        program_of(job).kill()
        _, alive = psutil.wait_procs(ranks, timeout=LIMIT_S)
        assert not alive, job.output()
    effort.count("launchers killed with the store that they serve")
