"""A rank that is killed, ended or stopped at any moment of training: all others end in time, and name it; nothing of
the job stays, and started again it ends with the bits of the run that was never hurt.
"""

from __future__ import annotations

import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from faults import training
from faults.cells import CELLS, Cell, trained
from faults.memory import with_little_memory
from faults.training import SAVED_EVERY, Hurt
from harness.effort import Effort
from harness.jobs import GRACE_S, Launch, Outcome
from harness.slurm import Slurm, eventually

# A start on a busy machine, what the others wait, and the 30 s that torchrun gives to a rank that is stopped.
LIMIT_S = 75.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
TRIALS = [(number, rank) for rank in (0, 1) for number in SIGNALS]
# In CI each backend and each launcher once, each signal and each rank several times. MPICH's ends a job only where a
# rank ends by a signal.
SHORT = {
    "torchrun-native-shm": [(signal.SIGKILL, 0)],
    "horovodrun-horovod-gloo": [(signal.SIGTERM, 1)],
    "mpirun-horovod-mpi": [(signal.SIGSTOP, 0)],
    "mpirun-mpi-mpi": [(signal.SIGKILL, 1)],
    "mpich-native-shm": [(signal.SIGSTOP, 1)],
}
LEFT = re.compile(r"left in memory: (\d+) names, +(\d+) KiB")


def names_rank(outcome: Outcome, rank: int, pid: str) -> bool:
    """Whether somebody says which rank it was: another rank, or the launcher; MPICH's says which process."""
    said = outcome.stdout + outcome.stderr
    words = (
        rf"no answer from ranks? (\d+, )*{rank}\b",
        rf"\brank {rank} (ended|failed|was lost)",
        rf"\btask {rank}: ",
        rf"Root Cause[^=]*rank +: {rank} ",
        rf"process rank {rank} with PID",
        rf"Process name: {rank}\b",
        rf"PID {pid} RUNNING",
    )
    return any(re.search(each, said) for each in words)


def drawn(name: str, trials: Sequence[tuple[signal.Signals, int]]) -> Iterator[Hurt]:
    """Each at a random moment, later ones in later steps: the training goes on from what it had saved."""
    draws = random.Random(name)
    for turn, (number, rank) in enumerate(draws.sample(trials, len(trials))):
        yield Hurt(rank, number, turn * SAVED_EVERY + draws.randrange(1, SAVED_EVERY), draws.uniform(0, 1.5))


def assert_failed(outcome: Outcome, hurt: Hurt, launch: Launch) -> None:
    assert outcome.rc != 0, str(outcome)
    assert names_rank(outcome, hurt.rank, (launch.directory / f"pid-{hurt.rank}").read_text()), f"{hurt}\n{outcome}"


def hurt_run(launch: Launch, cell: Cell, hurt: Hurt) -> Outcome:
    argv = cell.argv(training.__file__, str(launch.directory), str(hurt))
    return launch(with_little_memory("2g", argv), env=cell.env, timeout_s=LIMIT_S, check=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_rank_hurt_at_any_moment_ends_its_job_which_goes_on(
    launch: Launch, cell: Cell, effort: Effort, unhurt: Callable[[], str]
) -> None:
    trials = effort(SHORT.get(str(cell), []), TRIALS)
    if not trials:
        pytest.skip("only with --long")
    for hurt in drawn(str(cell), trials):
        outcome = hurt_run(launch, cell, hurt)
        assert_failed(outcome, hurt, launch)
        left = LEFT.search(outcome.stdout)
        assert left is not None, str(outcome)
        assert left.groups() == ("0", "0"), f"{hurt}\n{outcome}"
        effort.count(f"ranks hurt by {signal.Signals(hurt.signal).name}")
    assert trained(launch, cell) == [unhurt()] * 2
    effort.count("runs that went on to the same bits after kills")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "transport"), [("native", "shm"), ("native", "gloo"), ("horovod", "gloo")])
def test_a_rank_hurt_under_srun_ends_its_job_which_goes_on(
    launch: Launch, slurm: Slurm, backend: str, transport: str, effort: Effort, unhurt: Callable[[], str]
) -> None:
    """As the scripts of launch/ start it: a task that ends badly ends the step."""
    argv = ["srun", "-N1", "-n2", "--kill-on-bad-exit=1", sys.executable, training.__file__, backend]
    argv.append(str(launch.directory))
    env = {**slurm.env, "DUALDIST_TRANSPORT": transport}
    trials = effort([(signal.SIGKILL, 1)] if transport == "shm" else [], TRIALS)
    if not trials:
        pytest.skip("only with --long")
    for hurt in drawn(f"srun-{backend}-{transport}", trials):
        outcome = launch([*argv, str(hurt)], env=env, timeout_s=LIMIT_S, check=False)
        assert_failed(outcome, hurt, launch)
        assert eventually(lambda: not left_of(launch.directory), within_s=GRACE_S), f"{left_of(launch.directory)}"
        effort.count(f"ranks hurt by {signal.Signals(hurt.signal).name}")
    reports = launch.reports(argv, 2, env=env)
    assert [seen["parameters"] for seen in reports] == [unhurt()] * 2
    effort.count("runs that went on to the same bits after kills")


def left_of(folder: Path) -> list[str]:
    """The ranks that are still there: slurmd has started them, not this process."""
    lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    return [line for line in lines if training.__file__ in line and str(folder) in line]
