"""Work of rank 0 on the disk, for which the other ranks wait, and problems of one rank that all raise.

Note [disk progress]: writing a large file takes longer than a collective may wait. So rank 0 reads and writes in a
thread, and broadcasts every BEAT_S seconds that it makes progress: bytes went to or from the disk, or the thread used
the CPU. Without either for the length of a timeout, the file is abandoned: a thread that hangs may resume when the
disk is back, when the program's tensors and the newer checkpoints are different, so its file must never appear.
"""

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dualdist.checkpoint.files import FileProgress
from dualdist.collectives.broadcast_state import allgather_object, broadcast_object
from dualdist.collectives.group import Group
from dualdist.errors import CheckpointError, DualdistError

BEAT_S = 10.0
ROOT = 0


@dataclass(frozen=True)
class DiskOutcome:
    """The result or error of a DiskTask, as broadcast to all ranks."""

    value: Any = None
    error: str = ""


class DiskTask:
    """A read or write that rank 0 runs in a thread."""

    def __init__(self, call: Callable[[FileProgress], Any], limit_s: float) -> None:
        self.beat_s = min(BEAT_S, limit_s / 4)
        self.progress = FileProgress()
        self.value: Any = None
        self.error: BaseException | None = None
        self._limit_s = limit_s
        self._thread = threading.Thread(target=self._run, args=(call,), name="dualdist-checkpoint", daemon=True)
        self._clock: int | None = None
        self._seen = (0, 0.0)  # the bytes and the CPU time of the last beat that saw progress
        self._seen_at = time.monotonic()
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread is left: raised on all ranks
            self.error = error
        atexit.register(self._finish)  # a program that ends does not truncate a checkpoint

    def _run(self, call: Callable[[FileProgress], Any]) -> None:
        try:
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self.value = call(self.progress)
        except BaseException as error:  # raised on all ranks
            self.error = error

    def outcome(self) -> DiskOutcome | None:
        """Wait for one beat; return the outcome, or None while the task makes progress."""
        if self._thread.ident is not None:
            self._thread.join(self.beat_s)
        if not self._thread.is_alive():
            atexit.unregister(self._finish)
            return DiskOutcome(self.value) if self.error is None else DiskOutcome(error=error_message(self.error))
        seen = self.progress.nbytes, self._cpu_s()
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        if time.monotonic() - self._seen_at > self._limit_s:
            self.abandon()
            return DiskOutcome(error=f"no byte went to or from the disk for {self._limit_s:g} s: is it still there?")
        return None

    def _cpu_s(self) -> float:
        """Return the thread's CPU time, rounded to 0.1 s."""
        with contextlib.suppress(OSError):  # it has just ended
            return 0.0 if self._clock is None else round(time.clock_gettime(self._clock), 1)
        return -1.0

    def abandon(self) -> None:
        """Keep the file from ever appearing: Note [disk progress]."""
        self.progress.is_abandoned = True
        atexit.unregister(self._finish)

    def _finish(self) -> None:
        while (outcome := self.outcome()) is None:
            pass
        if outcome.error:
            print(f"dualdist: {outcome.error}", file=sys.stderr, flush=True)


def raise_problem(
    group: Group, name: str, problem: str, kind: type[DualdistError], cause: Exception | None = None
) -> None:
    """Raise on every rank if any rank has a problem; `cause` is what this rank's own problem came from."""
    raise_problems(allgather_object(group, problem, name), group.ranks, kind, cause)


@contextlib.contextmanager
def raised_on_all_ranks(group: Group, name: str, kind: type[DualdistError], prefix: str = "") -> Iterator[None]:
    """Raise an error of the block, such as one of the program's own code, on all ranks; all of them run it."""
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        cause = error
    raise_problem(group, name, "" if cause is None else f"{prefix}{error_message(cause)}", kind, cause)


def error_message(error: BaseException) -> str:
    """Return an error's text for the other ranks; foreign errors with the name of their class."""
    return str(error) if isinstance(error, DualdistError) else f"{type(error).__name__}: {error}"


def raise_problems(
    problems: Sequence[str], ranks: Sequence[int], kind: type[DualdistError], cause: Exception | None = None
) -> None:
    """Raise an error of this kind if a rank has a problem; the message names ranks unless all have the same."""
    if not any(problems):
        return
    by_rank = [f"rank {rank}: {problem}" for rank, problem in zip(ranks, problems, strict=True) if problem]
    raise kind(problems[0] if len(set(problems)) == 1 else "; ".join(by_rank)) from cause


def await_outcome(group: Group, name: str, task: DiskTask | None) -> DiskOutcome:
    """Wait for rank 0's task and return its outcome on every rank: Note [disk progress]."""
    beat = 0
    while True:
        beat += 1
        local = None if task is None else task.outcome()
        outcome = broadcast_object(group, local, group.ranks[ROOT], f"{name}.{beat}")
        if outcome is not None:
            return outcome


def unwrap_outcome(outcome: DiskOutcome, task: DiskTask | None) -> Any:
    """Return the task's result, or raise CheckpointError if it failed."""
    if outcome.error:
        raise CheckpointError(outcome.error) from (None if task is None else task.error)
    return outcome.value
