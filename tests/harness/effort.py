"""How often tests of faults try: seldom in CI, often with --long; and what all of them tried, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

COUNTS = pytest.StashKey[Counter[str]]()
TOLD = "faults tried"


class Effort:
    """One test's; the counts are those of the whole session."""

    def __init__(self, config: pytest.Config) -> None:
        self.is_long = bool(config.getoption("--long"))
        self._counts = config.stash.setdefault(COUNTS, Counter())

    def __call__(self, short: T, long: T) -> T:
        return long if self.is_long else short

    def count(self, what: str, times: int = 1) -> None:
        """So often was it tried, and all was as it must be."""
        self._counts[what] += times

    def fuzz(self, what: str, values: SearchStrategy[T], check: Callable[[T], object], times: int = 150) -> None:
        """check() holds for many values: in CI so many and always the same, in the long form 20 times as many."""

        @settings(
            max_examples=self(times, 20 * times),
            derandomize=not self.is_long,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(values)
        def holds(value: T) -> None:
            check(value)
            self.count(what)

        holds()


def tell(config: pytest.Config) -> None:
    """Where this process is a worker of pytest-xdist: its counts, to the one that asked for it."""
    if hasattr(config, "workeroutput"):
        config.workeroutput[TOLD] = dict(config.stash.get(COUNTS, Counter()))


def hear(config: pytest.Config, told: Mapping[str, Any]) -> None:
    """What a worker told; one that broke down told nothing."""
    config.stash.setdefault(COUNTS, Counter()).update(told.get(TOLD, {}))


def summary(config: pytest.Config) -> Iterator[str]:
    """A line for each thing that was counted."""
    counts = config.stash.get(COUNTS, Counter())
    if counts:
        yield f"{TOLD}:"
    yield from (f"  {what}: {times}" for what, times in sorted(counts.items()))
