"""What control groups grant, from the files of real containers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dualdist.utils import resource_limits

PAGES = "9223372036854771712"
ALONE_V1 = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "memory/memory.limit_in_bytes": PAGES}
# Docker 20.10 with --cpus 1.5 --memory 2g, version 1: the path is the machine's, the folders are the container's own.
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
        pytest.param("0::/../elsewhere", {"cpu.max": "100000 100000"}, 1, None, id="outside of what is seen"),
        pytest.param("0::/", {"cpu.max": "", "memory.max": "lots"}, None, None, id="nonsense"),
        pytest.param("", {}, None, None, id="no groups"),
    ],
)
def test_what_is_granted(
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
    monkeypatch.setattr(resource_limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(resource_limits, "GROUPS", tmp_path / "groups")
    assert resource_limits.quota_cores() == cores
    assert resource_limits.memory_limit() == memory
    affinity = len(os.sched_getaffinity(0))
    assert resource_limits.usable_cores() == min(affinity, cores or affinity)
    assert resource_limits.machine_cores() == min(os.cpu_count() or 1, cores or 10**6)
