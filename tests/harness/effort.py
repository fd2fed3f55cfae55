"""Number of tries of fault tests, few by default and many with --long, and their counts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

COUNTS = pytest.StashKey[Counter[str]]()
WORKER_COUNTS = "faults tried"


class Effort:
    """The effort of one test; counts are of the whole session."""

    def __init__(self, config: pytest.Config) -> None:
        self.is_long = bool(config.getoption("--long"))
        self._counts = config.stash.setdefault(COUNTS, Counter())

    def __call__(self, short: T, long: T) -> T:
        return long if self.is_long else short

    def require_long(self, *, unless: bool) -> None:
        """Skip this case without --long, unless it is in the short form, too."""
        if not (self.is_long or unless):
            pytest.skip("only with --long")

    def count(self, what: str, times: int = 1) -> None:
        """Count successful tries."""
        self._counts[what] += times

    def fuzz(self, what: str, values: SearchStrategy[T], check: Callable[[T], object], times: int = 150) -> None:
        """Check many values: by default `times`, always the same; with --long 20 times as many."""

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


def send_counts(config: pytest.Config) -> None:
    """Send a pytest-xdist worker's counts to its session."""
    if hasattr(config, "workeroutput"):
        config.workeroutput[WORKER_COUNTS] = dict(config.stash.get(COUNTS, Counter()))


def add_counts(config: pytest.Config, output: Mapping[str, Any]) -> None:
    """Add a worker's counts; a crashed worker has none."""
    config.stash.setdefault(COUNTS, Counter()).update(output.get(WORKER_COUNTS, {}))


def summary(config: pytest.Config) -> Iterator[str]:
    """Yield a line per count."""
    counts = config.stash.get(COUNTS, Counter())
    if counts:
        yield f"{WORKER_COUNTS}:"
    yield from (f"  {what}: {times}" for what, times in sorted(counts.items()))
