"""A rank that is killed, ended or stopped at any moment of training: all others end in time, and name it; nothing of
the job stays, and started again it ends with the bits of the run that was never hurt.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable

import pytest
from faults import training
from faults.cells import CELLS, Cell, trained
from faults.memory import with_little_memory
from faults.training import SAVED_EVERY, Hurt
from harness.effort import Effort
from harness.jobs import Launch, Outcome

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
        rf"Root Cause[^=]*rank +: {rank} ",
        rf"process rank {rank} with PID",
        rf"Process name: {rank}\b",
        rf"PID {pid} RUNNING",
    )
    return any(re.search(each, said) for each in words)


def hurt_run(launch: Launch, cell: Cell, hurt: Hurt) -> Outcome:
    argv = cell.argv(training.__file__, str(launch.directory), str(hurt))
    return launch(with_little_memory("2g", argv), env=cell.env, timeout_s=LIMIT_S, check=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_rank_hurt_at_any_moment_ends_its_job_which_goes_on(
    launch: Launch, cell: Cell, effort: Effort, unhurt: Callable[[], str]
) -> None:
    draws = random.Random(str(cell))
    trials = effort(SHORT.get(str(cell), []), draws.sample(TRIALS, len(TRIALS)))
    if not trials:
        pytest.skip("only with --long")
    for turn, (number, rank) in enumerate(trials):
        hurt = Hurt(rank, number, turn * SAVED_EVERY + draws.randrange(1, SAVED_EVERY), draws.uniform(0, 1.5))
        outcome = hurt_run(launch, cell, hurt)
        assert outcome.rc != 0, str(outcome)
        assert names_rank(outcome, rank, (launch.directory / f"pid-{rank}").read_text()), f"{hurt}\n{outcome}"
        left = LEFT.search(outcome.stdout)
        assert left is not None, str(outcome)
        assert left.groups() == ("0", "0"), f"{hurt}\n{outcome}"
        effort.count(f"ranks hurt by {signal.Signals(number).name}")
    assert trained(launch, cell) == [unhurt()] * 2
    effort.count("runs that went on to the same bits after kills")
