"""Ranks that run rank.py, started by hand or by a launcher, and how their errors are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.jobs import Launch, Outcome

# Each with its own idea of what to do when one of its ranks fails.
LAUNCHERS = {
    "torchrun": (["torchrun", "--standalone", "--nproc-per-node=2"], 1),
    "horovodrun": (["horovodrun", "--gloo", "-np", "2"], 0),
    "mpirun": (["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"], 0),
}
RANK = [sys.executable, str(Path(__file__).with_name("rank.py"))]
# The program's own time limit, twice over for the last of several waits, and what a start takes on a busy machine.
LIMIT_S = 45
LOOPBACK = "127.0.0.1"


def environment(rank: int, size: int, port: int, address: str = LOOPBACK) -> dict[str, str]:
    """What a hand-written job script exports."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def together(launch: Launch, argv: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[Outcome]:
    """Processes started side by side, each of which fails in time and leaves nothing behind."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(launch.start(argv, env=env)) for env in environments]
        outcomes = [job.wait(LIMIT_S) for job in jobs]
    for outcome in outcomes:
        assert not outcome.timed_out, str(outcome)
        assert not outcome.left, str(outcome)
        assert outcome.rc != 0, str(outcome)
    return outcomes


def assert_says(outcome: Outcome, *words: str) -> None:
    """One of the errors that the ranks printed has all the words."""
    errors = [line for line in outcome.stderr.splitlines() if "dualdist.errors." in line]
    assert any(all(word in line for word in words) for line in errors), str(outcome)
