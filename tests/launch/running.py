"""`dualdist run` and its kin as tests start them, and how what they print is read."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from harness import mpi, problem
from harness.jobs import Job, Launch, Outcome

PROGRAM = str(Path(__file__).with_name("run_program.py"))
TINY_RANK = str(Path(problem.__file__).with_name("tiny_rank.py"))
RUN = (sys.executable, "-m", "dualdist", "run")
LAUNCHERS = ("torchrun", "horovodrun", "horovodrun-mpi", "mpirun", "spawn")
WAIT_S = 60.0


def lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if re.search(r"(out|err) \d", line))


def last_words(stderr: str) -> list[str]:
    """What `dualdist run` said at the very end."""
    return stderr[stderr.rindex("dualdist run: ") :].splitlines()


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"no {paths}"
        time.sleep(0.02)


def start(launch: Launch, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Job:
    """As launch.start(), but for so long nobody else ends what argv leaves behind."""
    return Job(argv, env={**launch.env, **(env or {})}, cwd=launch.directory, grace_s=WAIT_S)


def interrupted(launch: Launch, argv: Sequence[str], once_it_says: str) -> Outcome:
    """How the command ended that got Ctrl-C then."""
    with launch.start(argv) as job:
        deadline = time.monotonic() + WAIT_S
        while once_it_says not in job.output():
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.02)
        (command, *_) = psutil.Process(job.pid).children()
        command.send_signal(signal.SIGINT)
        return job.wait(WAIT_S)


def run_with_mpich(launch: Launch, mpich: mpi.MPICH) -> tuple[list[str], dict[str, str]]:
    """`dualdist run` and its variables, of an interpreter that has MPICH's mpirun beside it."""
    folder = launch.directory / "bin"
    folder.mkdir()
    python = folder / "python3"
    python.symlink_to(Path(sys.executable).resolve())
    (folder / "mpirun").write_text(f'#!/bin/sh\nexec {mpich.mpiexec} "$@"\n')
    (folder / "mpirun").chmod(0o755)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    run = [str(python), "-m", "dualdist", "run", "--launcher", "mpirun", "--tag-output"]
    return run, {"PYTHONPATH": f"{launch.env['PYTHONPATH']}:{packages}"}
