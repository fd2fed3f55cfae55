"""For tests of what goes wrong: a job that must end by itself, in time, with an error, and leave no process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import pytest
from faults.cells import Cell, trained
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


@pytest.fixture
def free_port() -> int:
    """On loopback; somebody else may take it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="session")
def unhurt(tmp_path_factory: pytest.TempPathFactory, base_env: dict[str, str]) -> Callable[[], str]:
    """The parameters of the run that nobody hurts, alike in every cell with two ranks."""
    found: list[str] = []

    def parameters() -> str:
        if not found:
            launch = Launch(base_env, tmp_path_factory.mktemp("unhurt"))
            found.extend(trained(launch, Cell("mpirun", "native", "shm")))
        return found[0]

    return parameters
