"""Files that people expect of a project: they agree with each other, with the Makefile and with the package."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from harness.base_env import ROOT

from dualdist.cli import build_parser
from dualdist.version import __version__

FIRST_FIELD = "Output of `dualdist doctor --json`"


def test_the_version_is_the_newest_of_the_changelog_and_the_cited_one() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)[:2] == ["Unreleased", __version__]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert f"## [{__version__}] - {cited['date-released']}" in changelog


@pytest.mark.parametrize(
    ("what", "file", "pattern"),
    [("Python", "pyproject.toml", r"Python :: (3\.\d+)"), ("torch", "Makefile", r"(?<=[= ])(\d\.\d+)(?=\.\d)")],
)
def test_documents_name_the_versions_that_are_tried(what: str, file: str, pattern: str) -> None:
    lines = [each for each in (ROOT / file).read_text().splitlines() if re.search(r"^TESTED :=| Python :: 3", each)]
    versions = re.findall(pattern, "\n".join(lines))
    assert versions
    row = re.search(rf"^\| {what} \| .*", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)[0]
    page = (ROOT / "docs/pages/install.md").read_text().partition("\n## ")[0]
    for version in versions:
        assert re.search(rf"\b{re.escape(version)}\b", row)
        assert re.search(rf"\b{re.escape(version)}\b", page)


def test_the_first_field_of_an_issue_and_of_a_pull_request_is_what_doctor_says() -> None:
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for path in forms:
        first = yaml.safe_load(path.read_text())["body"][0]
        assert first["attributes"]["label"] == FIRST_FIELD
        assert first["validations"]["required"]
    assert (ROOT / ".github/PULL_REQUEST_TEMPLATE.md").read_text().startswith(f"## {FIRST_FIELD}\n")
    assert build_parser("doctor").parse_args(["doctor", "--json"]).json == "-"


def test_pre_commit_runs_what_make_check_runs() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {Path(shlex.split(hook["entry"])[0]).name for hook in repo["hooks"]}
    recipe = (ROOT / "Makefile").read_text().partition("\ncheck: setup\n")[2].partition("\n\n")[0]
    assert hooks == set(re.findall(r"\$\(BIN\)/([\w-]+)", recipe))
