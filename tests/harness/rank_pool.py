"""Rank pool: ranks that stay alive between tests, run one task after the other, and are replaced after a failure.

Starting a process that imports torch costs 2.5 CPU seconds, most of what a test of a few collectives costs.
"""

import faulthandler
import json
import os
import selectors
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
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
        self._ranks: dict[int, socket.socket] = {}
        self._replies: dict[socket.socket, bytes] = {}

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
            for connection in self._ranks.values():
                connection.sendall(json.dumps(task).encode() + b"\n")
            replies = self._receive(set(self._ranks.values()), f"task {task}", timeout_s)
            values = [replies[self._ranks[rank]] for rank in range(self._size)]
            failures = [f"rank {rank}: {reply['failure']}" for rank, reply in enumerate(values) if reply["failure"]]
            assert not failures, "\n".join(failures)
        except BaseException:
            self.close(grace_s=0)
            raise
        return [reply["value"] for reply in values]

    def close(self, grace_s: float = 10.0) -> None:
        """End the ranks; within grace_s they shut down their session first."""
        for connection in self._ranks.values():
            connection.close()
        self._ranks.clear()
        self._replies.clear()
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
            connections: set[socket.socket] = set()
            while len(connections) < self._size:
                self._check_job(deadline, f"the start of {self._size} ranks, of which {len(connections)} are there")
                try:
                    connections.add(listener.accept()[0])
                except TimeoutError:
                    continue
        self._replies = dict.fromkeys(connections, b"")
        hellos = self._receive(connections, "the ranks' numbers", START_S)
        self._ranks = {int(rank): connection for connection, rank in hellos.items()}
        assert sorted(self._ranks) == list(range(self._size)), f"ranks {sorted(self._ranks)} of {self._size}"

    def _receive(self, expected: set[socket.socket], what: str, timeout_s: float) -> dict[socket.socket, Any]:
        """Return one reply from each of the connections."""
        deadline = time.monotonic() + timeout_s
        replies: dict[socket.socket, Any] = {}
        with selectors.DefaultSelector() as selector:
            for connection in expected:
                selector.register(connection, selectors.EVENT_READ)
            while len(replies) < len(expected):
                self._check_job(deadline, f"{what}, answered by {self._numbers(set(replies))}")
                for key, _ in selector.select(POLL_S):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    received = connection.recv(1 << 16)
                    self._replies[connection] += received
                    if not received:
                        raise AssertionError(f"rank {self._numbers({connection})} ended in {what}\n{self._outcome()}")
                    if b"\n" in received:
                        line, _, self._replies[connection] = self._replies[connection].partition(b"\n")
                        replies[connection] = json.loads(line)
                        selector.unregister(connection)
        return replies

    def _numbers(self, connections: set[socket.socket]) -> str:
        numbers = [rank for rank, connection in self._ranks.items() if connection in connections]
        return ", ".join(map(str, sorted(numbers))) or "none"

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
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        with connection.makefile("rw") as lines:
            _send(lines, rank)
            for line in lines:
                faulthandler.dump_traceback_later(TASK_S - 10)  # shows in the job's output where a rank hangs
                reply: dict[str, object] = {"value": None, "failure": ""}
                try:
                    reply["value"] = run(json.loads(line))
                except Exception:
                    reply["failure"] = traceback.format_exc()
                faulthandler.cancel_dump_traceback_later()
                _send(lines, reply)


def _send(lines: Any, value: object) -> None:
    lines.write(json.dumps(value) + "\n")
    lines.flush()
