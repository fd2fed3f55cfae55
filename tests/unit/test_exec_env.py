"""`dualdist exec`: ranks that meet (one thread each), a program's variables, the port, how programs start and end."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from doctor_facts import RECORDS
from harness.jobs import Launch, Outcome

from dualdist.environments import EXEC_VARIABLES, detect, find_unused
from dualdist.errors import DualdistError, RendezvousError, TopologyError, UsageError
from dualdist.launch.exec_env import check_torch_backend, prepare, program_variables, topology_variables
from dualdist.launch.nested_launcher import find_launcher
from dualdist.rendezvous.exec_rendezvous import ExecRendezvous, _find_endpoint, reserve_port
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import wait_until_listening

EXEC = (sys.executable, "-m", "dualdist", "exec")
ROWS = [
    pytest.param(row["env"], id=f"{name}-{index}")
    for name, rows in RECORDS.items()
    for index, row in enumerate(rows)
    if "error" not in row["expect"]
]


def met(environs: Sequence[dict[str, str]], timeout_s: float = 30) -> list[DualdistError | None]:
    """Let one thread per rank prepare its variables; return the error of each."""

    def attend(environ: dict[str, str]) -> DualdistError | None:
        try:
            prepare(environ, timeout_s)
        except DualdistError as error:
            return error
        return None

    with ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(attend, environs))


def ranks(folder: Path, size: int) -> list[dict[str, str]]:
    where = {"WORLD_SIZE": str(size), "DUALDIST_RENDEZVOUS": (folder / "meet").as_uri()}
    return [{"RANK": str(rank), **where} for rank in range(size)]


def test_all_ranks_get_one_address_and_their_own_numbers(tmp_path: Path) -> None:
    environs = ranks(tmp_path, 5)
    assert met(environs) == [None] * 5
    for rank, environ in enumerate(environs):
        expected = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 5, "LOCAL_WORLD_SIZE": 5, "LOCAL_SIZE": 5}
        expected |= {"GROUP_RANK": 0, "NODE_RANK": 0, "GROUP_WORLD_SIZE": 1}
        assert {name: environ[name] for name in expected} == {name: str(value) for name, value in expected.items()}
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert environ["MASTER_PORT"] == environs[0]["MASTER_PORT"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["localhost", "::1"])
def test_ranks_meet_at_the_address_that_they_were_given_and_keep_it(address: str) -> None:
    """No variable gives the local rank here, so that they must meet; then the program listens on the same port."""
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("127.0.0.1", 0)) as free:
        main = {"MASTER_ADDR": address, "MASTER_PORT": str(free.getsockname()[1])}
    environs = [{**main, "RANK": str(rank), "WORLD_SIZE": "3"} for rank in range(3)]
    assert met(environs) == [None] * 3
    assert [environ["LOCAL_RANK"] for environ in environs] == ["0", "1", "2"]
    assert all(environ[name] == value for environ in environs for name, value in main.items())
    socket.create_server(("", int(main["MASTER_PORT"]))).close()


def test_half_an_address_is_kept_and_completed(tmp_path: Path) -> None:
    environs = [{**environ, "MASTER_ADDR": "node7"} for environ in ranks(tmp_path, 2)]
    assert met(environs) == [None] * 2
    assert {environ["MASTER_ADDR"] for environ in environs} == {"node7"}


def test_a_missing_rank_is_named_on_every_other(tmp_path: Path) -> None:
    errors = met(ranks(tmp_path, 4)[:3], timeout_s=1)
    assert [type(error) for error in errors] == [RendezvousError] * 3
    assert "waited 1 s for all 4 ranks to start; missing: [3]" in str(errors[0])
    assert all("waited 1 s" in str(error) for error in errors)


def test_a_rank_that_is_there_twice_is_an_error_on_every_rank(tmp_path: Path) -> None:
    environs = ranks(tmp_path, 3)
    errors = met([environs[0], environs[1], dict(environs[1])], timeout_s=20)
    assert ["two processes are rank 1 of 3" in str(error) for error in errors] == [True] * 3


def test_ranks_of_another_job_are_an_error(tmp_path: Path) -> None:
    errors = met([ranks(tmp_path, 2)[0], ranks(tmp_path, 3)[1]])
    first, second = map(str, errors)
    assert first == second
    assert re.match(r"rank (1 of 3 met ranks of a job of 2|0 of 2 met ranks of a job of 3)", first), "whoever came last"
    assert {type(error) for error in errors} == {TopologyError}


def test_who_connects_and_is_silent_or_sends_garbage_delays_nobody(tmp_path: Path) -> None:
    """Ten of them would have taken 5 s each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environs = [
        {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        for rank in range(2)
    ]
    with ThreadPoolExecutor(1) as pool, ExitStack() as peers:
        first = pool.submit(met, [environs[0]], 30)
        wait_until_listening("127.0.0.1", port, Deadline(20), "rank 0")
        for message in (*[b""] * 10, b"[" * 100_000 + b"\n", b'{"report": "[]", "reached": ""}\n', b"\xff" * 100_000):
            peers.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(message)
        assert met([environs[1]], timeout_s=20) == first.result() == [None]


STRANGER = """
import os, socket, sys
os.setuid(65534)
held, silent = socket.socket(socket.AF_UNIX), []
held.bind(f"\\0{sys.argv[1]}-0")
held.listen(1)
print("holds it", flush=True)
while True:
    try:
        silent.append(socket.socket(socket.AF_UNIX))
        silent[-1].connect(f"\\0{sys.argv[1]}-1")
        silent[-1].sendall(b'{"report": "{}", "reached": "10.0.0.1"}\\n')
    except OSError:
        silent.pop().close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user too")
def test_another_user_neither_joins_nor_holds_up_the_ranks_of_a_host() -> None:
    size, variables = 3, ("RANK", "LOCAL_RANK")
    environs = [
        {f"OMPI_COMM_WORLD_{name}": str(rank) for name in variables}
        | {f"OMPI_COMM_WORLD_{name}": str(size) for name in ("SIZE", "LOCAL_SIZE")}
        | {"PMIX_NAMESPACE": f"test-{os.getpid()}"}
        for rank in range(size)
    ]
    name = _find_endpoint(detect(environs[0]), environs[0], Deadline(5))
    assert isinstance(name, str)
    argv = [sys.executable, "-c", STRANGER, name.removeprefix("\0")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"holds it\n"
        try:
            assert met(environs, timeout_s=30) == [None] * size
            assert {environ["MASTER_ADDR"] for environ in environs} == {"127.0.0.1"}
        finally:
            stranger.kill()


def test_two_processes_that_are_rank_0_of_a_host_are_an_error() -> None:
    environ = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    environ |= {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"twice-{os.getpid()}",
    }
    found = {str(error).partition(":")[0] for error in met([environ, dict(environ)], timeout_s=2)}
    assert "two processes are rank 0" in found


def test_variables_and_addresses_that_cannot_be_used_are_errors_at_once(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="WORLD_SIZE not set"):
        prepare({"RANK": "1"}, 30)
    with pytest.raises(UsageError, match="expected file:///folder/name"):
        prepare({"RANK": "0", "WORLD_SIZE": "2", "DUALDIST_RENDEZVOUS": "here"}, 30)
    (error,) = met([{**ranks(tmp_path, 2)[1], "DUALDIST_RENDEZVOUS": "tcp://a..b:29500"}], timeout_s=3)
    assert isinstance(error, RendezvousError)
    assert "'a..b':29500: not a host name" in str(error)


def test_without_a_launcher_there_is_one_rank_and_no_meeting() -> None:
    environ: dict[str, str] = {}
    prepare(environ, 1e-9)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert detect(environ).launcher == "none"


@pytest.mark.parametrize("environ", ROWS)
def test_dualdist_finds_its_launcher_as_without_exec(environ: Mapping[str, str]) -> None:
    """Also if the program changes the address; and `doctor` names what exec set."""
    topology = detect(environ)
    values = program_variables(environ, ExecRendezvous("10.0.0.1", 4321, topology, "eth7"))
    inside = {**environ, **values, EXEC_VARIABLES: json.dumps(values)}
    assert detect(inside) == topology
    assert detect({**inside, "MASTER_ADDR": "own"}).launcher == topology.launcher
    if "TORCHELASTIC_RUN_ID" not in environ:
        listed = {each.name: each.why for each in find_unused(inside, topology)}
        assert all("dualdist exec" in listed[name] for name in values)


def test_an_inner_torchrun_counts() -> None:
    outer: dict[str, str] = {}
    prepare(outer, 30)
    inner = {**topology_variables(detect({})), "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    inner |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert detect({**outer, **inner}).launcher == "torchrun"
    assert detect({**outer, **inner}).rank == 1


@pytest.mark.parametrize("text", ["", "x", "3", "[]", "[[[], 1]]", "{}", '{"RANK": 3}'])
def test_a_damaged_mark_is_ignored(text: str) -> None:
    assert detect({EXEC_VARIABLES: text}).launcher == "none"


def test_the_port_is_kept_for_the_program() -> None:
    port = reserve_port(0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    assert reserve_port(port) != port
    with socket.create_server(("", port)):
        pass


def run(launch: Launch, *words: str, **env: str) -> Outcome:
    return launch([*EXEC, *words], env=env, check=False)


SHOW = "import os, sys\nprint(__name__, sys.argv, sys.path[0], os.environ['WORLD_SIZE'], 'torch' in sys.modules)\n"


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (("pkg/show.py", "--lr", "0.1", "-m", "--help"), ["pkg/show.py", "--lr", "0.1", "-m", "--help"]),
        (("--timeout", "5", "-m", "pkg.show", "--verbose"), ["pkg.show", "--verbose"]),
    ],
)
def test_a_program_is_main_with_its_own_arguments_and_no_torch(
    launch: Launch, words: Sequence[str], argv: list[str]
) -> None:
    script = launch.write("pkg/show.py", SHOW)
    is_module = "pkg.show" in argv
    seen = [script, *argv[1:]] if is_module else argv
    done = run(launch, *words)
    assert done.stdout == f"__main__ {seen} {launch.directory if is_module else launch.directory / 'pkg'} 1 False\n", (
        done.stderr
    )
    assert done.stderr == ""


def test_any_program_takes_the_process_over(launch: Launch) -> None:
    done = run(launch, "--", "sh", "-c", 'echo "$RANK of $WORLD_SIZE, $1"; kill -9 $$', "sh", "-m")
    assert (done.stdout, done.rc) == ("0 of 1, -m\n", -9)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "no program: expected"),
        (("--",), 2, "no program: expected"),
        (("nowhere.py",), 2, "there is no file"),
        (("-m", "nowhere"), 2, "there is no module nowhere"),
        (("--", "./nowhere"), 127, "No such file"),
        (("--timeout", "-1", "x.py"), 2, "expected seconds above 0"),
    ],
)
def test_what_cannot_run_is_named_in_one_line(launch: Launch, words: Sequence[str], code: int, message: str) -> None:
    done = run(launch, *words)
    assert (done.rc, done.stderr.count("\n"), done.stdout) == (code, 1, "")
    assert message in done.stderr


def test_an_import_that_a_package_lacks_is_pythons_own_error(launch: Launch) -> None:
    launch.write("pkg/__init__.py", "import absent_library\n")
    launch.write("pkg/show.py", SHOW)
    done, plain = run(launch, "-m", "pkg.show"), launch([sys.executable, "-m", "pkg.show"], check=False)
    assert (done.rc, done.stderr.splitlines()[-1]) == (plain.rc, plain.stderr.splitlines()[-1])
    assert done.stderr.startswith("Traceback (most recent call last):\n  File")
    assert "dualdist" not in done.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("-- torchrun --nproc-per-node=2 train.py", "torchrun"),
        ("-- env A=1 /opt/bin/torchrun train.py", "torchrun"),
        ("-- python -u -m torch.distributed.run train.py", "torch.distributed.run"),
        ("/opt/bin/torchrun train.py", "torchrun"),
        ("-- fabric run train.py", "fabric run"),
        ("-- accelerate launch train.py", "accelerate launch"),
        ("-- bash -c cd\tx;torchrun\ttrain.py", "torchrun"),
        ("-- bash -lc A=1\tpython\t-m\ttorch.distributed.run\ttrain.py", "torch.distributed.run"),
        ("-- bash -c cd\t/scratch/deepspeed\t&&\tpython\ttrain.py\t--strategy\tdeepspeed", ""),
        ("-- bash sync torchrun", ""),
        ("-- accelerate env", ""),
        ("-- python train.py torchrun", ""),
        ("-- ./run.sh torchrun", ""),
        ("train.py --launcher torchrun", ""),
    ],
)
def test_a_launcher_is_found_among_programs(words: str, found: str) -> None:
    assert find_launcher([word.replace("\t", " ") for word in words.split(" ")]) == found


def test_a_launcher_inside_exec_is_refused_on_several_ranks(launch: Launch) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run(launch, "--", "torchrun", "train.py", **env)
    assert done.rc == 2
    assert "torchrun starts ranks itself, and this is rank 0 of 2" in done.stderr
    assert run(launch, "-m", "torch.distributed.run", "train.py", **env).rc == 2
    assert run(launch, "--", "echo", "torchrun").rc == 0


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"DUALDIST_TORCH_BACKEND": "native"},
            "type --torch-backend dualdist",
        ),
        ({"DUALDIST_TORCH_BACKEND": "gloo", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "unset it"),
    ],
)
def test_a_torch_backend_that_cannot_be_put_in_place_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_torch_backend(env)


def test_threads_share_the_cores_of_a_host_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualdist.launch.exec_env.cores_per_rank", lambda ranks: 64 // ranks)
    given = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"} | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    place = ExecRendezvous("localhost", 1, detect(given))
    assert program_variables(given, place)["OMP_NUM_THREADS"] == "16"
    assert "OMP_NUM_THREADS" not in program_variables({**given, "OMP_NUM_THREADS": "3"}, place)
    assert "OMP_NUM_THREADS" not in program_variables({}, ExecRendezvous("localhost", 1, detect({})))


def test_verbose_says_what_was_found_and_set(launch: Launch) -> None:
    done = run(launch, "-v", launch.write("x.py", ""), MASTER_ADDR="node7")
    assert done.stderr.startswith("dualdist exec: rank 0 of 1, from no launcher's variables; set RANK=0 WORLD_SIZE=1")
    assert "MASTER_ADDR" not in done.stderr
