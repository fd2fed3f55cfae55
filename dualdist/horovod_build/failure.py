"""What a failed command's output means, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence

# pip's retries and final errors where the index did not answer.
NETWORK = re.compile(
    r"NewConnectionError|Temporary failure in name resolution|Name or service not known|Connection refused|"
    r"Network is unreachable|ReadTimeout|ConnectTimeout|Max retries exceeded|ProxyError|SSLError|Retrying \(Retry"
)
NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version")
NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
NO_MEMORY = re.compile(r"Killed signal terminated program|internal compiler error: Killed|virtual memory exhausted")
# The first of these says what went wrong; what follows is mostly its consequence.
FIRST_ERROR = re.compile(
    r"\berror:|CMake Error|undefined reference|cannot find -l|^\s*\w*Error: |^ERROR: ", re.IGNORECASE
)
SHOWN_LINES = 6
SHOWN_WIDTH = 300
# The first that is found in the output is the cause: pip ends alike for a dead network and for a wrong name.
CAUSES = (
    (NO_SPACE, " for lack of disk space: make room, or name a folder on another disk in TMPDIR"),
    (NO_MEMORY, " for lack of memory: close other programs, or type: dualdist install-horovod --jobs 1"),
    (
        NETWORK,
        " because the package index did not answer: check the network and pip's settings (pip config list); "
        "without a network, put the sdist in a folder and name that in the variable PIP_FIND_LINKS",
    ),
    (
        NOT_FOUND,
        " because the package index has no such version: leave out --version, or check pip's settings "
        "(pip config list)",
    ),
)


def explain(lines: Sequence[str], what: str) -> str:
    """One sentence on why `what` failed, then the output's lines that show it."""
    text = "\n".join(lines)
    pattern, reason = next(((pattern, reason) for pattern, reason in CAUSES if pattern.search(text)), (FIRST_ERROR, ""))
    return "\n".join(
        (f"{what} failed{reason}", *(f"    {line.strip()[:SHOWN_WIDTH]}" for line in telling_lines(lines, pattern)))
    )


def telling_lines(lines: Sequence[str], pattern: re.Pattern[str] = FIRST_ERROR) -> list[str]:
    """The first line of the pattern and what follows it; the last lines where there is none."""
    first = next((i for i, line in enumerate(lines) if pattern.search(line)), None)
    chosen = lines[-SHOWN_LINES:] if first is None else lines[first : first + SHOWN_LINES]
    return [line for line in chosen if line.strip()]
