"""Every public name has an example in its docstring, which runs in a job of one rank."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dualdist as dd

# They start processes, change the process that calls them, or, as a module, have their example in the README.
WITHOUT = {"elastic", "run", "setup_logging", "spawn"}
PUBLIC = [
    name
    for name in dd.__all__
    if name not in WITHOUT and callable(getattr(dd, name)) and not name.endswith("Error") and name[0] != "_"
]


@pytest.fixture
def alone(base_env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A job of one rank, in an empty folder."""
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
