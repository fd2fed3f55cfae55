"""Interrupts at random places of an operation: what a seed means, how the interrupt is made, and what may follow it.

Knows nothing of dualdist but the folder of its files; interrupted_rank.py runs the operations.
"""

from __future__ import annotations

import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Literal

TIMEOUT_S = 8.0
GRACE_S = 5.0
"""By which a placement may take longer than the timeout of an operation."""
ALLREDUCES = ("allreduce of 8 bytes", "allreduce of 1 MiB", "allreduce of 8 MiB", "allreduce in place")
OWN_COMPRESSOR = "training with its own compressor"
TRAININGS = ("training", "ordered training", "training with PowerSGD", OWN_COMPRESSOR)
# By face: what interrupted_operations.py performs.
OPERATIONS: Mapping[str, Sequence[str]] = {
    "dd": (
        *ALLREDUCES,
        *("allgather", "broadcast", "alltoall", "grouped allreduce", "async allreduces", "broadcast_object", "barrier"),
        *TRAININGS,
    ),
    "hvd": ("allreduce", "allgather", "async allreduces", "training"),
    "torch": ("allreduce", "allgather", "async allreduces", "training"),
}
# An operation that has its name already is refused if it begins again while the first one is under way.
NEVER_REPEATED = ("async allreduces",)
Way = Literal["line", "alarm", "compressor"]
Result = Literal["right", "wrong", "interrupted", "error", "other"]


class HandlerError(ValueError):
    """Raised by a signal handler of the program, as KeyboardInterrupt is by Python's own."""


@dataclass(frozen=True)
class Placement:
    """An operation, and where one rank is interrupted in it."""

    label: str  # "seed N", or the name of a regression
    operation: str
    rank: int = 0  # the interrupted one
    way: Way = "line"
    share: float = 0.5  # of the lines of the operation, or of the compressor's calls, after which it is interrupted
    at_s: float = 0.5  # after which an alarm arrives
    late_s: float = 0.0  # by which the other ranks begin later
    raises_handler_error: bool = False  # else KeyboardInterrupt
    is_first: bool = False  # of its kind in the session
    repeats: bool = False  # the program calls it again
    num_after: int = 3  # operations that follow

    @property
    def error(self) -> BaseException:
        return HandlerError("of a handler") if self.raises_handler_error else KeyboardInterrupt()

    @property
    def limit_s(self) -> float:
        return TIMEOUT_S + GRACE_S + self.late_s

    def __str__(self) -> str:
        ways = {"line": f"{self.share:.0%} of the lines", "compressor": f"{self.share:.0%} of the compressor's calls"}
        where = ways.get(self.way, f"an alarm after {self.at_s:.4f} s")
        facts = {
            f"the others {self.late_s:g} s late": self.late_s > 0,
            "first of its kind": self.is_first,
            "called again": self.repeats,
        }
        words = [f"rank {self.rank}: {type(self.error).__name__} at {where}", *(fact for fact in facts if facts[fact])]
        return f"{self.label}: {self.operation}; {', '.join(words)}"


# One of each kind that failed once.
REGRESSIONS = (
    Placement("interrupted collective", "allgather", way="alarm", at_s=0.5, late_s=1.5),
    Placement("late interrupt", "training", way="alarm", at_s=0.5, late_s=1.5, num_after=2),
    Placement("decompress", OWN_COMPRESSOR, way="compressor", raises_handler_error=True, share=0.9, num_after=2),
)


def draw(seed: int, size: int, face: str) -> Placement:
    """Return the placement of a seed on so many ranks; seeds in a row go through the operations of a face."""
    rng = random.Random(seed)
    operation = OPERATIONS[face][seed % len(OPERATIONS[face])]
    way: Way = "alarm" if rng.random() < 0.3 else "line"
    if operation == OWN_COMPRESSOR and rng.random() < 0.5:
        way = "compressor"
    late_s = rng.choice((0.0, 0.3, 0.6) if way == "alarm" else (0.0, 0.0, 0.2))
    repeats = rng.random() < 0.25 and operation not in NEVER_REPEATED
    return Placement(
        label=f"seed {seed}",
        operation=operation,
        rank=0 if rng.random() < 0.7 else rng.randrange(size),
        way=way,
        share=rng.random(),
        at_s=rng.uniform(0.0005, 1.2 * max(late_s, 0.02)),
        late_s=late_s,
        raises_handler_error=rng.random() < 0.4,
        is_first=rng.random() < 0.3,
        # torch.distributed matches operations by their number: a program that leaves one out is wrong.
        repeats=repeats or face == "torch",
        num_after=rng.randint(1, 3),
    )


SPEC = find_spec("dualdist")
assert SPEC is not None
PACKAGE = f"{Path(str(SPEC.origin)).parent}/"


def position_of(frame: FrameType | None) -> str:
    """Return the innermost line of the package in the stack of this frame, "the program" if there is none."""
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "the program"
    return f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_apart(frame: FrameType | None) -> bool:
    """Return True in an import, which runs once, and in __del__, in which Python ignores exceptions."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or (code.co_name == "<module>" and code.co_filename.startswith(PACKAGE)):
            return True
        frame = frame.f_back
    return False


class LineTrap:
    """Count the lines of the package that this thread executes in the block, and raise at one of them."""

    def __init__(self, at: int = 0, error: BaseException | None = None) -> None:
        self.count = 0
        self.position = ""  # where it raised
        self._at = at
        self._error = error

    def __enter__(self) -> LineTrap:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE) or _is_apart(frame):
            return None
        caller = frame.f_back
        is_called_by_us = caller is not None and caller.f_code.co_filename.startswith(PACKAGE)
        return self._on_line if is_called_by_us else self._on_first_line

    def _on_first_line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        """Count the first line of a call by the program; an exception there is one of the program, before the call."""
        self.count += event == "line"
        self._at += event == "line" and self.count == self._at
        return self._on_line if event == "line" else self._on_first_line

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        self.count += event == "line"
        if self.count == self._at and not self.position and self._error is not None:
            self.position = f"line {self.count}, {position_of(frame)}"
            raise self._error  # which also ends the tracing
        return self._on_line


class AlarmTrap:
    """Raise in a signal handler, this many seconds after the block began."""

    def __init__(self, at_s: float, error: BaseException) -> None:
        self.position = ""
        self._at_s = at_s
        self._error = error

    def __enter__(self) -> AlarmTrap:
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, self._at_s)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        self.position = f"alarm after {self._at_s:.4f} s, {position_of(frame)}"
        raise self._error


class CompressorTrap:
    """Raise in one of the calls of the program's compressor in the block; it calls `passes`."""

    def __init__(self, at: int = 0, error: BaseException | None = None) -> None:
        self.count = 0
        self.position = ""
        self._at = at
        self._error = error
        self._is_in_block = False

    def __enter__(self) -> CompressorTrap:
        self._is_in_block = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_in_block = False

    def passes(self, method: str) -> None:
        self.count += self._is_in_block
        if self._is_in_block and self.count == self._at and self._error is not None:
            self.position = f"call {self.count} of the compressor, {method}"
            raise self._error


@dataclass(frozen=True)
class Outcome:
    """How one operation of one rank ended."""

    what: str
    result: Result
    text: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """What one rank saw of a placement."""

    outcomes: Sequence[Outcome]
    seconds: float  # without opening and closing the session
    position: str = ""  # where it was interrupted
    closing: str = ""  # what is wrong with the end of the session
    state: str = ""  # a digest of the parameters
    is_expected: bool = True  # the parameters are those of one process, with or without the interrupted step

    @staticmethod
    def of(values: Mapping[str, Any]) -> Report:
        return Report(**{**values, "outcomes": [Outcome(**each) for each in values["outcomes"]]})

    def raised(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.result == "error"]


def judge(placement: Placement, reports: Sequence[Report]) -> list[str]:
    """Return what is wrong with a placement, by all ranks' reports: it ends right, or with an error on every rank."""
    problems = [problem for rank, report in enumerate(reports) for problem in _judge_rank(placement, rank, report)]
    raised = [rank for rank, report in enumerate(reports) if report.raised()]
    others = [rank for rank in range(len(reports)) if rank not in raised]
    if raised and not reports[placement.rank].position:
        problems.append(f"ranks {raised} raised, but nothing was interrupted")
    if raised and others:
        problems.append(f"ranks {raised} raised, ranks {others} did not")
    if not raised and len({report.state for report in reports}) > 1:
        problems.append("the ranks hold different parameters, and no rank raised")
    if not raised and not all(report.is_expected for report in reports):
        problems.append("the parameters are not those of one process, with or without the interrupted step")
    return problems


def _judge_rank(placement: Placement, rank: int, report: Report) -> Iterator[str]:
    for each in report.outcomes:
        if each.result in ("wrong", "other"):
            yield f"rank {rank}, {each.what}: {each.result}: {each.text}"
        if each.result == "interrupted" and rank != placement.rank:
            yield f"rank {rank}, {each.what}: interrupted, not rank {placement.rank}"
        if each.result == "error" and rank != placement.rank and not names(each.text, placement.rank):
            yield f"rank {rank}, {each.what}: does not name rank {placement.rank}: {each.text}"
    if report.closing:
        yield f"rank {rank}, shutdown: {report.closing}"
    if report.seconds > placement.limit_s:
        yield f"rank {rank} took {report.seconds:.1f} s, more than {placement.limit_s:g} s"


def names(text: str, rank: int) -> bool:
    """Return True if an error names the interrupted rank, or is of a timeout and names a rank."""
    is_named = re.search(rf"\brank {rank}\b|\branks (\d+(, | and ))*{rank}\b", text) is not None
    return is_named or ("CollectiveTimeoutError" in text and re.search(r"\branks? \d", text) is not None)
