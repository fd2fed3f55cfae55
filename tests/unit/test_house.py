"""The house rules that a linter cannot see: who imports whom, and when; docstrings with examples that run."""

import ast
import doctest
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
import tomllib
import torch
from harness.pages import PAGES as DOCS

import dualdist as dd
from dualdist.utils import variables

PACKAGE = Path(dd.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# What dualdist is held against, used as without it.
MEASURED = {"bench/ranks/training.py", "bench/ranks/cold_start.py"}
# What only some files may import, also in functions.
RESERVED = {
    "torch.distributed": {
        *(
            f"backends/native/{name}.py"
            for name in ("backend", "device_watch", "libraries", "operations", "startup", "store")
        ),
        *(f"c10d/{name}.py" for name in ("__init__", "connection", "process_group", "torch_backend", "work")),
        *MEASURED,
    },
    "horovod": {
        *(f"backends/horovod/{name}.py" for name in ("backend", "driver")),
        *("horovod_build/smoke_test.py", *MEASURED),
    },
    "mpi4py": {"backends/mpi/world.py", *MEASURED},
}
# Modules that must stay quick and usable where torch is broken.
WITHOUT_TORCH = (
    "dualdist", "dualdist.launch.launchers", "dualdist.launch.execute", "dualdist.utils.package_probe",
    "dualdist.doctor", "dualdist.doctor.smoke_test", "dualdist.doctor.hosts", "dualdist.cli", "dualdist.cli.bench",
    "dualdist.bench.compare.output", "dualdist.cli.compare", "dualdist.cli.doctor", "dualdist.cli.top",
    "dualdist.horovod_build",
)  # fmt: skip


def imported(path: Path) -> Iterator[str]:
    """Yield every module that the file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", RESERVED)
def test_a_package_is_imported_by_its_modules_alone(package: str) -> None:
    """Ruff's TID251 knows no mpi4py, and is off in files that may read the environment, which must not import these."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if any(f"{name}.".startswith(f"{package}.") for name in imported(path))
    }
    assert found - RESERVED[package] == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers are counted."""
    graph = grimp.build_graph("dualdist", cache_dir=None)
    imports = {each: graph.find_modules_directly_imported_by(each) - {each} for each in graph.modules}
    TopologicalSorter(imports).prepare()


def test_a_class_name_is_used_once() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_manual_lists_the_layers_that_import_linter_holds() -> None:
    page = (DOCS / "design/architecture.md").read_text()
    listed = [line.split()[0] for line in page.partition("```text\n")[2].partition("```")[0].splitlines()]
    (layers, *_) = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    places = {name: place for place, layer in enumerate(layers["layers"]) for name in layer.split(" | ")}
    names = [name.removesuffix("/").removesuffix(".py") for name in listed]
    assert sorted(names) == sorted(places)
    assert names == sorted(names, key=places.__getitem__)
    assert all((PACKAGE / name).exists() for name in listed)


def test_modules_and_public_names_are_documented() -> None:
    docstrings = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in MODULES}
    assert [path for path, text in docstrings.items() if not text.partition("\n")[0].endswith((".", ":"))] == []
    assert [name for name in NAMES if not getattr(dd, name).__doc__] == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_it_loads_no_torch(module: str, base_env: Mapping[str, str]) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'horovod', 'mpi4py', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=dict(base_env), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_table_of_variables_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other is a warning in dd.init(), with the nearest one of the table."""
    written = {name for path in MODULES for name in re.findall(r"\bDUALDIST_[A-Z_]*[A-Z]\b", path.read_text())}
    listed = re.findall(r"`(DUALDIST_\w+)`", (DOCS / "reference/environment.md").read_text())
    assert written == {*variables.NAMES} == {*listed}
    monkeypatch.setenv("DUALDIST_BAKEND", "mpi")
    with pytest.warns(UserWarning, match="DUALDIST_BAKEND is set, .*; did you mean 'DUALDIST_BACKEND'") as found:
        dd.init()
    dd.shutdown()
    assert found[0].filename == __file__, "the program's line"
    (far,) = variables.unknown_variables({"DUALDIST_FOO": "1"})
    assert far == "DUALDIST_FOO is set, but no variable of dualdist"


def test_a_variable_orders_reductions_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALDIST_REDUCTION", "ordered")
    dd.init()
    try:
        for group in (None, dd.new_group([0])):
            with pytest.raises(dd.UsageError, match="reduction='ordered' with op 'adasum'"):
                dd.allreduce(torch.ones(1), "adasum", group=group)
        dd.allreduce(torch.ones(1), "adasum", reduction="unordered")
    finally:
        dd.shutdown()
    monkeypatch.setenv("DUALDIST_REDUCTION", "rank")
    with pytest.raises(dd.UsageError, match="DUALDIST_REDUCTION 'rank': expected one of ordered, unordered"):
        dd.init()


# They start processes, change the process that calls them, or, as a module, have their example in the README.
WITHOUT = {"elastic", "run", "setup_logging", "spawn"}
NAMES = [name for name in dd.__all__ if name[0] != "_"]
PUBLIC = [name for name in NAMES if name not in WITHOUT and callable(getattr(dd, name)) and not name.endswith("Error")]


@pytest.fixture
def alone(base_env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    dd.init()
    yield
    if dd.is_initialized():
        dd.shutdown()


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name_runs(alone: None, name: str) -> None:
    found = doctest.DocTestFinder(recurse=False).find(getattr(dd, name), name, globs={"dd": dd, "torch": torch})
    assert [each for each in found if each.examples], f"{name} has no example"
    if any("dd.init" in example.source for each in found for example in each.examples):
        dd.shutdown()
    failures: list[str] = []
    for each in found:
        doctest.DocTestRunner(verbose=False).run(each, out=failures.append)
    assert not failures, "".join(failures)
