"""torchvision is importable whatever operators it was compiled with. Each case needs an interpreter of its own."""

import pytest
from harness.jobs import Launch
from launch.running import printed

pytestmark = pytest.mark.smoke


@pytest.mark.full
def test_import_of_the_helper_touches_no_torchvision(launch: Launch) -> None:
    program = "import sys, dualdist.utils.torchvision_import; print('torchvision' in sys.modules)"
    assert printed(launch, program) == "False"


def test_models_transforms_and_datasets_work(launch: Launch) -> None:
    program = """
import torch
from dualdist.utils.torchvision_import import load_torchvision
vision = load_torchvision()
assert load_torchvision() is vision
from torchvision import datasets, transforms
from torchvision.models import resnet18
print(tuple(resnet18(num_classes=10)(torch.zeros(2, 3, 32, 32)).shape), datasets.CIFAR10.__name__)
"""
    assert printed(launch, program) == "(2, 10) CIFAR10"


@pytest.mark.full
@pytest.mark.parametrize("operators", ["declared elsewhere", "loaded"])
def test_schemas_that_exist_already_are_left_alone(launch: Launch, operators: str) -> None:
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
    assert printed(launch, program) == f"torchvision {int(operators != 'loaded')}"


@pytest.mark.smoke("missing")
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("sys.meta_path = [each for each in sys.meta_path if each is not PathFinder]", "is not installed"),
        ("sys.modules['PIL'] = None", "does not work with torch"),
    ],
    ids=["missing", "half-installed"],
)
def test_missing_package_is_an_error_of_ours_with_what_to_type(launch: Launch, broken: str, words: str) -> None:
    program = f"""
import sys
from importlib.machinery import PathFinder
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
    message = printed(launch, program)
    assert words in message
    assert "pip install --no-deps torchvision" in message
