"""For tests of what goes wrong: a job that must end by itself, in time, with an error, and leave no process."""

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import pytest
from faults.starts import LIMIT_S, Cell, parameters_of
from harness.jobs import Launch, Outcome


def error_of(call: Callable[[], object], *kinds: type[Exception]) -> str:
    """Return the text of an error of these kinds, "" if there is none."""
    try:
        call()
    except kinds as error:
        return str(error) or "no text"
    return ""


class Refuses(Protocol):
    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Outcome: ...


@pytest.fixture
def refuses(launch: Launch) -> Refuses:
    """Run argv and return the outcome; a success, a timeout or a process left behind fails the test."""

    def run(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Outcome:
        outcome = launch(argv, env=env, timeout_s=LIMIT_S, check=False)
        assert outcome.rc != 0, str(outcome)
        return outcome

    return run


@pytest.fixture
def free_port() -> int:
    """A port on loopback; another program may take it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="session")
def unhurt(tmp_path_factory: pytest.TempPathFactory, base_env: dict[str, str]) -> Callable[[], str]:
    """Return the parameters of a run to which nothing happens, which are the same in every cell with two ranks."""
    found: list[str] = []

    def parameters() -> str:
        if not found:
            launch = Launch(base_env, tmp_path_factory.mktemp("unhurt"))
            found.extend(parameters_of(launch, Cell("mpirun", "native", "shm")))
        return found[0]

    return parameters
