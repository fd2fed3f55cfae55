"""What a person gets wrong: every rank ends in time, with one of our errors that names what was seen."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from faults.conftest import Refuses
from faults.ranks import LIMIT_S, LOOPBACK, RANK, assert_says, environment, together
from harness.jobs import Launch
from harness.mpi import MPICH


@pytest.fixture(params=["silent", "speaks HTTP"])
def taken_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port on which another program listens."""
    server = socket.create_server((LOOPBACK, 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    if request.param == "speaks HTTP":
        thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    if request.param == "speaks HTTP":
        thread.join()


def test_a_rank_that_is_no_rank_is_named(refuses: Refuses) -> None:
    outcome = refuses([*RANK, "native"], env=environment(2, 2, 29500))
    assert_says(outcome, "TopologyError", "RANK=2", "WORLD_SIZE=2")


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_missing_is_named(refuses: Refuses, missing: str) -> None:
    env = environment(1, 2, 29500)
    del env[missing]
    assert_says(refuses([*RANK, "native"], env=env), "TopologyError", missing)


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_an_address_at_which_nobody_listens_is_named(refuses: Refuses, free_port: int, backend: str) -> None:
    outcome = refuses([*RANK, backend], env=environment(1, 2, free_port), timeout_s=LIMIT_S)
    assert_says(outcome, "RendezvousError", f"{LOOPBACK}:{free_port}", "nothing listens", "6 s")


def test_a_name_that_does_not_resolve_is_named(refuses: Refuses, free_port: int) -> None:
    env = environment(1, 2, free_port, address="no-such-host.invalid")
    assert_says(refuses([*RANK, "native"], env=env), "RendezvousError", "no-such-host.invalid", "resolve")


def test_ranks_with_different_addresses_miss_each_other_by_name(launch: Launch, free_port: int) -> None:
    wrong = environment(1, 2, free_port, address="127.0.0.2") | {"MASTER_PORT": "9"}
    first, second = together(launch, [*RANK, "native"], [environment(0, 2, free_port), wrong])
    assert_says(first, "RendezvousError", "missing: [1]")
    assert_says(second, "RendezvousError", "127.0.0.2:9")


def test_a_port_in_use_is_named_on_every_rank(launch: Launch, taken_port: int) -> None:
    first, second = together(launch, [*RANK, "native"], [environment(rank, 2, taken_port) for rank in (0, 1)])
    assert_says(first, "RendezvousError", f"cannot listen on port {taken_port}", "MASTER_PORT")
    assert_says(second, "RendezvousError", f"{LOOPBACK}:{taken_port}", "not the store of this job")


@pytest.mark.smoke
def test_two_processes_of_one_rank_are_an_error_on_every_rank(launch: Launch, free_port: int) -> None:
    outcomes = together(launch, [*RANK, "native"], [environment(rank, 3, free_port) for rank in (0, 1, 1)])
    for outcome in outcomes:
        assert_says(outcome, "TopologyError", "two processes are rank 1 of 3")


def test_ranks_that_disagree_on_the_size_are_an_error(launch: Launch, free_port: int) -> None:
    outcomes = together(launch, [*RANK, "native"], [environment(0, 2, free_port), environment(1, 3, free_port)])
    assert_says(outcomes[0], "TopologyError", "rank 1 of 3")


def test_two_local_ranks_of_one_number_are_an_error(launch: Launch, free_port: int) -> None:
    environments = [environment(rank, 2, free_port) | {"LOCAL_RANK": "0"} for rank in (0, 1)]
    for outcome in together(launch, [*RANK, "native"], environments):
        assert_says(outcome, "TopologyError", "[0, 0]", "LOCAL_RANK")


@pytest.mark.smoke
def test_ranks_that_chose_different_backends_are_an_error(launch: Launch, free_port: int) -> None:
    environments = [
        environment(rank, 2, free_port) | {"DUALDIST_BACKEND": name} for rank, name in ((0, "native"), (1, "horovod"))
    ]
    for outcome in together(launch, [*RANK, ""], environments):
        assert_says(outcome, "TopologyError", "'native'", "'horovod'", "--backend")


@pytest.mark.parametrize(
    ("case", "error"), [("twice", "AlreadyInitializedError"), ("after", "NotInitializedError: dualdist was used after")]
)
def test_calls_out_of_order_are_refused(refuses: Refuses, case: str, error: str) -> None:
    assert_says(refuses([*RANK, "", case]), error)


def test_a_call_before_init_is_refused(refuses: Refuses) -> None:
    outcome = refuses([sys.executable, "-c", "import dualdist as dd; dd.rank()"])
    assert_says(outcome, "NotInitializedError", "before dd.init()")


@pytest.mark.smoke
def test_an_unknown_backend_is_refused_with_the_valid_ones(refuses: Refuses) -> None:
    assert_says(refuses([*RANK, "nccl"]), "UsageError", "'nccl'", "expected one of auto, native, horovod, mpi")


def test_horovod_that_is_missing_is_said_with_what_to_type(refuses: Refuses) -> None:
    code = "import sys; sys.modules['horovod'] = None; import dualdist as dd; dd.init('horovod')"
    outcome = refuses([sys.executable, "-c", code])
    assert_says(outcome, "BackendUnavailableError", "not installed", "dualdist install-horovod")


def test_horovod_for_another_torch_is_said_with_what_to_type(refuses: Refuses, launch: Launch) -> None:
    package = launch.directory / "horovod"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "metadata.json").write_text(json.dumps({"pytorch": "1.13.1"}))
    path = f"{launch.directory}:{launch.env['PYTHONPATH']}"
    outcome = refuses([*RANK, "horovod"], env={"PYTHONPATH": path})
    assert_says(outcome, "BackendUnavailableError", "1.13.1", "dualdist install-horovod --force")


def test_horovod_over_mpi_under_torchrun_is_refused_with_a_reason(refuses: Refuses) -> None:
    argv = ["torchrun", "--standalone", "--nproc-per-node=2", *RANK[1:], "horovod"]
    outcome = refuses(argv, env={"DUALDIST_TRANSPORT": "mpi"})
    assert_says(outcome, "UnsupportedError", "torchrun", "mpirun", "DUALDIST_TRANSPORT=gloo")


@pytest.mark.parametrize(
    "argv", [["torchrun", "--standalone", "--nproc-per-node=2", *RANK[1:]], ["horovodrun", "--gloo", "-np", "2", *RANK]]
)
def test_the_backend_mpi_is_refused_where_nothing_started_mpi(refuses: Refuses, argv: list[str]) -> None:
    outcome = refuses([*argv, "mpi"])
    assert "UnsupportedError" in outcome.stdout + outcome.stderr, str(outcome)
    assert f"MPI was not started by {argv[0]}: use mpirun" in outcome.stdout + outcome.stderr, str(outcome)


@pytest.mark.parametrize(
    ("backend", "asked"), [("native", "mpi"), ("horovod", "nccl"), ("horovod", "shm"), ("mpi", "gloo")]
)
def test_a_transport_that_is_not_to_be_had_is_refused(refuses: Refuses, backend: str, asked: str) -> None:
    outcome = refuses([*RANK, backend], env={"DUALDIST_TRANSPORT": asked})
    assert_says(outcome, "UnsupportedError", f"DUALDIST_TRANSPORT={asked}", f"the backend {backend} runs over")


@pytest.mark.parametrize("backend", ["native", "mpi"])
def test_an_mpi4py_of_another_mpi_is_said_with_both_numbers(refuses: Refuses, mpich: MPICH, backend: str) -> None:
    outcome = refuses([*mpich.run(2), *RANK, backend], timeout_s=LIMIT_S)
    assert_says(outcome, "TopologyError", "of 2", "rank 0 of 1", "mpi4py")
