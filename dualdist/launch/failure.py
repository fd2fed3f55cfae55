"""Failures of a job: the first failing rank, its traceback, and the exit code of the job. Pure functions."""

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualdist.utils.tracebacks import is_consequence

# The exit code of a job whose first failing rank was lost, as if by SIGKILL.
LOST_RANK_CODE = 137
TRACEBACK_HEADER = re.compile(r"^.{0,40}Traceback \(most recent call last\):\s*$")
# torch puts this before every line of an uncaught exception.
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# The line before a chained traceback, and the beginning of the line before a traceback that did not end the program.
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
NOT_FATAL = ("Exception ignored", "Exception in thread")
SHOWN_LINES = 20
# The last line of a traceback, with a message, which torchrun's own ChildFailedError lacks.
EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: ")


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank.

    Attributes:
        code: the exit code, or minus a signal's number; None for a lost rank, which reported none.
        at_s: when its failure began, by this host's clock.
        was_terminated: a signal asked it to end, so that its code says nothing about the cause.
        text: its traceback, or the end of its stderr; of a lost rank, the traceback that it printed right before.
    """

    rank: int | None
    host: str
    code: int | None
    at_s: float
    was_terminated: bool = False
    text: str = ""

    def label(self, *, has_hosts: bool) -> str:
        """Return the rank, and its host if there are several."""
        name = "a rank" if self.rank is None else f"rank {self.rank}"
        return f"{name} on {self.host}" if has_hosts or self.rank is None else name


def first_failure(ends: Iterable[RankEnd]) -> RankEnd | None:
    """Return the first failure, preferably one that is not the consequence of another."""
    failures = [end for end in ends if end.code != 0 and not end.was_terminated]
    return min(
        failures,
        key=lambda end: (is_consequence(end.text), end.code is None and not end.text, end.at_s),
        default=None,
    )


def exit_code(launcher_codes: Sequence[int], failure: RankEnd | None, *, launcher_restarts_ranks: bool) -> int:
    """Return the exit code of the job: the first failing rank's, else that of the first launcher that failed.

    A launcher that exited may know the code of a lost rank; one that crashed, as mpirun of Open MPI 4 can, does not.
    If an elastic launcher, which restarts lost ranks, succeeded, their failures do not count.
    """
    failed = next((code for code in launcher_codes if code), 0)
    if failure is None or (launcher_restarts_ranks and not failed):
        return shell_code(failed)
    if failure.code is None:
        return failed if failed > 0 else LOST_RANK_CODE
    return shell_code(failure.code)


def shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def describe_failure(failure: RankEnd, *, has_hosts: bool) -> str:
    """Return the message about the rank that failed first, with its traceback."""
    label = failure.label(has_hosts=has_hosts)
    if failure.code is None and failure.text:
        return f"{label} failed first, and was killed before it reported an exit code:\n{failure.text}"
    if failure.code is None:
        return f"{label} was lost: its host does not answer, or it was killed together with its parent process"
    how = f"exit code {failure.code}" if failure.code >= 0 else f"ended by {_signal_name(-failure.code)}"
    return f"{label} failed first ({how})" + (f":\n{failure.text}" if failure.text else "")


def _signal_name(number: int) -> str:
    if number == signal.SIGKILL:
        return "SIGKILL; out of memory? see dmesg"
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def extract_traceback(text: str) -> str:
    """Return the last traceback that ended the program, with those it is chained to; else the last lines."""
    lines = [RANK_PREFIX.sub("", line.rstrip()) for line in text.splitlines()]
    headers = [n for n, line in enumerate(lines) if TRACEBACK_HEADER.match(line)]
    fatal = [n for n in headers if not _line_before(lines, n).startswith(NOT_FATAL)]
    if not fatal:
        return "\n".join(lines[-SHOWN_LINES:]).strip()
    start = fatal[-1]
    while _line_before(lines, start).startswith(CHAINED) and (earlier := [n for n in fatal if n < start]):
        start = earlier[-1]
    # After the last header: the stack and the exception, whose message may have several lines.
    after = range(fatal[-1] + 1, len(lines))
    end = next((n for n in after if lines[n].startswith((*NOT_FATAL, "[W", "[E", "W1", "E1"))), len(lines))
    return "\n".join(lines[start:end]).strip()


def find_exception(text: str) -> str | None:
    """Return the line that names the exception by which a job failed, in the output of its ranks and launcher."""
    lines = [RANK_PREFIX.sub("", line.strip()) for line in text.splitlines()]
    found = [line for line in lines if EXCEPTION.match(line)]
    causes = [line for line in found if not is_consequence(line)]
    return next(reversed(causes or found), None)


def _line_before(lines: list[str], n: int) -> str:
    return next((line for line in reversed(lines[:n]) if line), "")
