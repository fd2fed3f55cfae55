"""Jobs of tests: commands with a hard time limit, whose process tree is killed and whose whole output is kept.

Knows nothing of dualdist: what a launcher did is judged from outside.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

GUARD = Path(__file__).with_name("guard.py")
REPORT_DIR = "TEST_REPORT_DIR"
LIMIT_S = 120.0
"""For four ranks on two busy cores, whose imports alone take ten seconds of CPU time."""
GRACE_S = 5.0
"""Seconds that processes may outlive the command that started them without counting as leaked."""


@dataclass(frozen=True)
class Outcome:
    """Result of a command: `rc` is -9 if killed; `left` are the processes that outlived it."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    left: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    """Name and text of each *.out file in its folder: Slurm writes a batch script's output there."""

    def __str__(self) -> str:
        ending = f"{'killed at its time limit' if self.timed_out else f'exit code {self.rc}'}, {self.seconds:.1f} s"
        left = "".join(f"\nleft running: {line}" for line in self.left)
        texts = [("stdout", self.stdout), ("stderr", self.stderr), *self.files]
        return f"{shlex.join(self.argv)}\n{ending}{left}" + "".join(f"\n--- {name}\n{text}" for name, text in texts)


class Job:
    """A command under a guard: leaving the `with` block kills its processes."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, grace_s: float = GRACE_S) -> None:
        self.argv = tuple(argv)
        self.directory = Path(tempfile.mkdtemp(prefix="job-", dir=cwd))
        self._cwd = cwd
        self._report = self.directory / "outcome.json"
        self._began = time.monotonic()
        self._timed_out = False
        guard = [sys.executable, str(GUARD), str(os.getpid()), str(self._report), str(grace_s)]
        with (self.directory / "stdout").open("wb") as out, (self.directory / "stderr").open("wb") as err:
            self._guard = subprocess.Popen(
                [*guard, *self.argv],
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The guard's process id: the command and its processes are descendants."""
        return self._guard.pid

    def is_running(self) -> bool:
        return self._guard.poll() is None

    def output(self) -> str:
        """Return the output so far, stdout before stderr."""
        return self._read("stdout") + self._read("stderr")

    def wait_until(self, holds: Callable[[], object], within_s: float = 60.0) -> None:
        """Poll until holds() is true; fail if the job ends before, or at the time limit."""
        deadline = time.monotonic() + within_s
        while not holds():
            assert self.is_running(), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the job's processes, if any are left."""
        if self.is_running():
            self._guard.send_signal(signal.SIGTERM)
        self._guard.wait()

    def wait(self, timeout_s: float) -> Outcome:
        """Wait and return the outcome; kill the job after timeout_s."""
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._timed_out = True
            self.kill()
        seconds = time.monotonic() - self._began
        report: dict[str, Any] = {"rc": -signal.SIGKILL, "left": []}
        if self._report.exists():
            report = json.loads(self._report.read_text())
        return Outcome(
            argv=self.argv,
            rc=report["rc"],
            stdout=self._read("stdout"),
            stderr=self._read("stderr"),
            seconds=seconds,
            timed_out=self._timed_out,
            left=tuple(report["left"]),
            files=tuple((path.name, path.read_text(errors="replace")) for path in sorted(self._cwd.glob("*.out"))),
        )

    def _read(self, name: str) -> str:
        return (self.directory / name).read_text(errors="replace")


@dataclass(frozen=True)
class Launch:
    """Runs launchers for one test, in one directory and a clean environment."""

    env: Mapping[str, str] = field(repr=False)
    directory: Path

    def write(self, name: str, text: str) -> str:
        """Write a file below the directory, and return its path."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Job:
        """Start a job with `env` added to the clean environment; the caller waits or uses `with`."""
        return Job(argv, env={**self.env, **(env or {})}, cwd=self.directory)

    def __call__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = LIMIT_S,
        check: bool = True,
    ) -> Outcome:
        """Run argv. With check, fail the test unless it exits with 0 within timeout_s and leaves no process."""
        with self.start(argv, env=env) as job:
            outcome = job.wait(timeout_s)
        assert not outcome.timed_out, str(outcome)
        assert not outcome.left, str(outcome)
        assert outcome.rc == 0 or not check, str(outcome)
        return outcome

    def reports(
        self, argv: Sequence[str], size: int, *, env: Mapping[str, str] | None = None, timeout_s: float = LIMIT_S
    ) -> list[dict[str, Any]]:
        """Return the ranks' reports in rank order; a missing report fails the test."""
        with tempfile.TemporaryDirectory(prefix="reports-", dir=self.directory) as folder:
            outcome = self(argv, env={**(env or {}), REPORT_DIR: folder}, timeout_s=timeout_s)
            return collect(Path(folder), size, outcome)


def report(rank: int, values: Mapping[str, object]) -> None:
    """Write rank-N.json atomically for the test; called by the ranks' program."""
    path = Path(os.environ[REPORT_DIR]) / f"rank-{rank}.json"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(dict(values)))
    os.link(draft, path)  # unlike rename it fails for a second report of the same rank
    draft.unlink()


def collect(folder: Path, size: int, outcome: Outcome) -> list[dict[str, Any]]:
    """Return the reports of ranks 0 to size-1; fail if there are others or fewer."""
    expected = {f"rank-{rank}.json" for rank in range(size)}
    found = {path.name for path in folder.iterdir()}
    assert found == expected, f"missing {sorted(expected - found)}, unexpected {sorted(found - expected)}\n{outcome}"
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
