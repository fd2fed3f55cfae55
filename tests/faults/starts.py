"""Start the jobs of fault tests, by every launcher on this host or by hand, and check their errors."""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import training
from harness.installed import lack
from harness.jobs import Launch, Outcome
from harness.mpi import MPICH, PYPIS_MPICH, OpenMPI, of_pypis_mpich

RUN = (sys.executable, "-m", "dualdist", "run", "-np", "2", "--launcher")
PYTHON = (sys.executable,)
SPAWN = """
import importlib, pathlib, sys, dualdist
path, backend, *words = sys.argv[1:]
main = importlib.import_module(f"faults.{pathlib.Path(path).stem}").main
dualdist.spawn(main, 2, (backend, *words), backend=backend)
"""
# What the program follows, and whether the launcher starts the interpreter.
STARTS: Mapping[str, Sequence[str]] = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node=2"),
    "horovodrun": ("horovodrun", "--gloo", "-np", "2", *PYTHON),
    "horovodrun-mpi": ("horovodrun", "--mpi", "-np", "2", *PYTHON),
    "mpirun": (*OpenMPI("mpirun").run(2), *PYTHON),
    "mpich": (*MPICH(str(PYPIS_MPICH / "bin" / "mpiexec")).run(2), *PYTHON),
    "spawn": (*PYTHON, "-c", SPAWN),
    "run-torchrun": (*RUN, "torchrun"),
    "run-horovodrun": (*RUN, "horovodrun"),
    "run-horovodrun-mpi": (*RUN, "horovodrun-mpi"),
    "run-mpirun": (*RUN, "mpirun"),
    "run-spawn": (*RUN, "spawn"),
}
RANK = [sys.executable, str(Path(__file__).with_name("rank.py"))]
# The program's own time limit, twice over for the last of several waits, and a start on a busy machine.
LIMIT_S = 120
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Cell:
    """A launcher, a backend and its transport."""

    start: str
    backend: str
    transport: str

    def __str__(self) -> str:
        return f"{self.start}-{self.backend}-{self.transport}"

    def argv(self, program: str, *words: str) -> list[str]:
        return [*STARTS[self.start], program, self.backend, *words]

    @property
    def env(self) -> Mapping[str, str]:
        chosen = {"DUALDIST_TRANSPORT": self.transport}
        return {**chosen, **of_pypis_mpich()} if self.start == "mpich" else chosen


def parameters_of(launch: Launch, cell: Cell) -> list[str]:
    """Run training.py to its end, and return a digest of each rank's parameters."""
    argv = cell.argv(training.__file__, str(launch.directory))
    return [seen["parameters"] for seen in launch.reports(argv, 2, env=cell.env)]


def rank_argv(start: str, backend: str, *case: str) -> list[str]:
    """Return the command that starts two ranks of rank.py."""
    return [*STARTS[start], RANK[-1], backend, *case]


def rank_env(rank: int, size: int, port: int, address: str = LOOPBACK) -> dict[str, str]:
    """Return what a hand-written job script exports."""
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port), **local}


def refused(launch: Launch, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Outcome:
    """Run a command that must fail in time and leave no process, and return its outcome."""
    outcome = launch(argv, env=env, timeout_s=LIMIT_S, check=False)
    assert outcome.rc != 0, str(outcome)
    return outcome


def fail_together(launch: Launch, argv: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[Outcome]:
    """Start a process per environment, each of which must fail in time and leave no process."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(launch.start(argv, env=env)) for env in environments]
        outcomes = [job.wait(LIMIT_S) for job in jobs]
    for outcome in outcomes:
        assert not outcome.timed_out, str(outcome)
        assert not outcome.left, str(outcome)
        assert outcome.rc != 0, str(outcome)
    return outcomes


def assert_error(outcome: Outcome, *words: str) -> None:
    """Require that one of the errors that the ranks printed has all the words."""
    errors = [line for line in outcome.stderr.splitlines() if "dualdist.errors." in line]
    assert any(all(word in line for word in words) for line in errors), str(outcome)


SMALL_MEMORY = """
mount -t tmpfs -o size={size} tmpfs /dev/shm || exit 99
"$@"
code=$?
for turn in 1 2 3 4 5 6 7 8 9 10; do  # ranks that the launcher has killed are just ending
    [ "$(df --output=used /dev/shm | tail -1)" -eq 0 ] && break
    sleep 0.2
done
echo "left in memory: $(ls -A /dev/shm | wc -l) names, $(df --output=used /dev/shm | tail -1) KiB"
exit $code
"""
LEFT_IN_MEMORY = re.compile(r"left in memory: (\d+) names, +(\d+) KiB")


def with_small_memory(size: str, argv: Sequence[str]) -> list[str]:
    """Return the command with a /dev/shm of its own of this size; see assert_memory_is_free."""
    if shutil.which("unshare") is None:
        lack("unshare", "util-linux")
    if os.geteuid() != 0:
        pytest.skip("a separate /dev/shm needs root")
    return ["unshare", "--mount", "sh", "-c", SMALL_MEMORY.format(size=size), "sh", *argv]


def assert_memory_is_free(outcome: Outcome) -> None:
    left = LEFT_IN_MEMORY.search(outcome.stdout)
    assert left is not None, str(outcome)
    assert left.groups() == ("0", "0"), str(outcome)
