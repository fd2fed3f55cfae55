"""Mistakes of users: every rank ends in time, with one of our errors that names what was seen."""

import json
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
from faults.starts import LOOPBACK, RANK, assert_error, fail_together, rank_argv, rank_env, refused
from harness.jobs import Launch
from harness.mpi import MPICH

ABSENT = "no-such-host.invalid"
NATIVE = [*RANK, "native"]


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


@pytest.mark.parametrize(
    ("backend", "address", "words"),
    [
        ("horovod", LOOPBACK, ("nothing listens", "6 s")),
        ("native", ABSENT, ("resolve",)),
    ],
)
def test_an_address_that_cannot_be_reached_is_named(
    launch: Launch, free_port: int, backend: str, address: str, words: tuple[str, ...]
) -> None:
    outcome = refused(launch, [*RANK, backend], env=rank_env(1, 2, free_port, address))
    where = address if address == ABSENT else f"{address}:{free_port}"
    assert_error(outcome, "RendezvousError", where, *words)


def test_a_port_in_use_is_named_on_every_rank(launch: Launch, taken_port: int) -> None:
    first, second = fail_together(launch, NATIVE, [rank_env(rank, 2, taken_port) for rank in (0, 1)])
    assert_error(first, "RendezvousError", f"cannot listen on port {taken_port}", "MASTER_PORT")
    assert_error(second, "RendezvousError", f"{LOOPBACK}:{taken_port}", "not the store of this job")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("ranks", "backends", "words"),
    [
        ((0, 1, 1), ("native", "native", "native"), ("two processes are rank 1 of 3",)),
        ((0, 1), ("native", "horovod"), ("'native'", "'horovod'", "--backend")),
    ],
)
def test_ranks_that_contradict_each_other_are_an_error_on_every_rank(
    launch: Launch, free_port: int, ranks: Sequence[int], backends: Sequence[str], words: tuple[str, ...]
) -> None:
    environments = [
        {**rank_env(rank, len(ranks), free_port), "DUALDIST_BACKEND": backend}
        for rank, backend in zip(ranks, backends, strict=True)
    ]
    for outcome in fail_together(launch, [*RANK, ""], environments):
        assert_error(outcome, "TopologyError", *words)


NO_HOROVOD = "import sys; sys.modules['horovod'] = None; import dualdist as dd; dd.init('horovod')"
INSTALL = ("not installed", "dualdist install-horovod")
WITHOUT_MPI = ("torchrun", "mpirun", "DUALDIST_TRANSPORT=gloo")
# The command, its DUALDIST_TRANSPORT, and what the error has.
REFUSED: dict[str, tuple[list[str], str, tuple[str, ...]]] = {
    "unknown backend": ([*RANK, "tcp"], "", ("UsageError", "'tcp'", "expected one of auto, native, horovod, mpi")),
    "no Horovod": ([sys.executable, "-c", NO_HOROVOD], "", ("BackendUnavailableError", *INSTALL)),
    "Horovod over MPI": (rank_argv("torchrun", "horovod"), "mpi", ("UnsupportedError", *WITHOUT_MPI)),
    **{
        f"{backend} over {transport}": (
            [*RANK, backend],
            transport,
            ("UnsupportedError", f"DUALDIST_TRANSPORT={transport}", f"the backend {backend} runs over"),
        )
        for backend, transport in (("native", "mpi"), ("horovod", "nccl"), ("horovod", "shm"), ("mpi", "gloo"))
    },
}


@pytest.mark.smoke("unknown backend")
@pytest.mark.parametrize("case", REFUSED)
def test_a_backend_that_cannot_run_here_is_refused_with_a_reason(launch: Launch, case: str) -> None:
    argv, transport, words = REFUSED[case]
    assert_error(refused(launch, argv, env={"DUALDIST_TRANSPORT": transport} if transport else {}), *words)


def test_horovod_for_another_torch_is_refused_with_the_command_that_installs_it(launch: Launch) -> None:
    package = launch.directory / "horovod"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "metadata.json").write_text(json.dumps({"pytorch": "1.13.1"}))
    path = f"{launch.directory}:{launch.env['PYTHONPATH']}"
    outcome = refused(launch, [*RANK, "horovod"], env={"PYTHONPATH": path})
    assert_error(outcome, "BackendUnavailableError", "1.13.1", "dualdist install-horovod --force")


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun"])
def test_the_backend_mpi_is_refused_under_a_launcher_without_mpi(launch: Launch, launcher: str) -> None:
    outcome = refused(launch, rank_argv(launcher, "mpi"))
    assert "UnsupportedError" in outcome.stdout + outcome.stderr, str(outcome)
    assert f"MPI was not started by {launcher}: use mpirun" in outcome.stdout + outcome.stderr, str(outcome)


@pytest.mark.parametrize("backend", ["native", "mpi"])
def test_an_mpi4py_of_another_mpi_is_refused_with_both_sizes(launch: Launch, mpich: MPICH, backend: str) -> None:
    outcome = refused(launch, [*mpich.run(2), *RANK, backend])
    assert_error(outcome, "TopologyError", "of 2", "rank 0 of 1", "mpi4py")
