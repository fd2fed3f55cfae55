"""What of a rank's stderr says why it failed."""

from __future__ import annotations

import re

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


def has_header(text: str) -> bool:
    """Whether a traceback begins in these lines."""
    return any(HEADER.match(line) for line in text.splitlines())


def reason(text: str) -> str:
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


def exception_in(text: str) -> str | None:
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
