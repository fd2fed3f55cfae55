"""The manual under docs/, and the READMEs: links, tables that the code knows better, and the strict build."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from harness.base_env import ROOT
from harness.installed import lack
from harness.pages import FENCED, FILES, PAGES, find_blocks, without_code

import dualdist as dd
from dualdist.launch.job_file import loads

READMES = [path for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md")] if ".venv" not in path.parts]
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def hooks() -> object:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and mkdocs make them, which strips blanks."""
    text = hooks().on_page_markdown(path.read_text())  # type: ignore[attr-defined]
    words = [re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(FENCED.sub("", text))]
    return {each.replace(" ", "-") for word in words for each in (word, word.strip())}


@pytest.mark.parametrize("path", [*FILES, *READMES], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        leads_to = (path.parent / file).resolve() if file else path
        assert leads_to.exists(), target
        assert not anchor or anchor in anchors(leads_to), target
        assert PAGES not in path.parents or PAGES in leads_to.parents, (
            f"{target}: not in the manual, which has no such page"
        )


def test_a_file_of_the_repository_that_a_page_names_is_there() -> None:
    path = re.compile(r"(?<![\w/])(?:docker|docs|dualdist|examples|launch|tests)/[\w./-]+\.\w+")
    named = {(page.name, each) for page in FILES for each in path.findall(page.read_text())}
    assert len(named) > 40
    assert {each for each in named if not (ROOT / each[1]).exists()} == set()


def test_the_table_of_variables_has_those_of_the_code_and_no_other() -> None:
    texts = [path.read_text() for path in (ROOT / "dualdist").rglob("*.py")]
    used = {name for text in texts for name in re.findall(r"\bDUALDIST_[A-Z_]*[A-Z]\b", text)}
    listed = set(re.findall(r"`(DUALDIST_\w+)`", (PAGES / "reference/environment.md").read_text()))
    assert listed == used


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: dualdist\.(\w+)$", (PAGES / "reference/api.md").read_text(), re.MULTILINE)
    errors = {name for name in dd.__all__ if name.endswith("Error")}  # reference/errors.md
    assert sorted(listed) == sorted({*dd.__all__} - errors - {"__version__", "elastic"})
    members = re.findall(r"^::: dualdist\.elastic\.(\w+)$", (PAGES / "reference/api.md").read_text(), re.MULTILINE)
    assert sorted(members) == sorted(dd.elastic.__all__)


def test_the_table_of_extras_has_those_of_the_project() -> None:
    _, _, project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")
    extras = set(re.findall(r"^(\w+) = \[", project.partition("\n[")[0], re.MULTILINE)) - {"test"}
    listed = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (PAGES / "install.md").read_text(), re.MULTILINE)
    assert {name for cell in listed for name in re.findall(r"\w+", cell)} == extras


@pytest.mark.parametrize("block", find_blocks("yaml"), ids=str)
def test_a_job_file_of_the_manual_is_valid(block: object) -> None:
    loads(block.text, str(block), is_script=True)  # type: ignore[attr-defined]


@pytest.mark.full
def test_the_manual_builds_without_a_warning_a_network_or_a_file_of_another_host(
    base_env: Mapping[str, str], tmp_path: Path
) -> None:
    if importlib.util.find_spec("material") is None:
        lack("mkdocs-material", "setup", "make")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "docs/mkdocs.yml")]
    alone = ["unshare", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:  # needs root, or rights of a container
        alone = []
    env = {**base_env, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([*alone, *build, "--site-dir", str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=[\"']?https?://[^>]*>")
    assert [each for page in tmp_path.rglob("*.html") for each in loaded.findall(page.read_text())] == []
