"""The build plan and the key of the cached wheel."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from horovod_build_machine import CUDA, CUDA_TORCH, MACHINE, MPI, NCCL, TORCH

from dualdist.horovod_build import plan
from dualdist.horovod_build.machine import BuildMachine, BuildOptions

PATH = "/venv/bin:/usr/bin"
WORK = Path("/tmp/work")
GPU_MACHINE = replace(MACHINE, torch=CUDA_TORCH, cuda=CUDA, nccl=NCCL)


def key(machine: BuildMachine = MACHINE, options: BuildOptions | None = None, debug: bool = False) -> str:
    return plan.make_plan(options or BuildOptions(), machine, PATH, debug).key


def variables(build_plan: plan.BuildPlan) -> dict[str, str]:
    return dict(plan.build(build_plan, WORK).variables)


CHANGES = {
    "torch version": replace(MACHINE, torch=replace(TORCH, version="2.12.0+cpu")),
    "torch commit": replace(MACHINE, torch=replace(TORCH, git="0000")),
    "C++ ABI": replace(MACHINE, torch=replace(TORCH, cxx11_abi=False)),
    "CUDA torch": replace(MACHINE, torch=CUDA_TORCH),
    "C++ standard": replace(MACHINE, torch=replace(TORCH, cxx_standard=20)),
    "Python": replace(MACHINE, abi_tag="cpython-312-x86_64-linux-gnu"),
    "C library": replace(MACHINE, libc="glibc2.28"),
    "processor": replace(MACHINE, arch_flags=()),
    "MPI vendor": replace(MACHINE, mpi=replace(MPI, vendor="MPICH")),
    "MPI version": replace(MACHINE, mpi=replace(MPI, version="5.0.11")),
    "MPI elsewhere": replace(MACHINE, mpi=replace(MPI, library_dirs=("/opt/mpi/lib",))),
}


@pytest.mark.parametrize("machine", CHANGES.values(), ids=CHANGES.keys())
def test_a_different_input_changes_the_key(machine: BuildMachine) -> None:
    assert key(machine) != key()


def test_every_option_that_changes_the_wheel_changes_the_key() -> None:
    keys = [key(), key(options=BuildOptions(mpi=False)), key(options=BuildOptions(version="0.28.0")), key(debug=True)]
    keys += [key(GPU_MACHINE), key(GPU_MACHINE, BuildOptions(gpu=True))]
    keys += [key(replace(GPU_MACHINE, nccl=replace(NCCL, version="2.28.1")), BuildOptions(gpu=True))]
    keys += [key(replace(GPU_MACHINE, cuda=replace(CUDA, version="12.9")))]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "machine",
    [
        replace(MACHINE, python="/other/bin/python", mpi=replace(MPI, compiler="/other/bin/mpicxx")),
        replace(MACHINE, mpi=replace(MPI, version="4.1.9")),
        replace(MACHINE, work_free_gb=9.0, jobs=64, cmake_version=(3, 28)),
    ],
    ids=["another environment", "another patch level of MPI", "other resources"],
)
def test_other_inputs_keep_the_key(machine: BuildMachine) -> None:
    assert key(machine) == key()


@pytest.mark.parametrize(
    ("version", "header_says", "standard"),
    [("2.13.0+cpu", 17, 17), ("2.15.0", 20, 20), ("2.13.0", None, 17), ("2.15.1+cu130", None, 20), ("3.0.0", None, 20)],
)
def test_torch_headers_decide_the_cxx_standard(version: str, header_says: int | None, standard: int) -> None:
    machine = replace(MACHINE, torch=replace(TORCH, version=version, cxx_standard=header_says))
    assert plan.cxx_standard(machine) == standard
    patches = plan.make_plan(BuildOptions(), machine, PATH).patches
    assert sum(patch.new == f"set(CMAKE_CXX_STANDARD {standard})" for patch in patches) == 2


def test_outer_make_flags_are_removed() -> None:
    seen = variables(plan.make_plan(BuildOptions(), MACHINE, PATH))
    assert seen["MAKEFLAGS"] == "-j2"
    assert seen["MFLAGS"] == seen["MAKELEVEL"] == ""
    assert variables(plan.make_plan(BuildOptions(jobs=1), MACHINE, PATH))["MAKEFLAGS"] == "-j1"


def test_without_mpi_the_build_uses_gloo_only() -> None:
    build_plan = plan.make_plan(BuildOptions(mpi=False), replace(MACHINE, mpi=None), PATH)
    assert variables(build_plan)["HOROVOD_WITHOUT_MPI"] == "1"
    assert variables(build_plan)["HOROVOD_WITH_MPI"] == ""
    assert list(plan.smoke_tests(build_plan)) == ["gloo"]
    assert (build_plan.record.mpi, build_plan.record.mpi_version) == (False, None)


def test_gpu_uses_nccl_of_the_package() -> None:
    build_plan = plan.make_plan(BuildOptions(gpu=True), GPU_MACHINE, PATH)
    seen = variables(build_plan)
    assert seen["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert seen["HOROVOD_CUDA_HOME"] == CUDA.home
    assert seen["HOROVOD_NCCL_INCLUDE"] == NCCL.include
    assert seen["HOROVOD_NCCL_LIB"] == str(plan.nccl_folder(WORK))
    assert (build_plan.record.nccl, build_plan.record.cuda) == ("2.27.5", "12.8")


def test_dry_run_prints_shell_commands() -> None:
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


def test_dry_run_with_a_cached_wheel_neither_downloads_nor_builds() -> None:
    text = "\n".join(plan.describe(plan.make_plan(BuildOptions(), MACHINE, PATH), WORK, is_cached=True))
    assert " download " not in text
    assert " wheel " not in text
    assert "--force-reinstall" in text


def test_the_wheel_name_is_the_one_pip_uses() -> None:
    name = plan.make_plan(BuildOptions(), MACHINE, PATH).cached_wheel.name
    assert name == "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
