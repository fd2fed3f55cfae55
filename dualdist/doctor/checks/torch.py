"""Python, torch with its CUDA and NCCL, and torchvision."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dualdist.doctor.checks import DoctorContext, Finding, error, info, warning
from dualdist.environments import visible_devices
from dualdist.horovod_build.machine import OLDEST_TORCH
from dualdist.utils.extension import VARIABLE
from dualdist.utils.machine import CORE
from dualdist.utils.package_probe import TorchProbe

INDEX = "https://download.pytorch.org/whl"
# torchvision 0.15 is built for torch 2.0, 0.16 for 2.1, and so on; what comes after 0.29.0 is for torch 2.14 and newer.
TORCHVISION_OFFSET = 15
UNPAIRED_TORCHVISION, UNPAIRED_TORCH = "0.29.1", 14


def find(context: DoctorContext) -> Iterator[Finding]:
    yield from _check_python(context)
    probe, installed = context.facts.torch, context.facts.versions.get("torch")
    if installed is None:
        yield error(
            "torch-missing",
            "torch is not installed",
            "every backend needs it",
            "pip install torch, or a build for your CUDA from https://pytorch.org/get-started/locally",
        )
    elif isinstance(probe, str):
        yield error(
            "torch-broken",
            f"torch {installed} is installed, but cannot be imported: {probe}",
            "every backend needs it",
            "check that no local file is named torch.py; else pip install --force-reinstall --no-deps "
            f"torch=={_release(installed)}, or use a fresh environment",
        )
    elif probe is not None:
        yield from _check_version(probe)
        yield from _check_core(installed, context)
        yield from _check_gpu_support(probe, context)
        yield from _check_torchvision(probe, context)


def _check_python(context: DoctorContext) -> Iterator[Finding]:
    other = context.facts.python_on_path
    if other is not None and other != context.facts.python:
        yield info(
            "python-on-path",
            f"`python` on PATH is {other}, not {context.facts.python}" if other else "no `python` is on PATH",
            "mpirun, horovodrun and srun start the `python` on PATH; `dualdist run` uses this interpreter",
            "activate this environment, or give the launcher the interpreter's path",
        )


def _check_version(probe: TorchProbe) -> Iterator[Finding]:
    numbers = re.match(r"(\d+)\.(\d+)", probe.version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield error(
            "torch-old",
            f"torch {probe.version} is installed",
            f"dualdist requires torch {oldest} or newer: ranks do not start with an older one",
            "pip install --upgrade torch",
        )


def _check_core(installed: str, context: DoctorContext) -> Iterator[Finding]:
    if context.facts.versions.get(CORE) != "Python" or context.environ.get(VARIABLE) == "1":
        return
    others = ", ".join(context.facts.core_built_for)
    yield Finding(
        "warning" if others else "info",
        "core-not-built",
        f"dualdist's C++ extension was built for {others} (torch and sources), not for torch {installed} and these"
        if others
        else f"dualdist's C++ extension was not built for torch {installed}",
        "Python packs the gradients, in more time, and ranks of a host use Gloo instead of shared memory",
        "with g++ on PATH: pip install --no-deps --no-build-isolation --force-reinstall --no-binary dualdist dualdist; "
        "in a clone: make setup",
    )


def _check_gpu_support(probe: TorchProbe, context: DoctorContext) -> Iterator[Finding]:
    gpus = context.facts.host.gpus
    is_gpu_build = probe.cuda is not None or probe.hip is not None
    if gpus and not is_gpu_build:
        yield warning(
            "torch-without-cuda",
            f"this host has {gpus} GPU(s), but torch {probe.version} is a CPU build",
            "everything runs on the CPU",
            f"pip install --force-reinstall --no-deps torch=={_release(probe.version)} with the index of your CUDA, "
            f"such as --index-url {INDEX}/cu128, or hide the GPUs on purpose: {visible_devices.CUDA}=",
        )
    elif is_gpu_build and not probe.gpus and gpus and not visible_devices.hides_all(context.environ):
        reason = f": {probe.gpu_warning.strip()}" if probe.gpu_warning else ""
        yield warning(
            "torch-sees-no-gpu",
            f"this host has {gpus} GPU(s), but torch {probe.version} for CUDA {probe.cuda} can use none{reason}",
            "everything runs on the CPU",
            "compare torch's CUDA version with that of nvidia-smi, the newest that the driver supports; "
            f"update the driver, or install torch for that CUDA: pip install torch --index-url {INDEX}/cu126",
        )
    if probe.gpus and probe.nccl is None:
        yield warning(
            "torch-without-nccl",
            f"torch {probe.version} sees {probe.gpus} GPU(s), but was built without NCCL",
            "GPU tensors would go through host memory and Gloo",
            "install a build of torch with NCCL, such as PyPI's for Linux",
        )


def _check_torchvision(probe: TorchProbe, context: DoctorContext) -> Iterator[Finding]:
    installed = context.facts.versions.get("torchvision")
    if installed is None or probe.has_vision_operators is not False:
        return
    build = probe.version.partition("+")[2]
    index = f" --index-url {INDEX}/{build}" if build else ""
    yield info(
        "torchvision-operators",
        f"the compiled operators of torchvision {installed} do not load with torch {probe.version}",
        "a plain `import torchvision` raises `operator torchvision::nms does not exist`",
        f"pip install --no-deps --force-reinstall '{_matching_torchvision(probe.version)}'{index}; or import it by "
        "dualdist.utils.torchvision_import.load_torchvision(), which needs no operators, as examples do",
    )


def _matching_torchvision(torch: str) -> str:
    numbers = re.match(r"2\.(\d+)\.(\d+)", torch)
    if numbers is None or int(numbers[1]) >= UNPAIRED_TORCH:
        return f"torchvision>={UNPAIRED_TORCHVISION}"
    return f"torchvision==0.{int(numbers[1]) + TORCHVISION_OFFSET}.{numbers[2]}"


def _release(version: str) -> str:
    """Return the version without its local part, such as "+cu128"."""
    return version.partition("+")[0]
