"""For tests of what goes wrong: a job that must end by itself, in time, with an error, and leave no process."""

import socket
from collections.abc import Callable

import pytest
from faults.starts import Cell, parameters_of
from harness.jobs import Launch


def error_of(call: Callable[[], object], *kinds: type[Exception]) -> str:
    """Return the text of an error of these kinds, "" if there is none."""
    try:
        call()
    except kinds as error:
        return str(error) or "no text"
    return ""


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
