"""The commands that tests/README.md shows find tests, and its table has every folder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness.base_env import ROOT

TESTS = ROOT / "tests"
README = (TESTS / "README.md").read_text()


@pytest.mark.full
def test_each_command_finds_tests(base_env: Mapping[str, str]) -> None:
    """All in one process, which collects and runs nothing."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (block,) = (text for language, text in blocks if not language)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert all(words[:3] == ["python", "-m", "pytest"] for words in lines)
    collect = "import sys, pytest; sys.exit(max(pytest.main([*line, '--collect-only', '-q']) for line in {lines}))"
    code = collect.format(lines=[words[3:] for words in lines])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=base_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert len(re.findall(r"^\d+(?:/\d+)? tests collected", done.stdout, re.MULTILINE)) == len(lines)


def test_every_folder_stands_in_the_table() -> None:
    shown = re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE)
    assert sorted(shown) == sorted(path.name for path in TESTS.iterdir() if any(path.glob("*.py")))
    launch_files = {Path(word).name for word in re.findall(r"`([\w/]+\.py)`", README)}
    assert all(next(TESTS.rglob(name), None) for name in launch_files)
