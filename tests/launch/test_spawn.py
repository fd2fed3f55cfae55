"""dd.spawn and dd.run, and programs that initialize torch.distributed themselves."""

import sys
import time

import pytest
from harness.jobs import Launch
from launch import programs
from launch.running import TORCHRUN, collected, side_by_side

import dualdist as dd
from dualdist.errors import LaunchError, UsageError


@pytest.mark.parametrize("backend", [None, "native", "horovod"])
def test_results_come_back_in_rank_order(backend: str | None) -> None:
    found = dd.spawn(programs.identity, 3, ("extra",), backend=backend)
    assert found == [(rank, 3, "spawn", backend or "native", "extra") for rank in range(3)]


@pytest.mark.smoke("raises-rank 1's own mistake")
@pytest.mark.parametrize(("how", "words"), [("raises", "rank 1's own mistake"), ("exits", "rank 1 .*exit code 7")])
def test_a_failing_rank_ends_the_others_and_is_named(how: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match=words):
        dd.spawn(programs.one_fails, 2, (how,))
    assert time.monotonic() - began < 30


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(LaunchError, match="pickle"):
        dd.spawn(programs.cannot_be_sent_back, 1)


@pytest.mark.smoke
def test_no_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="nprocs=0"):
        dd.spawn(programs.identity, 0, ("",))


def test_an_existing_group_is_used_and_left_alone(launch: Launch) -> None:
    """There is no launcher: the number of ranks is the group's."""
    store = (launch.directory / "store").as_uri()
    commands = [[sys.executable, programs.__file__, str(rank), "2", store] for rank in range(2)]
    reports = collected(launch, 2, lambda env: side_by_side(launch, [(argv, env) for argv in commands]))
    same = {"size": 2, "local_size": 2, "backend": "native", "transport": "shm", "sum": 3.0, "still": 2.0}
    assert reports == [{"rank": rank, "local_rank": rank, **same} for rank in range(2)]


def test_a_group_that_contradicts_the_launcher_is_an_error(launch: Launch) -> None:
    store = (launch.directory / "store").as_uri()
    outcome = launch([*TORCHRUN, programs.__file__, "0", "1", store], check=False)
    assert outcome.rc != 0
    assert "rank 0 of 1" in outcome.stderr, str(outcome)
    assert "TopologyError" in outcome.stderr, str(outcome)


NOTEBOOK = """
import dualdist as dd
class Mistake(Exception):
    pass
scale = 10
def work(first, last=0):
    dd.init()
    if first < 0 and dd.rank() == 1:
        raise Mistake("of rank", dd.rank())
    total = dd.allreduce(__import__("torch").tensor(scale * (first + last)), "sum").item()
    return dd.rank(), dd.backend(), total
print(dd.run(work, (1,), {"last": 2}, np=2, backend="native"))
print(dd.run(lambda: __import__("os").environ["WORD"], np=1, env={"WORD": "said"}))
try:
    dd.run(work, (-1,), np=2)
except Mistake as error:
    print(error.args, "rank 1 failed" in str(error.__cause__), "in work" in str(error.__cause__))
"""
PRINTED = ["[(0, 'native', 60), (1, 'native', 60)]", "['said']", "('of rank', 1) True True"]


@pytest.mark.parametrize("start", [(sys.executable, "-c"), (sys.executable, "-m", "IPython", "--no-banner", "-c")])
def test_functions_of_a_program_run_on_ranks_and_their_exceptions_come_back(launch: Launch, start: list[str]) -> None:
    assert launch([*start, NOTEBOOK], env={"IPYTHONDIR": str(launch.directory)}).stdout.splitlines() == PRINTED


def test_functions_of_a_notebook_cell_run_on_ranks(launch: Launch) -> None:
    """In a Jupyter kernel, whose main module is no file."""
    program = (
        "import nbclient, nbformat, sys\n"
        "cell = nbformat.v4.new_code_cell(sys.argv[1])\n"
        "notebook = nbformat.v4.new_notebook(cells=[cell])\n"
        "nbclient.NotebookClient(notebook, timeout=100, kernel_name='python3').execute()\n"
        "print(''.join(output['text'] for output in cell.outputs if output.get('name') == 'stdout'), end='')\n"
    )
    outcome = launch([sys.executable, "-c", program, NOTEBOOK], env={"IPYTHONDIR": str(launch.directory)})
    assert outcome.stdout.splitlines() == PRINTED


def test_an_exception_that_cannot_be_pickled_is_reported_by_its_traceback() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 failed:\n(?s:.*)Unsendable: 1, 2"):
        dd.run(programs.raises_what_cannot_be_sent, np=1)


def test_the_failure_that_others_follow_from_is_raised() -> None:
    with pytest.raises(LaunchError, match="rank 1 ended without a result"):
        dd.run(programs.one_dies_while_others_wait, np=3)
