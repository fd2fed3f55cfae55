"""torchvision is importable whatever operators it was compiled with. Each case needs an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.smoke


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def succeeded(program: str) -> str:
    done = python(program)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.full
def test_import_of_the_helper_touches_no_torchvision() -> None:
    assert succeeded("import sys, dualdist.utils.torchvision_import; print('torchvision' in sys.modules)") == "False"


def test_models_transforms_and_datasets_work() -> None:
    program = """
import torch
from dualdist.utils.torchvision_import import load_torchvision
vision = load_torchvision()
assert load_torchvision() is vision
from torchvision import datasets, transforms
from torchvision.models import resnet18
print(tuple(resnet18(num_classes=10)(torch.zeros(2, 3, 32, 32)).shape), datasets.CIFAR10.__name__)
"""
    assert succeeded(program) == "(2, 10) CIFAR10"


@pytest.mark.full
def test_schemas_that_someone_declared_already_are_left_alone() -> None:
    program = """
import torch
from dualdist.utils import torchvision_import as vision
theirs = torch.library.Library("torchvision", "DEF")
for schema in vision.SCHEMAS.values():
    theirs.define(schema)
print(vision.load_torchvision().__name__)
"""
    assert succeeded(program) == "torchvision"


@pytest.mark.full
def test_nothing_is_declared_where_the_operators_load() -> None:
    program = """
import torch
from dualdist.utils import torchvision_import as vision
vision.load_operators = lambda folders: True
stand_in = torch.library.Library("torchvision", "DEF")
for schema in vision.SCHEMAS.values():
    stand_in.define(schema)
vision.load_torchvision()
print(vision._declare_operators.cache_info().currsize)
"""
    assert succeeded(program) == "0"


@pytest.mark.smoke("missing")
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            "sys.meta_path = [f for f in sys.meta_path if getattr(f, '__name__', '') != 'PathFinder']",
            "is not installed",
        ),
        ("sys.modules['PIL'] = None", "does not work with torch"),
    ],
    ids=["missing", "half-installed"],
)
def test_missing_package_is_an_error_of_ours_with_what_to_type(broken: str, words: str) -> None:
    program = f"""
import sys
import torch
from dualdist.errors import DualdistError
from dualdist.utils.torchvision_import import load_torchvision
{broken}
try:
    load_torchvision()
except DualdistError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    said = succeeded(program)
    assert words in said
    assert "pip install --no-deps torchvision" in said
