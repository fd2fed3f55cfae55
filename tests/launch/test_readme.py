"""What the README shows runs as it stands."""

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

from dualdist.launch.job_file import loads

README = (ROOT / "README.md").read_text()
# So that a test takes seconds; the lines themselves stay as a person types them.
SHORT = ["--model", "mlp", "--epochs", "1", "--max-steps", "3"]
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def blocks(language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [body for named, body in found if named == language]


TRAIN_LINES = next(block for block in blocks() if "examples/train.py" in block).splitlines()


@pytest.fixture
def example(launch: Launch) -> Path:
    path = launch.directory / "example.py"
    path.write_text(blocks("python")[0])
    return path


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ([sys.executable], "1 ranks, none, single over none"),
        (["torchrun", "--standalone", "--nproc-per-node=2"], "2 ranks, torchrun, native over shm"),
        (["horovodrun", "--gloo", "-np", "2", sys.executable], "2 ranks, horovodrun, horovod over gloo"),
    ],
    ids=["python", "torchrun", "horovodrun"],
)
def test_the_example_trains(launch: Launch, example: Path, start: list[str], words: str) -> None:
    printed = launch([*start, str(example)]).stdout
    assert words in printed
    assert float(printed.split("loss ")[1]) < 1.0, printed  # it starts at about 9


def test_the_example_goes_on_where_it_was_left(launch: Launch) -> None:
    """On two ranks to the end; then on one, from the last checkpoint on."""
    path = launch.directory / "resuming.py"
    path.write_text(next(block for block in blocks("python") if "dd.load_checkpoint" in block))
    first = launch(["torchrun", "--standalone", "--nproc-per-node=2", str(path)]).stdout
    assert first == "2 ranks begin with step 0, at sample 0 of epoch 0\n"
    # An epoch has 32 steps of 32 samples on two ranks, the last one of 8.
    again = launch([sys.executable, str(path)]).stdout
    assert again == "1 ranks begin with step 75, at sample 352 of epoch 2\n"


def test_the_elastic_example_begins_where_it_was_saved(launch: Launch) -> None:
    """On two ranks to the end; then on one, from the last checkpoint on."""
    path = launch.directory / "elastic.py"
    path.write_text(next(block for block in blocks("python") if "dd.elastic.run" in block))
    first = launch(["torchrun", "--standalone", "--nproc-per-node=2", str(path)]).stdout
    # Two ranks may write at once: the ends of their lines then come last.
    assert all(first.count(f"rank {rank} of 2 begins with step 0") == 1 for rank in range(2)), first
    again = launch([sys.executable, str(path)]).stdout
    assert again == "rank 0 of 1 begins with step 75\n"


ELASTIC_LINES = next(block for block in blocks() if "--min-ranks" in block).splitlines()


@pytest.mark.parametrize("line", [line for line in ELASTIC_LINES if not {"--nnodes", "--submit"} & set(line.split())])
def test_a_line_that_survives_trains(launch: Launch, line: str) -> None:
    """tests/launch/test_elastic.py loses ranks, and hosts under torchrun's --nnodes."""
    example = next(block for block in blocks("python") if "dd.elastic.run" in block)
    (launch.directory / "train.py").write_text(example)
    printed = launch(shlex.split(line, comments=True), env=OPEN_MPI).stdout
    assert all(printed.count(f"rank {rank} of 4 begins with step 0") == 1 for rank in range(4)), printed


@pytest.mark.smoke
@pytest.mark.parametrize("line", [line for line in ELASTIC_LINES if "--submit" in line.split()])
def test_a_line_that_is_queued_again_is_one_that_dualdist_run_knows(launch: Launch, line: str) -> None:
    """tests/launch/test_requeue.py has it queued again."""
    (launch.directory / "train.py").touch()
    dualdist, run, *words = shlex.split(line, comments=True)
    assert "--signal=B:USR1@120" in launch([dualdist, run, "--dry-run", *words]).stdout


HOROVOD_LINES = next(block for block in blocks() if "--as-horovod" in block).splitlines()


@pytest.mark.parametrize("line", HOROVOD_LINES)
def test_a_line_for_a_horovod_script_trains(launch: Launch, line: str) -> None:
    shutil.copy(ROOT / "examples" / "horovod_script.py", launch.directory / "script.py")
    assert "epoch 5/5: loss 0." in launch(shlex.split(line, comments=True)).stdout


def trains(launch: Launch, line: str, env: Mapping[str, str]) -> None:
    """The line, shortened, ends with one summary."""
    argv = [str(ROOT / word) if word == "examples/train.py" else word for word in shlex.split(line)]
    outcome = launch([*argv, *SHORT], env={**OPEN_MPI, **env})
    assert outcome.stdout.count("summary: ") == 1, str(outcome)


@pytest.mark.parametrize("line", [line for line in TRAIN_LINES if not line.startswith("srun")])
def test_a_line_trains(launch: Launch, line: str) -> None:
    trains(launch, line, {})


@pytest.mark.parametrize("line", [line for line in TRAIN_LINES if line.startswith("srun")])
def test_a_line_for_slurm_trains(slurm: Slurm, launch: Launch, line: str) -> None:
    trains(launch, line, slurm.env)


DOCTOR_LINES = next(block for block in blocks() if "dualdist doctor" in block).splitlines()


@pytest.mark.smoke
@pytest.mark.parametrize("line", [line for line in DOCTOR_LINES if not {"--hosts", "--run"} & set(line.split())])
def test_the_doctor_lines_run(launch: Launch, line: str) -> None:
    """Some machines have something wrong with them: CI's torchvision does not fit. Elsewhere: hosts, --run."""
    outcome = launch(shlex.split(line, comments=True), check=False)
    assert outcome.rc in (0, 1), str(outcome)
    assert outcome.stdout


def test_the_example_beside_training_says_what_it_shall(launch: Launch) -> None:
    path = launch.directory / "beside.py"
    path.write_text(next(block for block in blocks("python") if "dd.Metric" in block))
    outcome = launch(["torchrun", "--standalone", "--nproc-per-node=2", str(path)])
    info, mean = outcome.stdout.splitlines()
    assert info.startswith("rank 0 of 2 (local rank 0 of 2, node 0 of 1), native over shm, started by torchrun, ")
    assert mean.startswith("mean loss 0.")
    assert outcome.stderr.count("[0/2] INFO root: on rank 0 alone") == 1
    assert outcome.stderr.count("epoch 1: 100% 100/100") == 1


def test_the_timeline_line_writes_a_trace(launch: Launch, example: Path) -> None:
    line = next(block for block in blocks() if "DUALDIST_TIMELINE" in block).replace("train.py", str(example))
    variable, *argv = shlex.split(line)
    launch([*argv[:1], "--standalone", *argv[1:]], env=dict([variable.split("=")]))
    events = trace_format.load(launch.directory / "trace.json")
    assert {event["pid"] for event in events} == {0, 1}
    assert {"forward Linear", "backward", "step SGD", "step 0"} <= {event["name"] for event in events}


@pytest.mark.smoke
def test_the_builder_line_is_one_that_it_knows(launch: Launch) -> None:
    line = next(block for block in blocks() if "install-horovod" in block)
    assert "horovod" in launch([*shlex.split(line, comments=True), "--dry-run"]).stdout


RUN_LINES = next(block for block in blocks() if "dualdist run -np 2 train.py" in block).splitlines()


@pytest.mark.parametrize("line", [line for line in RUN_LINES if not {"-H", "--submit"} & set(line.split())])
def test_a_line_of_dualdist_run_does_what_it_says(launch: Launch, example: Path, line: str) -> None:
    """tests/launch/test_run_hosts.py runs on hosts, and test_job_scripts.py submits."""
    example.rename(launch.directory / "train.py")
    job = next(block for block in blocks("yaml") if "program: " in block)
    (launch.directory / "job.yaml").write_text(re.sub(r"(?m)^hosts: .*\n", "", job))
    words = shlex.split(line, comments=True)
    outcome = launch(words)
    if "--write" in words:
        assert "#SBATCH" in (launch.directory / "job.sh").read_text()
    elif "--dry-run" in words:
        assert "dualdist.launch.rank" in outcome.stdout
    else:
        ranks = words[words.index("-np") + 1] if "-np" in words else "4"
        assert f"{ranks} ranks, " in outcome.stdout


COMPARE_LINES = next(block for block in blocks() if "dualdist compare -np 4" in block).splitlines()


@pytest.mark.smoke
@pytest.mark.parametrize("line", COMPARE_LINES)
def test_a_line_of_dualdist_compare_is_one_that_it_knows(launch: Launch, line: str) -> None:
    (launch.directory / "train.py").touch()
    dualdist, compare, *words = shlex.split(line, comments=True)
    assert "DUALDIST_" in launch([dualdist, compare, "--dry-run", *words]).stdout


@pytest.mark.smoke
def test_the_job_file_passes_its_checks() -> None:
    job = loads(next(block for block in blocks("yaml") if "program: " in block), "job.yaml")
    assert (job.hosts, job.resources.time) == (("hosta:2", "hostb:2"), "2:00:00")


def test_the_example_of_run_gives_what_it_says(launch: Launch) -> None:
    program = next(block for block in blocks("python") if "dd.run(" in block).replace("dd.run", "found = dd.run")
    assert launch([sys.executable, "-c", f"{program}\nprint(found)"]).stdout == "[0, 10]\n"


def test_the_ddp_script_leaves_the_same_model_before_and_after_it_is_moved(launch: Launch) -> None:
    models = []
    for sign in "-+":
        path = launch.directory / "script.py"
        lines = blocks("diff")[0].splitlines(keepends=True)
        path.write_text("".join(line[1:] for line in lines if line[0] in (" ", sign)))
        launch(["torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", str(path)])
        models.append(torch.load(launch.directory / "model.pt", weights_only=True))
        (launch.directory / "model.pt").unlink()
    before, after = models
    assert before.keys() == after.keys() == {"weight", "bias"}
    assert all(torch.equal(before[name], after[name]) for name in before)
