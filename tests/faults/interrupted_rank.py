"""A rank that is interrupted in the middle of operations, one placement after the other, each in its own session.

    PYTHONPATH=.:tests torchrun --standalone --nproc-per-node=2 tests/faults/interrupted_rank.py native --seed 17 --only

repeats the placement of seed 17; without --only those of the next seeds follow. After an interrupt the program goes on
with operations whose results it knows. The ranks compare what they saw through files, not through dualdist; rank 0
prints a line for each placement, and what is wrong with it. A rank that hangs ends with its stack.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from faults.interrupted_operations import FACES, DualdistFace, Operation
from faults.interrupts import (
    OPERATIONS,
    REGRESSIONS,
    AlarmTrap,
    CompressorTrap,
    HandlerError,
    LineTrap,
    Outcome,
    Placement,
    Report,
    draw,
    judge,
)
from harness.jobs import REPORT_DIR

# In which a session opens, with its first operations, and in which it closes.
OPEN_S, CLOSE_S = 40.0, 15.0
# By which an operation may take longer than is right before the rank ends.
HANG_S = 10.0
POLL_S = 0.005
INTERRUPTED = "op"  # the name of the operation that is interrupted


class Exchange:
    """Exchange values between the ranks through files in a folder."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder = folder
        self._rank, self._size = rank, size

    def __call__(self, tag: str, value: object = None) -> list[Any]:
        """Return all ranks' values of this tag; wait for those that are missing, until faulthandler ends this rank."""
        draft = self.folder / f"{tag}.{self._rank}.draft"
        draft.write_text(json.dumps(value))
        draft.rename(draft.with_suffix(""))
        paths = [self.folder / f"{tag}.{rank}" for rank in range(self._size)]
        while not all(path.exists() for path in paths):
            time.sleep(POLL_S)
        return [json.loads(path.read_text()) for path in paths]


@dataclass(frozen=True)
class Counts:
    """Lines of the package, and calls of the compressor, in an operation, at first and later."""

    first: int
    later: int
    compressor: int


def end_after(seconds: float) -> None:
    """End this process, with the stacks of its threads, unless it comes here again within these seconds."""
    faulthandler.dump_traceback_later(seconds, exit=True)


class Program:
    """The program of one rank."""

    def __init__(self, face: DualdistFace, exchange: Exchange, rank: int) -> None:
        self._face = face
        self._exchange = exchange
        self._rank = rank
        self._counts: dict[str, Counts] = {}

    def attempt(self, what: str, call: Callable[[], str | None]) -> Outcome:
        began = time.monotonic()

        def ended(result: Any, text: str = "") -> Outcome:
            return Outcome(what, result, text, time.monotonic() - began)

        try:
            wrong = call()
        except (KeyboardInterrupt, HandlerError):
            return ended("interrupted")
        except self._face.errors as error:
            kinds = [type(each).__name__ for each in (error, error.__cause__) if each is not None]
            return ended("error", f"{' of '.join(kinds)}: {error}")
        except BaseException:
            return ended("other", traceback.format_exc())
        return ended("wrong" if wrong else "right", wrong or "")

    def measure(self, operation: str) -> None:
        """Count the lines of an operation in a session of its own."""
        if operation in self._counts:
            return
        end_after(OPEN_S)
        self._face.open()
        compressor = CompressorTrap()
        call = self._face.prepare(operation, compressor).call
        counts = []
        for name in ("first", "later"):
            with LineTrap() as lines:
                wrong = call(name)
            assert not wrong, wrong
            counts.append(lines.count)
        with compressor:
            call("last")
        self._exchange(f"measured {operation}")
        self._counts[operation] = Counts(*counts, compressor.count)
        self._face.close()

    def run(self, placement: Placement) -> Report:
        """Run a placement, and return what this rank saw."""
        self.measure(placement.operation)
        end_after(OPEN_S)
        compressor = CompressorTrap(
            self._number(placement, self._counts[placement.operation].compressor), placement.error
        )
        prepared: list[Operation] = []
        starts = [("init", self._face.open)]
        starts += [("prepare", lambda: prepared.append(self._face.prepare(placement.operation, compressor)))]
        starts += [] if placement.is_first else [("before", lambda: prepared[0].call("before"))]
        for what, call in starts:
            outcome = self.attempt(what, call)
            if any(self._exchange(f"{placement.label} {what}", outcome.result != "right")):
                return Report([outcome], outcome.seconds, closing="could not begin")
        end_after(placement.limit_s + HANG_S)
        began = time.monotonic()
        outcomes, position = self._perform(placement, prepared[0], compressor)
        seconds = time.monotonic() - began
        self._exchange(f"{placement.label} done")
        end_after(CLOSE_S)
        training = prepared[0].training
        closing = self.attempt("shutdown", self._face.close)
        return Report(
            outcomes,
            seconds,
            position,
            closing="" if closing.result == "right" else closing.text,
            state="" if training is None else training.state(),
            is_expected=training is None or training.is_expected(INTERRUPTED),
        )

    def _perform(self, placement: Placement, operation: Operation, own: CompressorTrap) -> tuple[list[Outcome], str]:
        """Perform what is interrupted, and what follows until an error; return also where it was interrupted."""
        position = ""
        if self._rank == placement.rank:
            trap = self._trap(placement, own)

            def call() -> str:
                with trap:
                    return operation.call(INTERRUPTED)

            outcomes = [self.attempt(INTERRUPTED, call)]
            position = trap.position
            print(f"{placement}\n  {position or 'not interrupted'}", file=sys.stderr, flush=True)  # also if it hangs
        else:
            time.sleep(placement.late_s)
            outcomes = [self.attempt(INTERRUPTED, lambda: operation.call(INTERRUPTED))]
        following = [(INTERRUPTED, operation.call)] if self._repeats(placement, outcomes[0]) else []
        following += [(f"after.{number}", call) for number, call in enumerate(self._after(placement, operation))]
        for name, call in following:
            if outcomes[-1].result not in ("right", "interrupted"):
                break
            outcomes.append(self.attempt(name, lambda call=call, name=name: call(name)))
        return outcomes, position

    def _repeats(self, placement: Placement, outcome: Outcome) -> bool:
        return placement.repeats and outcome.result == "interrupted"

    def _after(self, placement: Placement, operation: Operation) -> list[Callable[[str], str]]:
        """Return what follows: after a step other steps and a collective, after a collective others."""
        collectives = self._face.after()
        if operation.training is None:
            return [*collectives[: placement.num_after]]
        return [*[operation.call] * placement.num_after, collectives[0]]

    def _trap(self, placement: Placement, own: CompressorTrap) -> AlarmTrap | CompressorTrap | LineTrap:
        if placement.way == "compressor":
            return own
        if placement.way == "alarm":
            return AlarmTrap(placement.at_s, placement.error)
        counts = self._counts[placement.operation]
        lines = counts.first if placement.is_first else counts.later
        return LineTrap(self._number(placement, lines), placement.error)

    @staticmethod
    def _number(placement: Placement, count: int) -> int:
        return 1 + int(placement.share * count)


def plan(seed: int, count: int, size: int, face: str, *, with_regressions: bool) -> list[Placement]:
    """Return the placements in their order; the test draws the same."""
    regressions = REGRESSIONS if with_regressions and face == "dd" else ()
    return [*regressions, *(draw(number, size, face) for number in range(seed, seed + count))]


def show(placement: Placement, reports: Sequence[Report], problems: Sequence[str]) -> str:
    """Return what a person reads of a placement."""
    ends = ["; ".join(f"{each.what} {each.result}" for each in report.outcomes) for report in reports]
    said = [f"  rank {rank}: {end.text}" for rank, report in enumerate(reports) for end in report.outcomes if end.text]
    ends = [f"{end} ({report.seconds:.1f} s)" for end, report in zip(ends, reports, strict=True)]
    where = reports[placement.rank].position or "not interrupted"
    lines = [f"{placement}", f"  {where}", *(f"  rank {rank}: {end}" for rank, end in enumerate(ends))]
    return "\n".join([*lines, *(said if problems else ()), *(f"  PROBLEM: {problem}" for problem in problems)])


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--face", choices=[*OPERATIONS], default="dd")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--only", action="store_true", help="the placement of this seed alone")
    parser.add_argument("--regressions", action="store_true", help="begin with the cases that failed once")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first placements of the plan")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    end_after(OPEN_S)
    face = FACES[options.face](options.backend)
    face.open()
    rank, size = face.ranks()
    folder = tempfile.mkdtemp(prefix="interrupts-", dir=os.environ.get(REPORT_DIR)) if rank == 0 else ""
    exchange = Exchange(Path(face.share(folder)), rank, size)
    face.close()
    program = Program(face, exchange, rank)
    count = 1 if options.only else options.count
    is_right = True
    placements = plan(options.seed, count, size, options.face, with_regressions=options.regressions)
    for number, placement in list(enumerate(placements))[options.skip :]:
        report = program.run(placement)
        reports = [Report.of(each) for each in exchange(f"{placement.label} report", asdict(report))]
        problems = judge(placement, reports)
        is_right = is_right and not problems
        is_last = any(each.closing for each in reports)  # the sessions that follow would fail, too
        if rank == 0:
            text = show(placement, reports, problems)
            print(text, flush=True)
            if REPORT_DIR in os.environ:
                verdict = {"label": placement.label, "is_right": not problems, "is_last": is_last, "text": text}
                Path(os.environ[REPORT_DIR], f"verdict-{number}.json").write_text(json.dumps(verdict))
        if is_last:
            return 1
    end_after(OPEN_S)
    face.open()  # the process exits with status 0 after errors only if a session followed
    outcome = program.attempt("last", lambda: face.after()[0]("last"))
    exchange("last")
    face.close()
    faulthandler.cancel_dump_traceback_later()
    return 0 if is_right and outcome.result == "right" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
