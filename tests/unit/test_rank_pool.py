"""RankPool: results in rank order, the name of a failed task, new ranks for lost ones."""

import re
import sys
from collections.abc import Iterator

import psutil
import pytest
from harness import leaks
from harness.jobs import Launch
from harness.rank_pool import RankPool

# Two ranks without torch: this program is both of them, and starts the second one.
PROGRAM = """
import os, subprocess, sys, time
from harness.rank_pool import serve

rank = int(sys.argv[1])
other = None if rank else subprocess.Popen([sys.executable, __file__, "1"])
tasks = {
    "number": lambda: rank,
    "large": lambda: [rank] * 200_000,
    "raises": lambda: 1 // (1 - rank),
    "ends": lambda: os._exit(3) if rank else rank,
    "hangs": lambda: time.sleep(60) if rank else rank,
}
serve(rank, lambda name: tasks[name]())
sys.exit(other.wait() if other else 0)
"""


@pytest.fixture
def started() -> list[int]:
    return []


@pytest.fixture
def pool(launch: Launch, started: list[int]) -> Iterator[RankPool]:
    path = launch.directory / "program.py"
    path.write_text(PROGRAM)

    def note(pid: int) -> None:
        leaks.LONG_LIVED.add(pid)
        started.append(pid)

    pool = RankPool(lambda env: launch.start([sys.executable, str(path), "0"], env=env), 2, note)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("raises", "rank 1: Traceback (most recent call last)"),
        ("ends", "rank 1 ended in task ends"),
        ("hangs", "no end of task hangs, answered by 0"),
    ],
)
def test_a_failed_task_is_named_and_the_next_gets_new_ranks(
    pool: RankPool, started: list[int], task: str, words: str
) -> None:
    assert pool.run("large") == [[0] * 200_000, [1] * 200_000]
    with pytest.raises(AssertionError, match=re.escape(words)) as caught:
        pool.run(task, timeout_s=2 if task == "hangs" else 30)
    assert "rank 0: " not in str(caught.value)
    assert not psutil.pid_exists(started[0])
    assert pool.run("number") == [0, 1]
    assert len(started) == 2
