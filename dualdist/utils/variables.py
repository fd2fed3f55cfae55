"""Environment variables: those of dualdist, a warning of those that only look like one, and settings for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping

from dualdist.utils.suggest import did_you_mean

PREFIX = "DUALDIST_"
# How `dualdist run` shows what a rank writes: "tagged" with its rank, or on a "terminal".
OUTPUT = "DUALDIST_OUTPUT"
NAMES = tuple(
    PREFIX + name
    for name in (
        *("ADDRESS", "BACKEND", "DEBUG", "EXEC", "JOB", "LAUNCHER", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK", "NOTICE"),
        *("NO_EXTENSION", "NUM_NODES", "OUTPUT", "PORT", "RANK", "RECORD", "RECORD_STEPS", "RECORD_WARMUP"),
        *(
            "REDUCTION",
            "RENDEZVOUS",
            "RENDEZVOUS_DIR",
            "RUN",
            "RUN_FRAMES",
            "RUN_RENDEZVOUS",
            "RUN_RESTART",
            "SIZE",
            "SLOW_RANKS",
            "TIMELINE",
        ),
        "TRANSPORT",
    )
)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that is set and has no meaning for dualdist."""
    return [
        f"{name} is set, but no variable of dualdist{did_you_mean(name, NAMES)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in NAMES
    ]


@contextlib.contextmanager
def temporary_variables(environ: MutableMapping[str, str], settings: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset) for the block, and restore them afterwards: for foreign code that reads them once."""
    before = {name: environ.get(name) for name in settings}
    try:
        _update(environ, settings)
        yield
    finally:
        _update(environ, before)


def _update(environ: MutableMapping[str, str], settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
