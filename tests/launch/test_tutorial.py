"""The tutorial: each step's diff applies to the program of the step before, and the lines below it run."""

import re
import shlex
from collections.abc import Mapping

import pytest
from harness.hosts import Hosts
from harness.jobs import Launch
from harness.pages import FENCED, PAGES
from harness.slurm import Slurm
from launch.running import AS_ROOT, RUN

SECTIONS = re.split(r"^## ", (PAGES / "tutorial.md").read_text(), flags=re.MULTILINE)[1:7]
STEPS = [FENCED.findall(text) for text in SECTIONS]
ELSEWHERE = r"srun |dualdist run -H "  # below, in tests of their own
LOSS = r"^epoch (\d): loss (\d+\.\d+)"
Losses = list[tuple[str, str]]


def find(step: int, language: str) -> list[str]:
    """Return the blocks of a step in a language."""
    return [body for named, body in STEPS[step - 1] if named == language]


def apply(diff: str, text: str) -> str:
    """Return the text after the diff. The lines that a hunk expects stand there once."""
    for hunk in filter(None, diff.split("@@\n")):
        before, after = (
            "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in (" ", sign)) for sign in "-+"
        )
        assert text.count(before) == 1, f"{before}\nis there {text.count(before)} times in\n{text}"
        text = text.replace(before, after)
    return text


def program(step: int) -> str:
    """Return the program of a step."""
    (text,) = find(1, "python")
    for each in range(2, step + 1):
        (diff,) = find(each, "diff")
        text = apply(diff, text)
    return text


def run(launch: Launch, step: int, env: Mapping[str, str] = AS_ROOT) -> dict[str, Losses]:
    """Return the epochs and losses that each line of a step prints."""
    launch.write("train.py", program(step))
    lines = [line for body in find(step, "bash") for line in body.splitlines() if not re.match(ELSEWHERE, line)]
    return {line: losses(launch(shlex.split(line), env=env).stdout) for line in lines}


def losses(text: str) -> Losses:
    return re.findall(LOSS, text, re.MULTILINE)


@pytest.fixture(scope="module")
def two_ranks(base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """What the first two ranks print."""
    (found,) = run(Launch(base_env, tmp_path_factory.mktemp("two-ranks")), 2).values()
    return found


def test_two_ranks_print_what_the_page_shows_and_learn_as_one_process(launch: Launch, two_ranks: Losses) -> None:
    (alone,) = run(launch, 1).values()
    (shown,) = find(2, "text")
    assert [epoch for epoch, _ in losses(shown)] == [epoch for epoch, _ in two_ranks] == [*"0123"]
    assert all(float(found[-1][1]) < 5 for found in (alone, two_ranks, losses(shown)))  # about 9 at first


def test_every_launcher_prints_the_same(launch: Launch, two_ranks: Losses) -> None:
    assert [*run(launch, 3).values()] == [two_ranks] * 3


def test_a_job_that_continues_prints_the_same(launch: Launch, two_ranks: Losses) -> None:
    first, second = run(launch, 4).values()
    assert first + second == two_ranks
    assert len(first) == 2


def test_a_job_that_lost_a_rank_ends_with_the_same(launch: Launch, two_ranks: Losses) -> None:
    lost, on_one_rank = run(launch, 6).values()
    assert (launch.directory / "failed").exists()
    assert lost == two_ranks
    assert [epoch for epoch, _ in on_one_rank] == ["3", "4"]


def test_a_job_script_is_written(launch: Launch) -> None:
    assert [*run(launch, 5).values()] == [[]]
    assert "srun" in (launch.directory / "job.sh").read_text()


def test_the_ranks_of_two_nodes_print_the_same_numbers(slurm: Slurm, launch: Launch, two_ranks: Losses) -> None:
    launch.write("train.py", program(5))
    outcome = launch(shlex.split("srun -N 2 -n 2 python train.py 4"), env=slurm.env)
    assert "srun -N 2 -n 2 python train.py 4\n" in find(5, "bash")[0]
    assert {"[0] on node 0 of 2", "[1] on node 1 of 2"} <= set(outcome.stdout.splitlines()), str(outcome)
    assert losses(outcome.stdout) == two_ranks


def test_the_ranks_of_two_hosts_train(launch: Launch, two_hosts: Hosts, two_ranks: Losses) -> None:
    launch.write("train.py", program(5))
    (line,) = (line for line in find(5, "bash")[0].splitlines() if " -H " in line)
    words = [*RUN, "--network-interface", "eth0", *shlex.split(line)[2:]]
    outcome = launch(two_hosts.on(0, *words), env=two_hosts.env)
    assert {"[0] on node 0 of 2", "[1] on node 1 of 2"} <= set(outcome.stdout.splitlines()), str(outcome)
    assert losses(outcome.stdout) == two_ranks
