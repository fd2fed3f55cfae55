"""A machine that meets all requirements, from which tests remove some."""

from __future__ import annotations

from dataclasses import replace

from dualdist.horovod_build.machine import (
    BuildMachine,
    CudaToolkit,
    MpiInstallation,
    NcclInstallation,
    TorchInstallation,
)

TORCH = TorchInstallation(version="2.13.0+cpu", git="cf30153c", cxx11_abi=True, cuda=None, hip=None, cxx_standard=17)
CUDA_TORCH = replace(TORCH, version="2.13.0+cu128", cuda="12.8")
CUDA = CudaToolkit(home="/usr/local/cuda-12.8", version="12.8")
NCCL = NcclInstallation(
    include="/venv/nvidia/nccl/include", library="/venv/nvidia/nccl/lib/libnccl.so.2", version="2.27.5"
)
MPI = MpiInstallation(
    compiler="/venv/bin/mpicxx", vendor="Open MPI", version="4.1.8", library_dirs=(), mpirun="/venv/bin/mpirun"
)  # fmt: skip
MACHINE = BuildMachine(
    python="/venv/bin/python",
    python_version=(3, 11),
    abi_tag="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64",
    libc="glibc2.36",
    arch_flags=("f16c", "avx", "fma"),
    torch=TORCH,
    torch_problem="",
    missing_packages=(),
    setuptools="80.10.2",
    cxx="/usr/bin/c++",
    cxx_standards=(17, 20),
    make="/usr/bin/make",
    cmake="/venv/bin/cmake",
    cmake_version=(4, 4),
    mpi=MPI,
    mpi_problem="",
    cuda=None,
    nccl=None,
    work_dir="/tmp",
    work_free_gb=50.0,
    cache_dir="/home/u/.cache/dualdist",
    cache_free_gb=50.0,
    jobs=2,
)
