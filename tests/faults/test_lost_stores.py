"""The rendezvous store is killed or stopped: ranks that wait for it fail in time, those that train go on or end."""

import signal
import time
from contextlib import ExitStack

import psutil
import pytest
from faults import training
from faults.starts import LIMIT_S, RANK, Cell, assert_error, rank_env
from harness.effort import Effort
from harness.jobs import Job, Launch

CELLS = [
    Cell("torchrun", "native", "gloo"),
    Cell("horovodrun", "horovod", "gloo"),
    Cell("torchrun", "native", "shm"),
    Cell("torchrun", "horovod", "gloo"),
    Cell("horovodrun", "native", "shm"),
]


def program_of(job: Job) -> psutil.Process:
    """Return the command itself, a child of its guard."""
    return psutil.Process(job.pid).children()[0]


def is_connected(job: Job, port: int) -> bool:
    """Return True if a process of the job is connected to the port."""
    return any(
        found.status == psutil.CONN_ESTABLISHED and found.raddr and found.raddr.port == port
        for process in psutil.Process(job.pid).children(recursive=True)
        for found in process.net_connections("tcp")
    )


@pytest.mark.smoke("native-9")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_a_rank_in_rendezvous_names_a_store_that_is_lost(
    launch: Launch, free_port: int, backend: str, number: signal.Signals
) -> None:
    """Rank 0 serves the store; the third rank never comes."""
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(launch.start([*RANK, backend], env=rank_env(rank, 3, free_port))) for rank in (0, 1)
        ]
        jobs[1].wait_until(lambda: is_connected(jobs[1], free_port))
        began = time.monotonic()
        program_of(jobs[0]).send_signal(number)
        outcome = jobs[1].wait(LIMIT_S)
    assert not outcome.timed_out, str(outcome)
    assert outcome.rc != 0, str(outcome)
    assert time.monotonic() - began < 20
    assert_error(outcome, "RendezvousError", f":{free_port}")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_ranks_whose_launcher_is_killed_with_the_store_end(launch: Launch, cell: Cell, effort: Effort) -> None:
    """They finish the training or fail: no launcher is left to end them."""
    effort.require_long(unless=cell in CELLS[:2])
    argv = cell.argv(training.__file__, str(launch.directory), "", "0.05")
    with Job(argv, env={**launch.env, **cell.env}, cwd=launch.directory, grace_s=LIMIT_S) as job:
        job.wait_until(lambda: list(launch.directory.glob("run/checkpoint-*.pt")))
        ranks = [psutil.Process(int((launch.directory / f"pid-{rank}").read_text())) for rank in (0, 1)]
        program_of(job).kill()
        _, alive = psutil.wait_procs(ranks, timeout=LIMIT_S)
        assert not alive, job.output()
    effort.count("launchers killed with the store that they serve")
