"""The READMEs and the manual: commands that the command line knows, tables that the code knows better, links."""

import argparse
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from contract.test_laws import CELLS
from harness.base_env import ROOT
from harness.installed import lack
from harness.pages import FENCED, FILES, PAGES, find_blocks, without_code

import dualdist as dd
from dualdist.cli import COMMANDS, build_parser
from dualdist.launch.job_file import loads

DOCUMENTS = [path for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md")] if ".venv" not in path.parts]
# Words before a command of ours that are no part of it: variables, and what starts it somewhere else.
BEFORE = r"(?:[A-Z_]+=\S+ +|docker run .*? dualdist +|docker compose exec hosta +|srun -n 1 +)*"
COMMAND = re.compile(rf"^{BEFORE}(dualdist (?:{'|'.join(COMMANDS)})\b.*)$")


def lines(text: str) -> list[str]:
    return [
        line for language, body in FENCED.findall(text) if language in ("", "sh", "bash") for line in body.splitlines()
    ]


def inline(text: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCED.sub("", text))]


def ours(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted({(file, match[1]) for file, line in found if (match := COMMAND.match(line))})


TESTS_README = (ROOT / "tests/README.md").read_text()
READMES = [path for path in DOCUMENTS if path.name == "README.md"]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in [*READMES, *FILES]}
LINES = [(file, line) for file, text in TEXTS.items() for line in lines(text)]
INLINE = [(file, code) for file, text in TEXTS.items() for code in inline(text)]


def parser_of(command: str) -> argparse.ArgumentParser:
    (choices,) = (
        each.choices for each in build_parser(command)._actions if isinstance(each, argparse._SubParsersAction)
    )
    found: argparse.ArgumentParser = choices[command]
    return found


def test_there_are_commands_to_hold_against_the_parser() -> None:
    have = {file for file, _ in ours(LINES)}
    assert have >= {"README.md", "launch/README.md", "docker/README.md", "examples/README.md"}
    assert len(ours(LINES)) > 30
    assert len(ours(INLINE)) > 10


@pytest.mark.parametrize(("file", "line"), ours(LINES))
def test_a_command_that_a_readme_shows_is_understood(file: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    try:
        build_parser(words[0]).parse_args(words)
    except SystemExit as ended:
        pytest.fail(f"{file}: {line}: not understood, exit code {ended.code}")


@pytest.mark.parametrize(("file", "code"), ours(INLINE))
def test_an_option_that_a_readme_names_is_known(file: str, code: str) -> None:
    words = shlex.split(code, comments=True)
    known = parser_of(words[1])
    subparsers = [each for each in known._actions if isinstance(each, argparse._SubParsersAction)]
    if subparsers and len(words) > 2:
        known = subparsers[0].choices[words[2]]
    for word in words[2:]:
        if word == "--" or word.endswith(".py"):
            break  # what follows is the program's
        option = word.partition("=")[0]
        assert not option.startswith("--") or option in known._option_string_actions, f"{file}: {option}"


@pytest.mark.parametrize(("file", "line"), sorted({each for each in [*LINES, *INLINE] if each[1].startswith("make ")}))
def test_a_target_of_make_in_a_readme_is_there(file: str, line: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in shlex.split(line, comments=True)[1:] if "=" not in word} <= targets, file


# How the cells name what the rows and the columns are called for people; a file of tests/launch has Slurm's.
STARTED_BY = {
    "plain python, one rank": "python",
    "`dd.spawn`": "spawn",
    "torchrun": "torchrun",
    "horovodrun --gloo": "horovodrun-gloo",
    "horovodrun --mpi (Open MPI 4.1)": "horovodrun-mpi",
    "mpirun (Open MPI 4.1)": "mpirun",
    "mpiexec (MPICH)": "mpiexec-mpich",
}
# By tests/launch/test_mpi.py.
TRAINED_ELSEWHERE = {"mpiexec (MPICH)": {"native"}}
CARRIED_BY = {"native": "native", "Horovod over Gloo": "horovod gloo", "Horovod over MPI": "horovod mpi", "mpi": "mpi"}


def matrix_of_manual() -> dict[str, dict[str, str]]:
    lines = (PAGES / "guides/choosing-a-backend.md").read_text().splitlines()
    first = lines.index(f"| | {' | '.join(CARRIED_BY)} |")
    rows = [re.findall(r" ([^|]*?) (?=\|)", line) for line in lines[first + 2 : lines.index("", first)]]
    return {row[0]: dict(zip(CARRIED_BY, row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("row", STARTED_BY)
def test_what_the_manual_calls_tested_is_what_the_laws_run_on(row: str) -> None:
    ran = {f"{cell.backend} {cell.transport}" for cell in CELLS if cell.started_by == STARTED_BY[row]}
    kept = {column for column, carrier in CARRIED_BY.items() if any(one.startswith(carrier) for one in ran)}
    tested = {column for column, said in matrix_of_manual()[row].items() if said == "tested"}
    assert tested == kept | TRAINED_ELSEWHERE.get(row, set())
    assert [row for row in matrix_of_manual() if not row.startswith("srun")] == list(STARTED_BY)


def test_the_readme_is_one_page_with_tables_of_the_manual() -> None:
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) <= 250
    for page, head in (
        ("guides/choosing-a-backend.md", f"| | {' | '.join(CARRIED_BY)} |"),
        ("benchmarks.md", "| | ResNet-18 "),
    ):
        manual = (PAGES / page).read_text().splitlines()
        first, there = (next(i for i, line in enumerate(text) if line.startswith(head)) for text in (lines, manual))
        assert lines[first : lines.index("", first)] == manual[there : manual.index("", there)]


@pytest.mark.full
def test_each_command_finds_tests(base_env: Mapping[str, str]) -> None:
    (block,) = (text for language, text in FENCED.findall(TESTS_README) if not language)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert all(words[:3] == ["python", "-m", "pytest"] for words in lines)
    collect = "import sys, pytest; sys.exit(max(pytest.main([*line, '--collect-only', '-q']) for line in {lines}))"
    code = collect.format(lines=[words[3:] for words in lines])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=base_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert len(re.findall(r"^\d+(?:/\d+)? tests collected", done.stdout, re.MULTILINE)) == len(lines)


def test_every_folder_stands_in_the_table() -> None:
    folders = re.findall(r"^\| `(\w+)/` \|", TESTS_README, re.MULTILINE)
    assert sorted(folders) == sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py")))
    launch_files = {Path(word).name for word in re.findall(r"`([\w/]+\.py)`", TESTS_README)}
    assert all(next((ROOT / "tests").rglob(name), None) for name in launch_files)


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and mkdocs make them, which strips blanks."""
    text = FENCED.sub("", path.read_text())
    words = [re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {each.replace(" ", "-") for word in words for each in (word, word.strip())}


@pytest.mark.parametrize("path", [*FILES, *DOCUMENTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        leads_to = (path.parent / file).resolve() if file else path
        assert leads_to.exists(), target
        assert not anchor or anchor in anchors(leads_to), target
        assert PAGES not in path.parents or PAGES in leads_to.parents, f"{target} is outside of the manual"


def test_a_file_of_the_repository_that_a_page_names_is_there() -> None:
    path = re.compile(r"(?<![\w/])(?:docker|docs|dualdist|examples|launch|tests)/[\w./-]+\.\w+")
    named = {(page.name, each) for page in FILES for each in path.findall(page.read_text())}
    assert len(named) > 40
    assert {each for each in named if not (ROOT / each[1]).exists()} == set()


def test_the_reference_has_every_public_name() -> None:
    pages = [(PAGES / "reference" / name).read_text() for name in ("api.md", "errors.md")]
    listed = re.findall(r"^##+ `dd\.(\w+)`$", "".join(pages), re.MULTILINE)
    assert sorted(listed) == sorted({*dd.__all__} - {"__version__", "elastic"})
    members = re.findall(r"^##+ `dd\.elastic\.(\w+)`$", pages[0], re.MULTILINE)
    assert sorted(members) == sorted(dd.elastic.__all__)


@pytest.mark.parametrize("path", [*FILES, *READMES], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_can_be_read_in_the_repository(path: Path) -> None:
    """Nothing is left for a generator of sites to fill in."""
    assert ":::" not in path.read_text()
    assert "{{" not in FENCED.sub("", path.read_text())


def test_the_chart_of_steps_has_the_numbers_of_its_table() -> None:
    page, chart = (PAGES / "benchmarks.md").read_text(), (PAGES / "images/steps.svg").read_text()
    table = page.partition("| | ResNet-18 ")[2].partition("\n\n")[0]
    medians = re.findall(r"\| (\d\.\d\d) ", table)
    assert len(medians) == 15
    assert sorted(re.findall(r">(\d\.\d\d)</text>", chart)) == sorted(medians), "draw it: docs/pictures.py"


PROSE = runpy.run_path(str(ROOT / "docs/prose.py"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A rank waits for another one.", ["another one"]),
        ("| a job | is queued again |", ["requeued"]),
        (f"- A {'very ' * 34}long item.", ["37 words"]),
        ("Of these, one is left.", ["does not begin"]),
        ("An alternative `another one`, of course.", []),
        ("```text\nanother one\n```", []),
    ],
)
def test_the_linter_of_prose_finds_what_its_list_has(text: str, found: list[str]) -> None:
    problems = [*PROSE["problems"](text)]
    assert len(problems) == len(found), problems
    assert all(words in problem for words, problem in zip(found, problems, strict=True)), problems


def test_the_table_of_extras_has_those_of_the_project() -> None:
    _, _, project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")
    extras = set(re.findall(r"^(\w+) = \[", project.partition("\n[")[0], re.MULTILINE)) - {"test"}
    listed = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (PAGES / "install.md").read_text(), re.MULTILINE)
    assert {name for cell in listed for name in re.findall(r"\w+", cell)} == extras


def test_the_table_of_horovods_variables_has_those_that_horovodrun_sets_and_dualdist_knows() -> None:
    listed = set(re.findall(r"`(HOROVOD_\w+)`", (PAGES / "from-horovod-2.md").read_text()))
    code = [*(ROOT / "dualdist").glob("hvd/*.py"), *(ROOT / "dualdist").glob("environments/*.py")]
    known = {name for path in code for name in re.findall(r'"(HOROVOD_[A-Z_]*[A-Z])"', path.read_text())}
    assert known - listed == set()
    if importlib.util.find_spec("horovod") is None:
        lack("Horovod", "install-horovod", "dualdist")
    (config,) = importlib.util.find_spec("horovod").submodule_search_locations  # type: ignore[union-attr,misc]
    text = Path(config, "runner/common/util/config_parser.py").read_text()
    named = {name for name in re.findall(r"'(HOROVOD_[A-Z_0-9]+)'", text)}
    assert len(named) > 20
    assert named - listed == set()


@pytest.mark.parametrize("block", find_blocks("yaml"), ids=str)
def test_a_job_file_of_the_manual_is_valid(block: object) -> None:
    loads(block.text, str(block))  # type: ignore[attr-defined]


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
