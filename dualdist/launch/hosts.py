"""The hosts of a job, from `a:2,b:2` or from a host file of Open MPI's, MPICH's, Horovod's or a scheduler's kind."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dualdist.errors import UsageError
from dualdist.launch.job import Host

# "name", "name:2" and "name slots=2", the last with other settings of Open MPI's around.
# A name goes to ssh and to launchers that call a shell: it has nothing that means something to one.
WORD = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.@-]*)(?::(?P<slots>[0-9]{1,9}))?")
LINE = re.compile(WORD.pattern + r"(?:\s+(?P<rest>.*))?")
SLOTS = re.compile(r"(?:^|\s)slots\s*=\s*(?P<slots>[0-9]{1,9})(?:\s|$)")


def parse(text: str) -> tuple[Host, ...]:
    """The hosts of `a:2,b:2`; a host without a number has one slot."""
    found = []
    for word in text.split(","):
        match = WORD.fullmatch(word.strip())
        if match is None:
            raise UsageError(f"host {word.strip()!r}: expected a name and its slots, as a:2")
        found.append(_host(match["name"], match["slots"]))
    return merged(found)


def read(path: Path) -> tuple[Host, ...]:
    """The hosts of a file: "a slots=2" or "a:2" on a line, or "a" as often as it has slots; # begins a comment."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"host file {path}: cannot read it: {why}") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = LINE.fullmatch(words)
        slots = SLOTS.search(match["rest"] or "") if match else None
        if match is None or (match["rest"] and slots is None and "=" not in match["rest"]):
            raise UsageError(f"{path}:{number}: expected a host and its slots, as in `a slots=2`, not {words!r}")
        found.append(_host(match["name"], slots["slots"] if slots else match["slots"], f"{path}:{number}: "))
    if not found:
        raise UsageError(f"host file {path}: it names no host; expected lines such as `a slots=2`")
    return merged(found)


def merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Every host once, in the order in which they come first, with all its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def _host(name: str, slots: str | None, where: str = "") -> Host:
    if slots is not None and int(slots) < 1:
        raise UsageError(f"{where}host {name!r} has {slots} slots: expected 1 or more")
    return Host(name, int(slots or 1))
