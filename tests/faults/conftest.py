"""For tests of what goes wrong: a job that must end by itself, in time, with an error, and leave no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import pytest
from harness.jobs import Launch, Outcome


class Refuses(Protocol):
    def __call__(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> Outcome: ...


@pytest.fixture
def refuses(launch: Launch) -> Refuses:
    """Runs argv; a success, a time-out or a process left behind fails the test. Returns the outcome to be read."""

    def run(argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 60) -> Outcome:
        outcome = launch(argv, env=env, timeout_s=timeout_s, check=False)
        assert outcome.rc != 0, str(outcome)
        return outcome

    return run
