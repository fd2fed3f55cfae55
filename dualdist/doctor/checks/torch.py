"""Python, torch with its CUDA and NCCL, and torchvision."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dualdist.doctor.context import DoctorContext
from dualdist.doctor.findings import Finding
from dualdist.doctor.host import HIDING, VISIBLE
from dualdist.horovod_build.checks import OLDEST_TORCH
from dualdist.utils.package_probe import TorchProbe

OLDEST_PYTHON = (3, 10)
INDEX = "https://download.pytorch.org/whl"
# torchvision 0.15 was made for torch 2.0, 0.16 for 2.1, and so on to this day.
VISION_AHEAD = 15


def find(case: DoctorContext) -> Iterator[Finding]:
    """What is wrong with Python, torch and torchvision."""
    yield from _of_python(case)
    said, installed = case.facts.torch, case.facts.versions.get("torch")
    if installed is None:
        yield Finding(
            "torch-missing",
            "error",
            "torch is not installed",
            "every backend needs it",
            "pip install torch, or a build for your CUDA from https://pytorch.org/get-started/locally",
            case.pip("install", "torch"),
        )
    elif isinstance(said, str):
        plain = installed.partition("+")[0]
        yield Finding(
            "torch-broken",
            "error",
            f"torch {installed} is installed, but cannot be imported: {said}",
            "every backend needs it",
            "see that no file here is called torch.py; else pip install --force-reinstall --no-deps "
            f"torch=={plain}, and a fresh environment if that does not help",
        )
    elif said is not None:
        yield from _of_torch(said, installed, case)
        yield from _of_vision(said, case)


def _of_python(case: DoctorContext) -> Iterator[Finding]:
    version, other = case.facts.versions.get("python") or "", case.facts.python_on_path
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_PYTHON:
        yield Finding(
            "python-old",
            "error",
            f"this is Python {version}",
            "dualdist needs 3.10 or newer",
            "make an environment with a newer Python",
        )
    if other is not None and other != case.facts.python:
        yield Finding(
            "python-on-path",
            "info",
            f"`python` on PATH is {other}, and this is {case.facts.python}" if other else "no `python` is on PATH",
            "mpirun, horovodrun and srun start what `python` means; `dualdist run` takes this one",
            "activate this environment, or write its path after the launcher",
        )


def _of_torch(said: TorchProbe, installed: str, case: DoctorContext) -> Iterator[Finding]:
    numbers = re.match(r"(\d+)\.(\d+)", said.version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        yield Finding(
            "torch-old",
            "error",
            f"torch {said.version} is installed",
            "dualdist hears of gradients by a hook that torch has since 2.1",
            "pip install --upgrade torch",
        )
    if said.version.partition("+")[0] != installed.partition("+")[0]:
        yield Finding(
            "torch-twice",
            "warning",
            f"pip says torch {installed}, and `import torch` finds {said.version}",
            "packages that are built for one of them do not load beside the other",
            "pip uninstall torch, again until it is gone, then install one of them",
        )
    if not said.has_distributed:
        yield Finding(
            "torch-without-distributed",
            "error" if case.asked == "native" else "warning",
            f"torch {said.version} was built without torch.distributed",
            "the backend native is made of it",
            "install another build of torch: pip install --force-reinstall torch",
        )
    yield from _of_cuda(said, case)


def _of_cuda(said: TorchProbe, case: DoctorContext) -> Iterator[Finding]:
    gpus, visible = case.facts.host.gpus, case.environ.get(VISIBLE)
    has_cuda = said.cuda is not None or said.hip is not None
    if gpus and not has_cuda:
        yield Finding(
            "torch-without-cuda",
            "warning",
            f"this host has {_count(gpus)}, but torch {said.version} is a build for CPUs",
            "everything runs on the CPUs",
            f"pip install --force-reinstall --no-deps torch=={said.version.partition('+')[0]} with the index of your "
            f"CUDA, as --index-url {INDEX}/cu128, or hide the GPUs to mean it: {VISIBLE}=",
        )
    elif has_cuda and not said.gpus and gpus and visible not in HIDING:
        reason = f": {said.gpu_warning.strip()}" if said.gpu_warning else ""
        yield Finding(
            "torch-sees-no-gpu",
            "warning",
            f"this host has {_count(gpus)}, but torch {said.version} for CUDA {said.cuda} can use none{reason}",
            "everything runs on the CPUs",
            "compare the CUDA version that nvidia-smi names, which is the newest that its driver takes, with torch's; "
            f"update the driver, or install torch for that CUDA: pip install torch --index-url {INDEX}/cu126",
        )
    if said.gpus and said.nccl is None:
        yield Finding(
            "torch-without-nccl",
            "warning",
            f"torch {said.version} sees {_count(said.gpus)}, and was built without NCCL",
            "GPU tensors would go through the CPUs' memory by Gloo",
            "install a build of torch with NCCL, as those of PyPI for Linux are",
        )


def _of_vision(said: TorchProbe, case: DoctorContext) -> Iterator[Finding]:
    vision, needs = case.facts.versions.get("torchvision"), case.facts.vision_needs
    if vision is None:
        return
    fitting = _fitting_vision(said.version)
    build = said.version.partition("+")[2]
    index = f" --index-url {INDEX}/{build}" if build else ""
    words = ("install", "--no-deps", "--force-reinstall", f"torchvision=={fitting}", *index.split())
    do = f"pip {' '.join(words)}"
    if needs is not None and needs.partition("+")[0] != said.version.partition("+")[0]:
        yield Finding(
            "torchvision-other-torch",
            "warning",
            f"torchvision {vision} is made for torch {needs}, and torch {said.version} is installed",
            "`import torchvision` fails, or its operators do; without --no-deps pip would change torch to mend it",
            do,
            case.pip(*words),
        )
    elif said.has_vision_operators is False:
        yield Finding(
            "torchvision-operators",
            "warning",
            f"the compiled part of torchvision {vision} does not load beside torch {said.version}",
            "`import torchvision` ends in `operator torchvision::nms does not exist`",
            f"{do}; or call dualdist.utils.torchvision_import.load_torchvision() first: models, transforms and data "
            "sets need no compiled part",
            case.pip(*words),
        )


def _fitting_vision(torch: str) -> str:
    """The version of torchvision that was made for a torch."""
    numbers = re.match(r"2\.(\d+)\.(\d+)", torch)
    return f"0.{int(numbers[1]) + VISION_AHEAD}.{numbers[2]}" if numbers else "(see pytorch.org)"


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"
