"""What the build needs to know about a machine, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TorchInstallation:
    """The installed torch; `cxx_standard` is what its headers demand, such as 17, or None if they do not say."""

    version: str
    git: str
    cxx11_abi: bool
    cuda: str | None
    hip: str | None
    cxx_standard: int | None


@dataclass(frozen=True)
class MpiInstallation:
    """The MPI that `compiler` compiles for; `library_dirs` are those outside the Python environment."""

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
    """NCCL's header folder and its shared library."""

    include: str
    library: str
    version: str


@dataclass(frozen=True)
class BuildMachine:
    """Everything seen before a build; what is None or missing was looked for and not found."""

    python: str
    python_version: tuple[int, int]
    abi_tag: str
    platform: str
    libc: str
    arch_flags: tuple[str, ...]
    torch: TorchInstallation | None
    torch_problem: str
    missing_packages: tuple[str, ...]
    setuptools: str | None
    cxx: str | None
    cxx_standards: tuple[int, ...]
    make: str | None
    cmake: str | None
    cmake_version: tuple[int, ...]
    mpi: MpiInstallation | None
    mpi_problem: str
    cuda: CudaToolkit | None
    nccl: NcclInstallation | None
    work_dir: str
    work_free_gb: float
    cache_dir: str
    cache_free_gb: float
    jobs: int


HOROVOD_VERSION = "0.28.1"
# Measured on Horovod 0.28.1: the unpacked sdist and its objects take 0.3 GB, a CUDA build several times that.
WORK_GB = 3.0
CACHE_GB = 0.2


@dataclass(frozen=True)
class BuildOptions:
    """The command line; `jobs` is None for as many as the machine carries."""

    version: str = HOROVOD_VERSION
    gpu: bool = False
    mpi: bool = True
    force: bool = False
    dry_run: bool = False
    jobs: int | None = None
