"""Description of a machine, its CPU and memory use, and limits of control groups from files of real containers."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dualdist.utils import machine as machine_module
from dualdist.utils.machine import (
    CpuUse,
    Machine,
    machine,
    read_cpu,
    reset_peak,
    resident_kib,
    versions,
)


def test_user_nice_system_and_stolen_time_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 3 999 999 999 999 400 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(machine_module, "PROC", tmp_path)
    monkeypatch.setattr(machine_module.os, "sysconf", lambda name: 100)
    assert read_cpu().machine_s == pytest.approx(5.23)
    (tmp_path / "stat").write_text("no such line")
    assert read_cpu().machine_s is None


def test_a_use_is_the_difference_of_two_readings() -> None:
    assert CpuUse(1.0, 5.0, 3.0).since(CpuUse(0.0, None, 1.0)) == CpuUse(1.0, None, 2.0)


def test_peak_memory_counts_a_freed_block() -> None:
    if not reset_peak() or resident_kib() is None:
        pytest.skip("this system does not let a process reset its peak")
    before = resident_kib(peak=True)
    block = bytearray(b"x" * (64 << 20))
    del block
    after = resident_kib(peak=True)
    assert after - before > 60 << 10


def test_gpus_and_driver_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = Machine("p", 2, 4.0, False, "s")
    assert (without.gpus, str(without)) == ((), "p, 2 cores, 4 GiB, s")
    here = machine()
    assert (here.cores >= 1, here.memory_gib > 0.1, bool(here.processor), "torch" in versions()) == (True,) * 4
    nvidia = tmp_path / "driver" / "nvidia"
    for bus in ("0000:18:00.0", "0000:2a:00.0"):
        (nvidia / "gpus" / bus).mkdir(parents=True)
        (nvidia / "gpus" / bus / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 412\n")
    monkeypatch.setattr(machine_module, "PROC", tmp_path)
    for version in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\nGCC version: gcc 13",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
    ):
        (nvidia / "version").write_text(version)
        assert machine().gpus == ("NVIDIA H200", "NVIDIA H200")
        assert ", 2 x NVIDIA H200, driver 580.95.05, " in str(machine())


PAGES = "9223372036854771712"
ALONE_V1 = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "memory/memory.limit_in_bytes": PAGES}
# Docker 20.10 with --cpus 1.5 --memory 2g, version 1: the path is the host's, the folders are the container's.
DOCKER_V1 = {
    "cpu,cpuacct/cpu.cfs_quota_us": "150000",
    "cpu,cpuacct/cpu.cfs_period_us": "100000",
    "memory/memory.limit_in_bytes": "2147483648",
}
# systemd's user slice with a quota, and a service inside it with a larger one.
NESTED = {
    "cpu.max": "max 100000",
    "user.slice/cpu.max": "400000 100000",
    "user.slice/memory.max": "8589934592",
    "user.slice/job.service/cpu.max": "600000 100000",
    "user.slice/job.service/memory.max": "max",
}


@pytest.mark.parametrize(
    ("groups", "files", "cores", "memory"),
    [
        pytest.param("3:memory:/\n1:cpu:/\n0::/", ALONE_V1, None, None, id="version 1, no limit"),
        pytest.param("9:memory:/docker/1f\n4:cpu,cpuacct:/docker/1f", DOCKER_V1, 1, 2 << 30, id="version 1, Docker"),
        pytest.param("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, None, None, id="version 2, no limit"),
        pytest.param("0::/", {"cpu.max": "250000 100000", "memory.max": "1024"}, 2, 1024, id="version 2, Docker"),
        pytest.param("0::/", {"cpu.max": "20000 100000"}, 1, None, id="less than a core"),
        pytest.param("0::/user.slice/job.service", NESTED, 4, 8 << 30, id="a group within a group"),
        pytest.param("0::/../elsewhere", {"cpu.max": "100000 100000"}, 1, None, id="outside the visible tree"),
        pytest.param("0::/", {"cpu.max": "", "memory.max": "lots"}, None, None, id="nonsense"),
        pytest.param("", {}, None, None, id="no groups"),
    ],
)
def test_limits_of_control_groups(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    groups: str,
    files: Mapping[str, str],
    cores: int | None,
    memory: int | None,
) -> None:
    for name, text in {"proc/self/cgroup": groups, **{f"groups/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n" if text else "")
    monkeypatch.setattr(machine_module, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine_module, "GROUPS", tmp_path / "groups")
    assert machine_module.quota_cores() == cores
    assert machine_module.memory_limit() == memory
    affinity = len(os.sched_getaffinity(0))
    assert machine_module.usable_cores() == min(affinity, cores or affinity)
    assert machine_module.machine_cores() == min(os.cpu_count() or 1, cores or 10**6)


@pytest.mark.parametrize(
    ("in_metadata", "in_torch"), [("9.8.7", "9.8.7+cu132"), ("9.8.7+cpu", "9.8.7+cpu"), ("9.8.7", None)]
)
def test_the_version_of_torch_names_its_build_without_an_import(
    in_metadata: str, in_torch: str | None, tmp_path: Path, base_env: Mapping[str, str]
) -> None:
    """PyPI's wheels name the build in torch.__version__ alone, by which the C++ extension is found."""
    folder = tmp_path / f"torch-{in_metadata}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {in_metadata}\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('torch was imported')")
    source = "" if in_torch is None else f"__version__ = '{in_torch}'\ndebug = False\n"
    (tmp_path / "torch/version.py").write_text(source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom dualdist.utils import machine\n"
    code += "print(machine.package_version('torch'))"
    done = subprocess.run([sys.executable, "-c", code], env=dict(base_env), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (in_torch or in_metadata)
