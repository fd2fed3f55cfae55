"""Which rank failed first, and what a job's end says: pure functions of what the ranks told."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualdist.utils.exit_codes import REQUEUE

HEADER = re.compile(r"^.{0,40}Traceback \(most recent call last\):\s*$")
# torch puts this before every line of an exception that nobody catches.
RANK = re.compile(r"^\[rank\d+\]: ?")
# A traceback after one of these is the next of a chain; one after a line that begins like NOT_FATAL ended nothing.
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
NOT_FATAL = ("Exception ignored", "Exception in thread")
SHOWN_LINES = 20
# Exceptions that follow from another rank's end; of these, somebody else's is the reason.
CONSEQUENCES = re.compile(
    r"^(?:[\w.]*\.)?(?:RankLostError|CollectiveTimeoutError|HorovodInternalError|DistNetworkError|DistBackendError"
    r"|ConnectionResetError|BrokenPipeError)\b"
    r"|Connection (?:closed|reset) by peer|Connection was likely closed"
)

# As a traceback ends: with the exception and its message, which torchrun's own (ChildFailedError) does not have.
EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: ")


def has_traceback(text: str) -> bool:
    """Whether a traceback begins in these lines."""
    return any(HEADER.match(line) for line in text.splitlines())


def extract_traceback(text: str) -> str:
    """The last traceback that ended the program, with those that it is chained to; without one, the last lines."""
    lines = [RANK.sub("", line.rstrip()) for line in text.splitlines()]
    headers = [n for n, line in enumerate(lines) if HEADER.match(line)]
    fatal = [n for n in headers if not _before(lines, n).startswith(NOT_FATAL)]
    if not fatal:
        return "\n".join(lines[-SHOWN_LINES:]).strip()
    start = fatal[-1]
    while start in fatal and _before(lines, start).startswith(CHAINED):
        earlier = [n for n in fatal if n < start]
        if not earlier:
            break
        start = earlier[-1]
    return "\n".join(lines[start : _end(lines, fatal[-1])]).strip()


def find_exception(text: str) -> str | None:
    """The line that names the exception by which ranks failed, of all that they and their launcher printed."""
    lines = [RANK.sub("", line.strip()) for line in text.splitlines()]
    found = [line for line in lines if EXCEPTION.match(line)]
    causes = [line for line in found if not is_consequence(line)]
    return next(reversed(causes or found), None)


def is_consequence(text: str) -> bool:
    """Whether the exception tells of another rank's end; below it the stack of that rank may stand."""
    told = [line for line in text.splitlines() if not line[:1].isspace()]
    return any(CONSEQUENCES.search(line) for line in told[-3:])


def _before(lines: list[str], n: int) -> str:
    """The last line before the nth that says something."""
    return next((line for line in reversed(lines[:n]) if line), "")


def _end(lines: list[str], header: int) -> int:
    """Where the traceback of this header ends: after its exception, whose text may have several lines."""
    for n in range(header + 1, len(lines)):
        if lines[n].startswith((*NOT_FATAL, "[W", "[E", "W1", "E1")):
            return n
    return len(lines)


# The exit code of a job whose first failing rank was lost: as if by SIGKILL.
LOST_RANK_CODE = 137


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended. `at_s` is when its failure began, by this host's clock; None for a code that nobody told.

    Such a rank was lost; `text` is the traceback that it printed right before, if any.
    """

    rank: int | None
    host: str
    code: int | None
    at_s: float
    round: int = 0
    was_terminated: bool = False
    text: str = ""

    def who(self, *, has_hosts: bool) -> str:
        """The rank, and its host where there are several."""
        name = "a rank" if self.rank is None else f"rank {self.rank}"
        return f"{name} on {self.host}" if has_hosts or self.rank is None else name

    @property
    def has_failed(self) -> bool:
        return self.code != 0


def first_failure(ends: Iterable[RankEnd]) -> RankEnd | None:
    """Of the last round, the failure that came first and is not another one's consequence, where there is such."""
    failures = [end for end in ends if end.has_failed and not end.was_terminated]
    last = max((end.round for end in failures), default=0)
    return min(
        (end for end in failures if end.round == last),
        key=lambda end: (is_consequence(end.text), end.code is None and not end.text, end.at_s),
        default=None,
    )


def has_stopped_on_notice(ends: Sequence[RankEnd]) -> bool:
    """Whether the job stopped in its last round because it was told to, and can go on: then any rank says so.

    A rank says so when all have saved; what became of the others in the meantime does not matter.
    """
    last = max((end.round for end in ends), default=0)
    return any(end.code == REQUEUE for end in ends if end.round == last)


def exit_code(launchers: Sequence[int], failure: RankEnd | None, *, may_restart: bool) -> int:
    """The job's: the first failing rank's, as a shell gives it, else that of the first launcher that failed.

    A lost rank told no code: a launcher that exited may know it, one that crashed on the way (mpirun of Open MPI 4
    does at times) does not. Where the launcher restarts ranks itself, and ended well, earlier rounds do not count.
    """
    failed = next((code for code in launchers if code), 0)
    if failure is None or (may_restart and not failed):
        return shell_code(failed)
    if failure.code is None:
        return failed if failed > 0 else LOST_RANK_CODE
    return shell_code(failure.code)


def shell_code(code: int) -> int:
    """128 + n for a signal, as shells do."""
    return 128 - code if code < 0 else code


def describe_failure(failure: RankEnd, *, has_hosts: bool) -> str:
    """The last words on a job: who failed, how, and its traceback."""
    who = failure.who(has_hosts=has_hosts)
    if failure.code is None and failure.text:
        return f"{who} failed first, and was ended before it could say by which code:\n{failure.text}"
    if failure.code is None:
        return f"{who} was lost: its host does not answer, or something killed it with all around it"
    how = f"exit code {failure.code}"
    if failure.code < 0:
        how = _signal(-failure.code)
    return f"{who} failed first ({how})" + (f":\n{failure.text}" if failure.text else "")


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = "; was its memory all used up? `dmesg` tells" if name == "SIGKILL" else ""
    return f"ended by {name}{hint}"
