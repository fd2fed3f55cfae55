"""The README's examples and command lines run as they are printed there."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from harness import trace_format
from harness.base_env import ROOT
from harness.jobs import Launch
from harness.slurm import Slurm
from launch.running import AS_ROOT, TORCHRUN, blocks

from dualdist.launch.job_file import loads

README = ROOT / "README.md"
# Appended to the README's lines, so that a test takes seconds.
SHORT = ["--model", "mlp", "--epochs", "1", "--max-steps", "3"]


def block(words: str, language: str = "") -> str:
    """Return the README's first block with these words."""
    return next(text for text in blocks(README, language) if words in text)


def lines(words: str, *, without: str = "", only: str = "") -> list[str]:
    """Return lines of the block with these words: those without the options, or only those with one of them."""
    found = [(line, set(line.split())) for line in block(words).splitlines()]
    return [line for line, has in found if not has & {*without.split()} and (not only or has & {*only.split()})]


@pytest.fixture
def example(launch: Launch) -> Path:
    path = launch.directory / "example.py"
    path.write_text(blocks(README, "python")[0])
    return path


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ([sys.executable], "1 ranks, none, single over none"),
        (TORCHRUN, "2 ranks, torchrun, native over shm"),
        (["horovodrun", "--gloo", "-np", "2", sys.executable], "2 ranks, horovodrun, horovod over gloo"),
    ],
    ids=["python", "torchrun", "horovodrun"],
)
def test_the_example_trains(launch: Launch, example: Path, start: list[str], words: str) -> None:
    printed = launch([*start, str(example)]).stdout
    assert words in printed
    assert float(printed.split("loss ")[1]) < 1.0, printed  # it starts at about 9


@pytest.mark.parametrize(
    ("words", "first", "then"),
    [
        # An epoch has 32 steps of 32 samples on two ranks, the last one of 8.
        (
            "dd.load_checkpoint",
            ["2 ranks begin with step 0, at sample 0 of epoch 0"],
            "1 ranks begin with step 75, at sample 352 of epoch 2",
        ),
        (
            "dd.elastic.run",
            [f"rank {rank} of 2 begins with step 0" for rank in range(2)],
            "rank 0 of 1 begins with step 75",
        ),
    ],
    ids=["checkpoint", "elastic"],
)
def test_a_resumed_example_continues_on_another_number_of_ranks(
    launch: Launch, words: str, first: list[str], then: str
) -> None:
    """On two ranks to the end; then on one, from the last checkpoint."""
    path = launch.directory / "resuming.py"
    path.write_text(block(words, "python"))
    printed = launch([*TORCHRUN, str(path)]).stdout
    assert all(printed.count(line) == 1 for line in first), printed  # ranks may write at once: line ends come last
    assert printed.count(" begin") == len(first)
    assert launch([sys.executable, str(path)]).stdout == f"{then}\n"


@pytest.mark.parametrize("line", lines("--min-ranks", without="--nnodes --submit"))
def test_an_elastic_line_trains(launch: Launch, line: str) -> None:
    """tests/faults loses ranks, and hosts under torchrun's --nnodes."""
    (launch.directory / "train.py").write_text(block("dd.elastic.run", "python"))
    printed = launch(shlex.split(line, comments=True), env=AS_ROOT).stdout
    assert all(printed.count(f"rank {rank} of 4 begins with step 0") == 1 for rank in range(4)), printed


@pytest.mark.smoke
@pytest.mark.parametrize("line", lines("--min-ranks", only="--submit"))
def test_a_requeue_line_is_accepted(launch: Launch, line: str) -> None:
    """tests/launch/test_requeue.py requeues a job."""
    (launch.directory / "train.py").touch()
    dualdist, run, *words = shlex.split(line, comments=True)
    assert "--signal=B:USR1@120" in launch([dualdist, run, "--dry-run", *words]).stdout


@pytest.mark.parametrize("line", lines("--as-horovod"))
def test_a_line_for_a_horovod_script_trains(launch: Launch, line: str) -> None:
    shutil.copy(ROOT / "examples" / "horovod_script.py", launch.directory / "script.py")
    assert "epoch 5/5: loss 0." in launch(shlex.split(line, comments=True)).stdout


def trains(launch: Launch, line: str, env: Mapping[str, str]) -> None:
    """Check that the line, shortened, prints one summary."""
    argv = [str(ROOT / word) if word == "examples/train.py" else word for word in shlex.split(line)]
    outcome = launch([*argv, *SHORT], env={**AS_ROOT, **env})
    assert outcome.stdout.count("summary: ") == 1, str(outcome)


@pytest.mark.parametrize("line", lines("examples/train.py", without="srun"))
def test_a_line_trains(launch: Launch, line: str) -> None:
    trains(launch, line, {})


@pytest.mark.parametrize("line", lines("examples/train.py", only="srun"))
def test_a_line_for_slurm_trains(slurm: Slurm, launch: Launch, line: str) -> None:
    trains(launch, line, slurm.env)


@pytest.mark.smoke
@pytest.mark.parametrize("line", lines("dualdist doctor", without="--hosts --run"))
def test_a_doctor_line_runs(launch: Launch, line: str) -> None:
    """It may find something: CI's torchvision does not fit torch. test_doctor.py covers --hosts and --run."""
    outcome = launch(shlex.split(line, comments=True), check=False)
    assert outcome.rc in (0, 1), str(outcome)
    assert outcome.stdout


def test_the_example_beside_training_prints_on_one_rank(launch: Launch) -> None:
    path = launch.directory / "beside.py"
    path.write_text(block("dd.Metric", "python"))
    outcome = launch([*TORCHRUN, str(path)])
    info, mean = outcome.stdout.splitlines()
    assert info.startswith("rank 0 of 2 (local rank 0 of 2, node 0 of 1), native over shm, started by torchrun, ")
    assert mean.startswith("mean loss 0.")
    assert outcome.stderr.count("[0/2] INFO root: on rank 0 alone") == 1
    assert outcome.stderr.count("epoch 1: 100% 100/100") == 1


def test_the_timeline_line_writes_a_trace(launch: Launch, example: Path) -> None:
    variable, *argv = shlex.split(block("DUALDIST_TIMELINE").replace("train.py", str(example)))
    launch([*argv[:1], "--standalone", *argv[1:]], env=dict([variable.split("=")]))
    events = trace_format.load(launch.directory / "trace.json")
    assert {event["pid"] for event in events} == {0, 1}
    assert {"forward Linear", "backward", "step SGD", "step 0"} <= {event["name"] for event in events}


@pytest.mark.smoke
def test_the_install_horovod_line_is_accepted(launch: Launch) -> None:
    line = shlex.split(block("install-horovod"), comments=True)
    assert "horovod" in launch([*line, "--dry-run"]).stdout


@pytest.mark.parametrize("line", lines("dualdist run -np 2 train.py", without="-H --submit"))
def test_a_line_of_dualdist_run_runs(launch: Launch, example: Path, line: str) -> None:
    """test_run_hosts.py covers hosts, test_job_scripts.py submits."""
    example.rename(launch.directory / "train.py")
    (launch.directory / "job.yaml").write_text(re.sub(r"(?m)^hosts: .*\n", "", block("program: ", "yaml")))
    words = shlex.split(line, comments=True)
    outcome = launch(words)
    if "--write" in words:
        assert "#SBATCH" in (launch.directory / "job.sh").read_text()
    elif "--dry-run" in words:
        assert "dualdist.launch.rank" in outcome.stdout
    else:
        ranks = words[words.index("-np") + 1] if "-np" in words else "4"
        assert f"{ranks} ranks, " in outcome.stdout


@pytest.mark.smoke
@pytest.mark.parametrize("line", lines("dualdist compare -np 4"))
def test_a_line_of_dualdist_compare_is_accepted(launch: Launch, line: str) -> None:
    (launch.directory / "train.py").touch()
    dualdist, compare, *words = shlex.split(line, comments=True)
    assert "DUALDIST_" in launch([dualdist, compare, "--dry-run", *words]).stdout


@pytest.mark.smoke
def test_the_job_file_is_valid() -> None:
    job = loads(block("program: ", "yaml"), "job.yaml")
    assert (job.hosts, job.resources.time) == (("hosta:2", "hostb:2"), "2:00:00")


def test_the_example_of_run_returns_what_it_shows(launch: Launch) -> None:
    program = block("dd.run(", "python").replace("dd.run", "found = dd.run")
    assert launch([sys.executable, "-c", f"{program}\nprint(found)"]).stdout == "[0, 10]\n"


def test_the_ddp_script_trains_the_same_model_before_and_after_migration(launch: Launch) -> None:
    models = []
    for sign in "-+":
        path = launch.directory / "script.py"
        diff = blocks(README, "diff")[0].splitlines(keepends=True)
        path.write_text("".join(line[1:] for line in diff if line[0] in (" ", sign)))
        launch([*TORCHRUN, str(path)])
        models.append(torch.load(launch.directory / "model.pt", weights_only=True))
        (launch.directory / "model.pt").unlink()
    before, after = models
    assert before.keys() == after.keys() == {"weight", "bias"}
    assert all(torch.equal(before[name], after[name]) for name in before)
