"""Processes that a rank starts: a child is no rank, and a launcher starts a job of its own."""

import sys
from collections.abc import Sequence

import pytest
from harness.jobs import Launch
from harness.mpi import OpenMPI
from launch.running import RUN, TORCHRUN

# Rank 0 starts a command between its own init() and shutdown().
PARENT = """
import subprocess, sys
import dualdist as dd
def main(argv):
    dd.init("native", timeout_s=100)
    done = None
    if dd.rank() == 0:
        done = subprocess.run(argv, capture_output=True, text=True)
    dd.barrier()
    dd.shutdown()
    return done and (done.returncode, done.stdout, done.stderr)
if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        found = dd.spawn(main, 2, (sys.argv[2:],))[0]
    else:
        found = main(sys.argv[1:])
    if found:
        print(*found, sep="\\n")
"""
CHILD = """
import dualdist as dd
dd.init('native', timeout_s=60)
print(f'child {dd.rank()} of {dd.size()} by {dd.launcher()}')
"""
STARTS: dict[str, Sequence[str]] = {
    "torchrun": TORCHRUN,
    "mpirun": [*OpenMPI("mpirun").run(2), sys.executable],
    "run": [*RUN, "-np", "2", "--launcher", "spawn"],
}


FULL = pytest.mark.full


@pytest.mark.parametrize("launcher", ["spawn", *(pytest.param(each, marks=FULL) for each in STARTS)])
def test_a_child_of_a_rank_is_refused_and_free_without_the_variables(launch: Launch, launcher: str) -> None:
    child = launch.write("child.py", CHILD)
    parent = [*STARTS.get(launcher, [sys.executable]), launch.write("parent.py", PARENT)]
    parent += ["spawn"] if launcher == "spawn" else []
    printed = launch([*parent, sys.executable, child]).stdout
    assert "this process is a child of rank 0 of 2" in printed, printed
    start = printed.partition("without what it inherited: ")[2].partition(" python ...")[0].split()
    assert start[:2] == ["env", "-u"], printed
    printed = launch([*parent, *start, sys.executable, child]).stdout
    assert "child 0 of 1 by none" in printed


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        pytest.param("spawn", TORCHRUN, marks=FULL),
        ("mpirun", (*RUN, "-np", "2", "--launcher", "mpirun")),
        pytest.param("torchrun", (*RUN, "-np", "2", "--launcher", "spawn"), marks=FULL),
    ],
)
def test_a_launcher_that_a_rank_starts_starts_a_job_of_its_own(
    launch: Launch, outer: str, inner: Sequence[str]
) -> None:
    parent = [*STARTS.get(outer, [sys.executable]), launch.write("parent.py", PARENT)]
    parent += ["spawn"] if outer == "spawn" else []
    printed = launch([*parent, *inner, launch.write("child.py", CHILD)]).stdout
    launcher = "torchrun" if inner is TORCHRUN else inner[-1]
    assert sorted(line for line in printed.splitlines() if line.startswith("child")) == [
        f"child {rank} of 2 by {launcher}" for rank in range(2)
    ], printed
