"""The manual's programs and command lines run as they are printed there."""

import json
import re
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from harness.base_env import ROOT
from harness.jobs import Launch
from harness.pages import RUN_BY_THEIR_OWN_TEST, Block, find_blocks, find_commands
from harness.slurm import Slurm
from launch.running import AS_ROOT, TORCHRUN, sides
from launch.test_readme import STARTS as README_STARTS

PROGRAM = str(Path(__file__).with_name("docs_program.py"))
PYTHON = [block for block in find_blocks("python") if block.page not in RUN_BY_THEIR_OWN_TEST]
# Lines that no test here runs, and why. Those of `dualdist` are all held against its parser, by unit/test_readmes.py.
ELSEWHERE = {
    r"(pip|python3 -m venv|source|\.|MPI4PY_BUILD_MPICC=mpicc pip) |make (setup|test|test-all|demo)$": "install",
    r"(module|export|conda|apptainer|kubectl|qsub|bsub|until) |dualdist install-horovod --gpu": "need a site",
    r"srun .*--gpus-per-node": "needs GPUs",
    r"srun .* examples/imagenet.py ": "below, one after the other",
    r"docker ": "tests/docker",
    r"sbatch ": "tests/launch/test_job_scripts.py submits",
    r"(?!.*--scheduler)dualdist run .*(-H|--hostfile) ": "tests/launch/test_run_hosts.py",
    r"(salloc .*)?dualdist compare (-H|--output report/$)": "tests/launch/test_bench_hosts.py",
    r"dualdist doctor (--hosts|--run) ": "tests/launch/test_doctor.py",
    r"python -m pytest ": "itself",
    r"dualdist bench ": "tests/launch/test_bench.py",
    r"dualdist top$": "tests/launch/test_top.py",
}
SLURM = r"(srun|salloc) "
# Of these pages the lines train. Those of others start ranks, whatever these do: here they do without torch.
TRAINS = ("first-job.md", "from-ddp.md", "guides/elastic.md", "guides/tracing.md")
STARTED = """import os\nprint(f"one of {os.environ['WORLD_SIZE']} ranks, ready")\n"""
LINES = {
    line: block
    for line, block in find_commands().items()
    if line not in README_STARTS and not any(re.match(each, line) for each in ELSEWHERE)
}


def alone(block: Block) -> bool:
    """Return True if a block starts ranks itself, or is for one rank."""
    return bool(re.search(r"dd\.(run|spawn)\(|register\(", block.text))


def test_the_programs_of_the_manual_run_on_two_ranks(launch: Launch) -> None:
    blocks = [(str(block), block.text) for block in PYTHON if not alone(block)]
    listed = launch.write("blocks.json", json.dumps(blocks))
    printed = launch([*TORCHRUN, PROGRAM, listed], timeout_s=280).stdout
    # Two ranks may write at once: line ends come last.
    assert [where for where, _ in blocks if printed.count(f"ran {where}.") != 2] == [], printed


@pytest.mark.parametrize("block", [*filter(alone, PYTHON)], ids=str)
def test_a_program_of_its_own_prints_what_it_says(launch: Launch, block: Block) -> None:
    path = launch.write("program.py", block.text)
    assert launch([sys.executable, path]).stdout.strip() == block.text.rstrip().rpartition("# ")[2]


def test_a_ddp_script_trains_the_same_model_before_and_after_migration(launch: Launch) -> None:
    (block,) = (block for block in find_blocks("diff") if block.page == "from-ddp.md")
    models = []
    for path in sides(launch, block.text):
        launch([*TORCHRUN, path])
        models.append(torch.load(launch.directory / "model.pt", weights_only=True))
    before, after = models
    assert before.keys() == after.keys() == {"weight", "bias"}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_script_for_one_process_trains_on_one_rank_and_on_two(launch: Launch) -> None:
    (block,) = (block for block in find_blocks("diff") if block.page == "from-one-process.md")
    before, after = sides(launch, block.text)
    for argv in ([sys.executable, before], [sys.executable, after], [*TORCHRUN, after]):
        printed = launch(argv).stdout
        assert re.findall(r"^epoch (\d): loss \d", printed, re.MULTILINE) == ["0", "1", "2"], printed


def run_line(launch: Launch, line: str, env: dict[str, str]) -> None:
    """Run a line as it is, but for what takes long or belongs to a site: that is planned, or printed, only."""
    folder, block = launch.directory, LINES[line]
    (folder / "package").mkdir()
    page = block.page if block.page == "guides/elastic.md" else "first-job.md"
    text = next(each.text for each in PYTHON if each.page == page)
    for path in (folder / "train.py", folder / "package" / "train.py"):
        trains = block.page in TRAINS or not re.search("dualdist (run|exec)", line)  # which set WORLD_SIZE
        path.write_text(text if trains else STARTED)
    shutil.copy(ROOT / "examples" / "horovod_script.py", folder / "script.py")
    scripts = {"run.sh": "#!/bin/sh\nexec python train.py\n"}
    if "./discover.sh" in line:
        scripts["discover.sh"] = next(each.text for each in find_blocks("sh") if each.page == block.page)
    for name, script in scripts.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    if "--config" in line:
        (folder / "job.yaml").write_text(next(each.text for each in find_blocks("yaml") if each.page == block.page))
    if re.match(r"dualdist (compare|install-horovod) ?", line):
        line = line.replace(" -- ", " --dry-run -- ") if " -- " in line else f"{line} --dry-run"
    line = line.replace("--submit ", "")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = line.replace("29400", str(listener.getsockname()[1]))
    outcome = launch(["bash", "-c", f"{line}; wait $!" if " & " in line else line], env={**AS_ROOT, **env}, check=False)
    assert outcome.rc in ((0, 1) if "doctor" in line else (0,)), str(outcome)
    if re.search(r"train(\.py)?\b", line) and not re.search(r"--(scheduler|dry-run|log-dir)", line):
        assert ("begins with step" if page.startswith("guides") else " ranks, ") in outcome.stdout, str(outcome)


@pytest.mark.parametrize("line", [line for line in LINES if not re.match(SLURM, line)])
def test_a_line_of_the_manual_runs(launch: Launch, line: str) -> None:
    run_line(launch, line, {})


@pytest.mark.parametrize("line", [line for line in LINES if re.match(SLURM, line)])
def test_a_line_of_the_manual_for_slurm_runs(slurm: Slurm, launch: Launch, line: str) -> None:
    run_line(launch, line, dict(slurm.env))


def test_the_rehearsal_of_resnet50_on_two_nodes_continues(slurm: Slurm, launch: Launch) -> None:
    (launch.directory / "examples").symlink_to(ROOT / "examples")
    lines = [line for line in find_commands("guides/resnet50.md") if " examples/imagenet.py " in line]
    first, second = (launch(shlex.split(line), env=slurm.env, timeout_s=250).stdout for line in lines)
    assert re.findall(r"^epoch (\d/\d): loss \d\.\d+, top-1 \d\.\d+, top-5", first, re.MULTILINE) == ["1/1"], first
    assert re.findall(r"^epoch (\d/\d): loss", second, re.MULTILINE) == ["2/2"], second
    assert "with epoch 2, best so far" in second
