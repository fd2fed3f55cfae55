"""torchvision is importable whatever operators it was compiled with. Each case needs an interpreter of its own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.smoke


def output(program: str) -> str:
    """Run the program in a new interpreter, and return what it printed."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.full
def test_import_of_the_helper_touches_no_torchvision() -> None:
    assert output("import sys, dualdist.utils.torchvision_import; print('torchvision' in sys.modules)") == "False"


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
    assert output(program) == "(2, 10) CIFAR10"


@pytest.mark.full
@pytest.mark.parametrize("operators", ["declared elsewhere", "loaded"])
def test_schemas_that_exist_already_are_left_alone(operators: str) -> None:
    program = f"""
import torch
from dualdist.utils import torchvision_import as vision
if {operators!r} == "loaded":
    vision.load_operators = lambda folders: True
theirs = torch.library.Library("torchvision", "DEF")
for schema in vision.SCHEMAS.values():
    theirs.define(schema)
print(vision.load_torchvision().__name__, vision._declare_operators.cache_info().currsize)
"""
    assert output(program) == f"torchvision {int(operators != 'loaded')}"


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
    printed = output(program)
    assert words in printed
    assert "pip install --no-deps torchvision" in printed
