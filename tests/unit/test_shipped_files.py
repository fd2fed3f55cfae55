"""Files that are no code, of launch/, docker/ and the project: they agree with the generator and with each other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tomllib
import yaml
from harness.base_env import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dualdist.cli import build_parser, main
from dualdist.version import __version__

LAUNCH = ROOT / "launch"
JOBS = sorted((LAUNCH / "jobs").glob("*.yaml"))


def file_of(job: Path) -> Path:
    return LAUNCH / f"{job.stem}{'.yaml' if job.stem.startswith('kubernetes') else '.sh'}"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_file_is_what_the_generator_writes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", str(path), "--scheduler", path.stem.partition("-")[0]]) == 0
    written = file_of(path)
    assert written.read_text() == capsys.readouterr().out, f"rewrite {written.name}: make launch"


def test_every_file_has_its_job_and_is_in_the_table() -> None:
    files = {path.stem for path in LAUNCH.iterdir() if path.suffix in (".sh", ".yaml") and path.stem != "environment"}
    assert files == {path.stem for path in JOBS}
    readme = (LAUNCH / "README.md").read_text()
    assert [path for path in JOBS if f"`{file_of(path).name}`" not in readme] == []


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_file_has_one_block_to_edit(path: Path) -> None:
    """No number, path or name of a site is outside of it."""
    before, _, rest = file_of(path).read_text().partition("# ==== edit from here")
    block, _, after = rest.partition("# ==== to here")
    assert "train.py" in block
    for own in ("train.py", "#SBATCH", "#PBS", "#BSUB", "module load", "venvs", "miniforge", "256", "registry"):
        assert own not in before + after


DOCKER = ROOT / "docker"
FILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cuda"]
SCRIPT = (DOCKER / "install.sh").read_text()
PINS = dict(line.split("==") for line in (DOCKER / "constraints.txt").read_text().splitlines() if "==" in line)


def test_torch_and_every_package_of_the_extras_are_pinned_as_the_project_asks() -> None:
    makefile = (ROOT / "Makefile").read_text()
    tested = re.search(r"^TESTED := (.+)$", makefile, re.MULTILINE)[1].split()
    assert re.search(r"^TORCH=torch==(\S+)$", SCRIPT, re.MULTILINE)[1] in tested
    extras = re.search(r"^EXTRAS=(\S+)$", SCRIPT, re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        listed = re.search(rf"^{extra} = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
        assert listed is not None, extra
        for line in re.findall(r'"([^"]+)"', listed[1]):
            asked = Requirement(line)
            if asked.name != "cmake":  # the distribution's
                assert asked.specifier.contains(PINS[canonicalize_name(asked.name)]), line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_is_in_the_context(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, source


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_bases_are_pinned(path: Path) -> None:
    """What is pulled here by its digest, NVIDIA's by a tag of one version."""
    bases = re.findall(r"^ARG (?:BUILD_)?BASE=(\S+)$", path.read_text(), re.MULTILINE)
    assert bases
    pinned = r"nvidia/cuda:\d+\.\d+\.\d+-\S+" if path.name.endswith(".cuda") else r"\S+:\S+@sha256:[0-9a-f]{64}"
    assert all(re.fullmatch(pinned, base) for base in bases), bases


def test_both_images_ship_the_same_and_the_readme_names_the_hosts_of_compose() -> None:
    """All stages but the one with the compiler; of the others only comments, bases and NVIDIA's variables differ."""
    own = ("#", "ARG BASE=", "ARG BUILD_BASE=", "ARG TORCH_INDEX=", "ENV NVIDIA_")
    shipped = []
    for path in FILES:
        before, _, after = re.split("^# ---- (?:Horovod|what is shipped).*$", path.read_text(), flags=re.MULTILINE)
        shipped.append([line for line in (before + after).splitlines() if line and not line.startswith(own)])
    assert shipped[0] == shipped[1]
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    readme = (DOCKER / "README.md").read_text()
    assert set(re.findall(r"-H (\S+)", readme)) == {",".join(f"{name}:1" for name in services)}


FIRST_FIELD = "Output of `dualdist doctor --json`"


def test_the_version_is_the_newest_of_the_changelog_and_the_cited_one() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)[:2] == ["Unreleased", __version__]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert cited["authors"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["authors"]
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
    if what == "Python":
        tried = re.findall(r"\b3\.\d+", row.rpartition("| before")[0])
        assert sorted({*versions}) == sorted({*tried}), "classifiers are the versions that were tried"


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
