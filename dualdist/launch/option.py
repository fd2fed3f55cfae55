"""Options of `dualdist run`: fields of a dataclass, each an option of the command line and a key of a job file."""

import argparse
import math
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dualdist.errors import UsageError
from dualdist.utils.suggest import did_you_mean

# Returns the value of what was given: a text, a list (of an option that may be repeated), or True for a flag. Its
# ValueError says what was expected.
Reader = Callable[[Any], Any]
METADATA = "option"
TIME = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,5}):([0-5]?[0-9]):([0-5]?[0-9])")
MEMORY = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,3})?)(?P<unit>[KMGT])(?:i?[bB])?")
MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True)
class OptionSpec:
    """The form of an option on the command line and in job files.

    Attributes:
        read: returns its value.
        flags: what is typed; () for an option of job files alone, None for its name, with dashes.
        alias: another key of job files.
        is_run_only: job scripts ignore it.
    """

    read: Reader
    help: str
    metavar: str | None
    flags: tuple[str, ...] | None
    alias: str
    is_run_only: bool

    def flags_of(self, name: str) -> tuple[str, ...]:
        return (f"--{name.replace('_', '-')}",) if self.flags is None else self.flags

    def value(self, label: str, given: Any) -> Any:
        """Return the value; UsageError names the option by the label."""
        try:
            return self.read(given)
        except UsageError:
            raise
        except ValueError as error:
            shown = f"{label} {reprlib.repr(given)}" if isinstance(given, str) else label
            raise UsageError(f"{shown}: expected {error}") from error


def option(
    read: Reader,
    help: str,
    metavar: str | None = None,
    *,
    flags: tuple[str, ...] | None = None,
    default: Any = None,
    alias: str = "",
    is_run_only: bool = False,
) -> Any:
    """Return a field of a dataclass that is an option, with the value `default` where it is not given."""
    spec = OptionSpec(read, help, metavar, flags, alias, is_run_only)
    return field(default_factory=lambda: default, metadata={METADATA: spec})


def options_of(kind: type) -> dict[str, OptionSpec]:
    """Return the options among the fields of a dataclass, by name."""
    return {each.name: each.metadata[METADATA] for each in fields(kind) if METADATA in each.metadata}


def add_options(add: Callable[..., object], kind: type) -> None:
    """Add the options of a dataclass to a parser or a group of one."""
    for name, spec in options_of(kind).items():
        more: dict[str, Any] = {"action": "store_true"} if spec.read is flag else {"metavar": spec.metavar}
        if spec.read is lines:
            more["action"] = "append"
        if flags := spec.flags_of(name):
            add(*flags, dest=name, default=None, help=spec.help, **more)


def given_options(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the dataclass's options that were given on the command line."""
    found = {}
    for name, spec in options_of(kind).items():
        flags = spec.flags_of(name)
        given = getattr(args, name) if flags else None
        if given is not None:
            found[name] = spec.value(flags[0], given)
    return found


def text(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError("a text")
    return given


def flag(given: Any) -> bool:
    if given is True:  # the option of a command line
        return True
    if str(given).lower() not in ("true", "false"):
        raise ValueError("true or false")
    return str(given).lower() == "true"


def whole(least: int) -> Reader:
    """Return a reader of whole numbers of at least `least`."""

    def read(given: Any) -> int:
        if not isinstance(given, str) or not re.fullmatch("[0-9]{1,9}", given) or int(given) < least:
            raise ValueError(f"a whole number of {least} or more")
        return int(given)

    return read


def seconds(given: Any) -> float:
    try:
        number = float(given)
    except (ValueError, TypeError):
        number = 0.0
    if not 0 < number < math.inf:
        raise ValueError("seconds above 0")
    return number


def one_of(names: Callable[[], Sequence[str]]) -> Reader:
    """Return a reader of one of the names that are known when it is called."""

    def read(given: Any) -> str:
        known = names()
        if not isinstance(given, str) or given not in known:
            raise ValueError(f"one of {', '.join(known)}{did_you_mean(given, known)}")
        return given

    return read


def texts(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise ValueError("a list of texts")
    return tuple(given)


def lines(given: Any) -> tuple[str, ...]:
    """Return the lines of a text, or a list of lines."""
    return texts(given.splitlines() if isinstance(given, str) else given)


def matching(pattern: str, expected: str) -> Reader:
    """Return a reader of texts that match the pattern as a whole."""

    def read(given: Any) -> str:
        if not isinstance(given, str) or not re.fullmatch(pattern, given):
            raise ValueError(expected)
        return given

    return read


# What a script can contain without quotes.
word = matching("[A-Za-z0-9._/][A-Za-z0-9._:/@+,-]*", "one word of letters, digits and ._:/@+-")
script_name = matching("[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "letters, digits, dots, dashes and underscores, at most 63")


def parse_duration(given: Any) -> int:
    """Return the seconds of [days-]hours:minutes:seconds; schedulers read shorter forms differently."""
    found = TIME.fullmatch(given) if isinstance(given, str) else None
    days, hours, minutes, seconds = map(int, found.groups("0")) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ValueError("[days-]hours:minutes:seconds above 0, as 2:00:00 or 1-12:00:00")
    return total


def parse_mebibytes(given: Any) -> int:
    """Return an amount of memory such as "64G" in MiB, rounded up; units are powers of 1024."""
    found = MEMORY.fullmatch(given) if isinstance(given, str) else None
    amount = float(found["number"]) * MIB[found["unit"]] if found else 0.0
    if amount <= 0:
        raise ValueError("a number and a unit of K, M, G or T, as 64G")
    return -int(-amount // 1)


def as_written(parse: Reader) -> Reader:
    """Return a reader that keeps a text which `parse` accepts."""

    def read(given: Any) -> str:
        parse(given)
        return str(given)

    return read
