"""The record of a machine, and the arithmetic of foreign load."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dualdist.utils import machine as machine_module
from dualdist.utils.machine import (
    CpuReading,
    CpuUse,
    Machine,
    foreign_cores,
    machine,
    peak_kib,
    read_cpu,
    reset_peak,
    resident_kib,
    versions,
)


def test_what_the_machine_did_beyond_all_ranks_is_foreign() -> None:
    ranks = [CpuUse(2.0, 3.5, 1.5), CpuUse(2.1, 3.6, 1.0)]
    assert foreign_cores(ranks) == pytest.approx(0.5)
    assert foreign_cores([CpuUse(2.0, 1.0, 1.5)]) == 0.0
    assert foreign_cores([CpuUse(2.0, None, 1.5)]) is None


def test_user_nice_system_and_stolen_time_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 3 999 999 999 999 400 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(machine_module, "PROC", tmp_path)
    monkeypatch.setattr(machine_module.os, "sysconf", lambda name: 100)
    assert read_cpu().machine_s == pytest.approx(5.23)
    (tmp_path / "stat").write_text("nothing of the kind")
    assert read_cpu().machine_s is None


def test_own_work_is_seen_as_ours() -> None:
    before = read_cpu()
    while time.process_time() < before.own_s + 0.2:
        pass
    use = CpuUse.between(before, read_cpu())
    assert use.own_s >= 0.15
    assert use.window_s >= 0.15


def test_a_reading_without_the_machines_is_no_difference() -> None:
    assert CpuUse.between(CpuReading(0.0, None, 1.0), CpuReading(1.0, 5.0, 3.0)) == CpuUse(1.0, None, 2.0)


def test_peak_memory_sees_what_was_there_for_a_moment() -> None:
    if not reset_peak() or resident_kib() is None:
        pytest.skip("this system does not let a process reset its peak")
    before = peak_kib()
    block = bytearray(b"x" * (64 << 20))
    del block
    after = peak_kib()
    assert before is not None
    assert after is not None
    assert after - before > 60 << 10


def test_gpus_and_their_driver_are_named_as_the_driver_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Machine("p", 2, 4.0, False, "s").gpus, str(Machine("p", 2, 4.0, False, "s"))) == (
        (),
        "p, 2 cores, 4 GiB, s",
    )
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


def test_the_record_names_processor_cores_and_versions() -> None:
    here = machine()
    assert here.cores >= 1
    assert here.memory_gib > 0.1
    assert here.processor
    assert "torch" in versions()
