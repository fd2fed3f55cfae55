"""The words of a job: times, amounts of memory and names, each read in one way, or refused by what was expected."""

from __future__ import annotations

import re

TIME = re.compile(r"(?:(?P<days>[0-9]{1,4})-)?(?P<hours>[0-9]{1,5}):(?P<minutes>[0-5]?[0-9]):(?P<seconds>[0-5]?[0-9])")
MEMORY = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,3})?)(?P<unit>[KMGT])(?:i?[bB])?")
MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
WORD = re.compile(r"[A-Za-z0-9._/][A-Za-z0-9._:/@+,-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def duration(text: str) -> int:
    """Seconds of a time. Two numbers alone mean different things to different schedulers."""
    found = TIME.fullmatch(text)
    parts = {name: int(value) for name, value in found.groupdict("0").items()} if found else {}
    seconds = ((parts["days"] * 24 + parts["hours"]) * 60 + parts["minutes"]) * 60 + parts["seconds"] if found else 0
    if seconds == 0:
        raise ValueError("[days-]hours:minutes:seconds above 0, as 2:00:00 or 1-12:00:00")
    return seconds


def mebibytes(text: str) -> int:
    """MiB of an amount of memory, in powers of 1024, rounded up."""
    found = MEMORY.fullmatch(text)
    amount = float(found["number"]) * MIB[found["unit"]] if found else 0.0
    if amount <= 0:
        raise ValueError("a number and a unit of K, M, G or T, as 64G")
    return -int(-amount // 1)


def job_name(text: str) -> str:
    """The name of a job."""
    return _whole(NAME, text, "letters, digits, dots, dashes and underscores, at most 63")


def word(text: str) -> str:
    """What a script may hold as it is, such as a queue."""
    return _whole(WORD, text, "one word of letters, digits and ._:/@+-")


def variable(text: str) -> str:
    """The name of an environment variable."""
    return _whole(VARIABLE, text, "a variable's name, of letters, digits and underscores")


def _whole(pattern: re.Pattern[str], text: str, expected: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(expected)
    return text
