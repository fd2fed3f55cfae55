"""One thing to know: what was seen, why it matters, what to type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

EXIT_CODES = {"info": 0, "warning": 1, "error": 2}

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """An error will stop the job, a warning may. By its `name` a finding is looked up.

    `fix` is the command line that does what `do` says, where that is safe to run: it installs or builds something here.
    """

    name: str
    level: Level
    seen: str
    why: str
    do: str
    fix: tuple[str, ...] = ()


def exit_code(findings: Iterable[Finding]) -> int:
    """0 where nothing is wrong, 1 where something may fail, 2 where something will."""
    return max((EXIT_CODES[finding.level] for finding in findings), default=0)


def by_weight(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first; those of one level in the order in which they came."""
    return tuple(sorted(findings, key=lambda finding: -EXIT_CODES[finding.level]))
