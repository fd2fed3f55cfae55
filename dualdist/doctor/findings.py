"""One thing to know: what was seen, why it matters, what to type."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
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


STDERR = 2
Ask = Callable[[str], bool]  # whether the user says yes
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Fix:
    """One command line, and the findings that it is for."""

    argv: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def line(self) -> str:
        return shlex.join(self.argv)


def fixes(findings: Sequence[Finding]) -> list[Fix]:
    """Each command once, for all findings that ask for it, in the order of the worst of them."""
    by_argv: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        if finding.fix:
            by_argv.setdefault(finding.fix, []).append(finding)
    return [Fix(argv, tuple(found)) for argv, found in by_argv.items()]


def apply(todo: Sequence[Fix], environ: Mapping[str, str], ask: Ask, tell: Tell) -> int:
    """Run those to which the user says yes; how many ended well. What they print goes to standard error."""
    done = 0
    for fix in todo:
        for finding in fix.findings:
            tell(f"{finding.level}: {finding.seen}")
        if not ask(f"run {fix.line} ?"):
            tell("  left as it is")
            continue
        code = subprocess.run(fix.argv, env=dict(environ), stdout=STDERR, check=False).returncode
        done += code == 0
        tell(f"  {'done' if code == 0 else f'it failed (exit code {code})'}: {fix.line}")
    return done
