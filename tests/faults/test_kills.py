"""A rank that gets a signal at any moment of training: the others end in time and name it, nothing of the job stays,
and started again it ends with the bits of a run to which nothing happened.
"""

import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from faults import training
from faults.starts import STARTS, Cell, assert_memory_is_free, parameters_of, with_small_memory
from faults.training import SAVED_EVERY, Hurt
from harness.effort import Effort
from harness.jobs import GRACE_S, Launch, Outcome
from harness.slurm import Slurm, eventually

# A start on a busy machine, what the others wait, and the 30 s that torchrun gives to a rank that is stopped.
LIMIT_S = 75.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
TRIALS = [(number, rank) for rank in (0, 1) for number in SIGNALS]
CELLS = [
    *(Cell(start, "native", "shm") for start in STARTS),
    *(Cell(start, "native", "gloo") for start in ("torchrun", "mpirun", "run-spawn")),
    *(Cell(start, "horovod", "gloo") for start in ("torchrun", "horovodrun", "mpirun", "spawn", "run-horovodrun")),
    *(Cell(start, "horovod", "mpi") for start in ("horovodrun-mpi", "mpirun", "run-horovodrun-mpi", "run-mpirun")),
    *(Cell(start, "mpi", "mpi") for start in ("horovodrun-mpi", "mpirun", "mpich", "run-mpirun")),
]
# In CI each backend once, each signal and each rank. MPICH's launcher ends a job only where a rank ends by a signal.
SHORT = {
    "horovodrun-horovod-gloo": [(signal.SIGTERM, 1)],
    "mpirun-horovod-mpi": [(signal.SIGSTOP, 0)],
    "mpirun-mpi-mpi": [(signal.SIGKILL, 1)],
}


def names_rank(outcome: Outcome, rank: int, pid: str) -> bool:
    """Return True if another rank or the launcher names the rank; MPICH's names the process."""
    patterns = (
        rf"no answer from ranks? (\d+, )*{rank}\b",
        rf"\brank {rank} (ended|failed|was lost)",
        rf"\btask {rank}: ",
        rf"Root Cause[^=]*rank +: {rank} ",
        rf"process rank {rank} with PID",
        rf"Process name: {rank}\b",
        rf"PID {pid} RUNNING",
    )
    return any(re.search(each, outcome.stdout + outcome.stderr) for each in patterns)


def drawn(name: str, trials: Sequence[tuple[signal.Signals, int]]) -> Iterator[Hurt]:
    """Yield trials at random moments, later ones in later steps: the training resumes from what it had saved."""
    draws = random.Random(name)
    for turn, (number, rank) in enumerate(draws.sample(trials, len(trials))):
        yield Hurt(rank, number, turn * SAVED_EVERY + draws.randrange(1, SAVED_EVERY), draws.uniform(0, 1.5))


def hurt_ranks(
    launch: Launch,
    name: str,
    trials: Sequence[tuple[signal.Signals, int]],
    effort: Effort,
    run: Callable[[Hurt], Outcome],
) -> None:
    """Run the job once per trial; each must fail, name the rank and leave nothing."""
    effort.require_long(unless=bool(trials))
    for hurt in drawn(name, trials):
        outcome = run(hurt)
        assert outcome.rc != 0, str(outcome)
        assert names_rank(outcome, hurt.rank, (launch.directory / f"pid-{hurt.rank}").read_text()), f"{hurt}\n{outcome}"
        effort.count(f"ranks hurt by {signal.Signals(hurt.signal).name}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_rank_hurt_at_any_moment_ends_its_job_which_resumes(
    launch: Launch, cell: Cell, effort: Effort, unhurt: Callable[[], str]
) -> None:
    def run(hurt: Hurt) -> Outcome:
        argv = with_small_memory("2g", cell.argv(training.__file__, str(launch.directory), str(hurt)))
        outcome = launch(argv, env=cell.env, timeout_s=LIMIT_S, check=False)
        assert_memory_is_free(outcome)
        return outcome

    hurt_ranks(launch, str(cell), effort(SHORT.get(str(cell), []), TRIALS), effort, run)
    assert parameters_of(launch, cell) == [unhurt()] * 2
    effort.count("runs that went on to the same bits after kills")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "transport"), [("native", "shm"), ("native", "gloo"), ("horovod", "gloo")])
def test_a_rank_hurt_under_srun_ends_its_job_which_resumes(
    launch: Launch, slurm: Slurm, backend: str, transport: str, effort: Effort, unhurt: Callable[[], str]
) -> None:
    """As the scripts of launch/ start it: a task that fails ends the step."""
    argv = ["srun", "-N1", "-n2", "--kill-on-bad-exit=1", sys.executable, training.__file__, backend]
    argv.append(str(launch.directory))
    env = {**slurm.env, "DUALDIST_TRANSPORT": transport}

    def run(hurt: Hurt) -> Outcome:
        outcome = launch([*argv, str(hurt)], env=env, timeout_s=LIMIT_S, check=False)
        assert eventually(lambda: not ranks_of(launch.directory), within_s=GRACE_S), f"{ranks_of(launch.directory)}"
        return outcome

    trials = effort([(signal.SIGKILL, 1)] if transport == "shm" else [], TRIALS)
    hurt_ranks(launch, f"srun-{backend}-{transport}", trials, effort, run)
    assert [seen["parameters"] for seen in launch.reports(argv, 2, env=env)] == [unhurt()] * 2
    effort.count("runs that went on to the same bits after kills")


def ranks_of(folder: Path) -> list[str]:
    """Return the command lines of running ranks: slurmd has started them, not this process."""
    lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    return [line for line in lines if training.__file__ in line and str(folder) in line]
