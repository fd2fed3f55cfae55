"""A network between two hosts that is cut, or slow and losing packets, in the middle of training."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from faults import training
from faults.starts import Cell
from harness.effort import Effort
from harness.hosts import Hosts
from harness.jobs import REPORT_DIR, Job, Launch, collect
from launch.running import RUN, start

# The ranks' timeout, their probes of each other, and the end of all processes on both hosts.
END_S = training.TIMEOUT_S + 25
PACE_S = "0.05"
CELLS = [
    Cell("torchrun", "native", "gloo"),
    Cell("mpirun", "mpi", "mpi"),
    Cell("horovodrun", "horovod", "gloo"),
    Cell("mpirun", "horovod", "mpi"),
    Cell("mpirun", "native", "gloo"),
    Cell("spawn", "native", "gloo"),
]


class Training:
    """A training on two hosts, in a folder that both see."""

    def __init__(self, launch: Launch, hosts: Hosts, cell: Cell) -> None:
        self._launch, self._hosts = launch, hosts
        self.reports = launch.directory / "reports"
        self.reports.mkdir(exist_ok=True)
        words = ["-H", "hosta:1,hostb:1", "--launcher", cell.start, "--backend", cell.backend]
        words += ["--transport", cell.transport, "--network-interface", "eth0", "--env", f"{REPORT_DIR}={self.reports}"]
        program = [training.__file__, cell.backend, str(launch.directory), "", PACE_S]
        self.argv = hosts.on(0, *RUN, *words, *program)

    @contextmanager
    def running(self) -> Iterator[Job]:
        """Start the job, and yield it when it has saved its first checkpoint."""
        with start(self._launch, self.argv, self._hosts.env) as job:
            job.wait_until(lambda: list(self._launch.directory.glob("run/checkpoint-*.pt")))
            yield job

    def finish(self, job: Job) -> list[str]:
        """Wait for the end, and return a digest of each rank's parameters."""
        outcome = job.wait(90)
        assert outcome.rc == 0, str(outcome)
        return [seen["parameters"] for seen in collect(self.reports, 2, outcome)]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cut_network_ends_the_job_on_both_hosts_and_it_resumes_later(
    launch: Launch, two_hosts: Hosts, cell: Cell, unhurt: Callable[[], str], effort: Effort
) -> None:
    effort.require_long(unless=cell == CELLS[0])
    job_on_hosts = Training(launch, two_hosts, cell)
    try:
        with job_on_hosts.running() as job:
            began = time.monotonic()
            two_hosts.cut_off(1)
            outcome = job.wait(60)
            deadline = began + END_S + 10
            while (left := two_hosts.processes(training.__file__)) and time.monotonic() < deadline:
                time.sleep(0.1)
    finally:
        two_hosts.connect(1)
    assert not left, f"{left}\n{outcome}"
    assert not outcome.timed_out, str(outcome)
    assert outcome.rc not in (0, 124), str(outcome)
    named = re.search(r"no answer from rank 1\b|rank 1 on hostb was lost", outcome.stdout + outcome.stderr)
    assert named, str(outcome)
    assert time.monotonic() - began < END_S + 15
    two_hosts.await_ssh(1)
    with start(launch, job_on_hosts.argv, two_hosts.env) as job:
        assert job_on_hosts.finish(job) == [unhurt()] * 2
    effort.count("networks cut in the middle of training")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_slow_network_that_loses_packets_changes_nothing(
    launch: Launch, two_hosts: Hosts, cell: Cell, unhurt: Callable[[], str], effort: Effort
) -> None:
    """Even if it is cut for less than the ranks' timeout."""
    effort.require_long(unless=cell == CELLS[0])
    job_on_hosts = Training(launch, two_hosts, cell)
    with job_on_hosts.running() as job:
        try:
            with two_hosts.slowed(0), two_hosts.slowed(1):
                two_hosts.cut_off(1)
                time.sleep(0.7)
                two_hosts.connect(1)
                assert job_on_hosts.finish(job) == [unhurt()] * 2
        finally:
            two_hosts.connect(1)
    effort.count("networks slowed in the middle of training")
