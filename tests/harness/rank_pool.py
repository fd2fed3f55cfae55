"""Rank pool: ranks that stay alive between tests, run one task after the other, and are replaced after a failure.

Starting a process that imports torch costs 2.5 CPU seconds, most of what a test of a few collectives costs.
"""

import contextlib
import faulthandler
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

from harness.jobs import Job

SOCKET = "TEST_RANK_POOL"
"""Names the socket over which ranks receive tasks."""
START_S = 90.0
TASK_S = 120.0
"""More than the timeout of a collective inside a task, whose error names the operation."""
POLL_S = 0.2


class RankPool:
    """The ranks of one job; all run the same task at a time.

    Args:
        start: starts the job with these variables added; its ranks call `serve`.
        size: the number of ranks.
        on_start: called with the process id of each started job.
    """

    def __init__(self, start: Callable[[Mapping[str, str]], Job], size: int, on_start: Callable[[int], object]) -> None:
        self._start_job = start
        self._size = size
        self._on_start = on_start
        self._job: Job | None = None
        self._ranks: list[Connection] = []

    def run(self, task: str, timeout_s: float = TASK_S) -> list[Any]:
        """Run the task on all ranks.

        Returns:
            The task's result on each rank, in rank order.

        Raises:
            AssertionError: with the trace of each rank on which the task failed, or the output of the job if a rank
                exited or did not answer in time. The ranks are then killed, and the next task gets new ones.
        """
        try:
            if self._job is None:
                self._start()
            for connection in self._ranks:
                connection.send(task)
            values, failures = zip(*self._receive(self._ranks, f"task {task}", timeout_s), strict=True)
            found = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
            assert not found, "\n".join(found)
        except BaseException:
            self.close(grace_s=0)
            raise
        return list(values)

    def close(self, grace_s: float = 10.0) -> None:
        """End the ranks; within grace_s they shut down their session first."""
        for connection in self._ranks:
            connection.close()
        self._ranks.clear()
        if self._job is not None:
            job, self._job = self._job, None
            outcome = job.wait(grace_s)
            assert grace_s == 0 or (outcome.rc == 0 and not outcome.left), str(outcome)

    def _start(self) -> None:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = str(Path(folder, "socket"))
            listener.bind(path)
            listener.listen(self._size)
            listener.settimeout(POLL_S)
            self._job = self._start_job({SOCKET: path})
            self._on_start(self._job.pid)
            deadline = time.monotonic() + START_S
            found: list[Connection] = []
            while len(found) < self._size:
                self._check_job(deadline, f"the start of {self._size} ranks, of which {len(found)} are there")
                with contextlib.suppress(TimeoutError):
                    found.append(Connection(listener.accept()[0].detach()))
        by_rank = dict(zip(self._receive(found, "the ranks' numbers", START_S), found, strict=True))
        assert sorted(by_rank) == list(range(self._size)), f"ranks {sorted(by_rank)} of {self._size}"
        self._ranks = [by_rank[rank] for rank in range(self._size)]

    def _receive(self, expected: Sequence[Connection], what: str, timeout_s: float) -> list[Any]:
        """Return one reply from each of the connections."""
        deadline = time.monotonic() + timeout_s
        replies: dict[Any, Any] = {}
        while len(replies) < len(expected):
            self._check_job(deadline, f"{what}, answered by {self._numbers(replies)}")
            for connection in wait([each for each in expected if each not in replies], POLL_S):
                try:
                    replies[connection] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    number = self._numbers([connection])
                    raise AssertionError(f"rank {number} ended in {what}\n{self._outcome()}") from None
        return [replies[connection] for connection in expected]

    def _numbers(self, connections: Collection[object]) -> str:
        return ", ".join(str(rank) for rank, each in enumerate(self._ranks) if each in connections) or "none"

    def _check_job(self, deadline: float, what: str) -> None:
        assert self._job is not None
        assert self._job.is_running(), f"the job ended in {what}\n{self._outcome()}"
        assert time.monotonic() < deadline, f"no end of {what}\n{self._outcome()}"

    def _outcome(self) -> str:
        """Return the job's output, after a short wait for its end."""
        assert self._job is not None
        return str(self._job.wait(POLL_S))


def serve(rank: int, run: Callable[[str], object]) -> None:
    """Run the pool's tasks on one of its ranks until the connection is closed."""
    with Client(os.environ[SOCKET]) as connection, contextlib.suppress(EOFError, ConnectionResetError):
        connection.send(rank)
        while True:
            task, value, failure = connection.recv(), None, ""
            faulthandler.dump_traceback_later(TASK_S - 10)  # shows in the job's output where a rank hangs
            try:
                value = run(task)
            except Exception:
                failure = traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            connection.send((value, failure))
