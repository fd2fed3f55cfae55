"""Which rank failed first, and what a job's end says: pure functions of what the ranks told."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualdist.launch.stderr_summary import is_consequence
from dualdist.utils.exit_codes import REQUEUE

# The exit code of a job whose first failing rank was lost: as if by SIGKILL.
LOST = 137


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
    was_told: bool = False
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
    failures = [end for end in ends if end.has_failed and not end.was_told]
    last = max((end.round for end in failures), default=0)
    return min(
        (end for end in failures if end.round == last),
        key=lambda end: (is_consequence(end.text), end.code is None and not end.text, end.at_s),
        default=None,
    )


def has_stopped(ends: Sequence[RankEnd]) -> bool:
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
        return failed if failed > 0 else LOST
    return shell_code(failure.code)


def shell_code(code: int) -> int:
    """128 + n for a signal, as shells do."""
    return 128 - code if code < 0 else code


def describe(failure: RankEnd, *, has_hosts: bool) -> str:
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
