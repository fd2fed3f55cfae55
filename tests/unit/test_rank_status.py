"""What `dualdist top` asks a rank: who may ask, what it measures, and which ranks are late."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from dualdist.cli.top import format_job
from dualdist.environments import detect
from dualdist.liveness.rank_status import (
    NAME,
    RankStatus,
    RunningJob,
    StatusServer,
    find_jobs,
    late_ranks,
    look,
)

STEP_S = 0.1
IDLE = RankStatus(0, "a", 7, "torchrun", 9, 0.5, 0.0, "", 0.1, [("/w/train.py", 3, "f")], 1 << 20, 1.0)


@contextmanager
def served() -> Iterator[RunningJob]:
    """Yield a job of one rank, this process, that takes a step in STEP_S."""
    server = StatusServer(detect({}), os.getpid(), None, lambda: int(time.monotonic() / STEP_S))
    try:
        yield find_jobs()[os.getpid()]
    finally:
        server.close()
    assert os.getpid() not in find_jobs()


def test_a_rank_is_watched_while_one_looks() -> None:
    with served() as job:
        (status,) = look(job, 6 * STEP_S).values()
        assert isinstance(status, RankStatus)
        assert (status.rank, status.pid, status.waited, status.operation) == (0, os.getpid(), 0.0, "")
        assert status.step_s == pytest.approx(STEP_S, rel=0.5)
        assert any(name == "test_a_rank_is_watched_while_one_looks" for _, _, name in status.stack)
    assert look(job, 0.0) == {}, "it has ended"


STRANGER = """
import os, socket, sys
os.setuid(65534)
asking, fake = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
asking.connect("\\0" + sys.argv[1])
try:
    asking.sendall(b"[0.0, []]")
    print("answered:", asking.recv(9))
except OSError:
    print("answered:", b"")
fake.bind("\\0" + sys.argv[2])
fake.listen(1)
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user too")
def test_another_user_sees_no_job_and_adds_none() -> None:
    """Names in the abstract namespace can be read and taken by every user."""
    with served() as job, ExitStack() as stack:
        fake = NAME.format(os.getuid(), os.getpid(), 2, 1, os.getpid(), 1)
        argv = [sys.executable, "-c", STRANGER, job.names[0][1:], fake[1:]]
        stranger = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(stranger.communicate)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "answered: b''\n"
        assert stranger.stdout.readline() == "listens\n"
        assert find_jobs()[os.getpid()].names == job.names


FORKS = """
import os, signal
from dualdist.environments import detect
from dualdist.liveness.rank_status import StatusServer, find_jobs
server = StatusServer(detect({}), os.getpid(), None, int)
if os.fork() == 0:
    signal.pause()
print(os.getpid() in find_jobs(), flush=True)
signal.pause()
"""


def test_a_killed_rank_is_no_running_job_although_a_child_has_its_socket() -> None:
    argv = [sys.executable, "-c", FORKS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "True\n"
            rank.kill()
            os.waitid(os.P_PID, rank.pid, os.WEXITED)
            assert rank.pid not in find_jobs()
        finally:
            os.killpg(rank.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("waited", "late"),
    [
        ((0.0, 0.0), []),
        ((0.1, 0.25), []),
        ((0.9, 0.1), [1]),
        ((0.9, 0.8, 0.05, 0.1), [2, 3]),
        ((1.0, 0.5, 0.0), [2]),
        ((1.0, None, 0.9), [1]),
        ((None, None), [0, 1]),
    ],
)
def test_late_are_ranks_that_others_wait_for_and_those_that_do_not_answer(
    waited: tuple[float | None, ...], late: list[int]
) -> None:
    found: dict[int, RankStatus | str] = {
        rank: "has exited" if share is None else replace(IDLE, rank=rank, waited=share)
        for rank, share in enumerate(waited)
    }
    assert sorted(late_ranks(found)) == late
    marked = [line.split()[0] for line in format_job(RunningJob(7, len(waited), {0: 1}), found) if "LATE" in line]
    assert marked == [str(rank) for rank in late]
