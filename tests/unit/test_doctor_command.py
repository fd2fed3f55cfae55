"""The commands `dualdist doctor` and `dualdist info`, run as processes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from doctor_facts import RECORDS, recorded

from dualdist.cli import doctor as command
from dualdist.doctor import Finding, facts
from dualdist.doctor.diagnosis import apply_fixes, collect_fixes

DOCTOR = ("-m", "dualdist", "doctor")
IMPORTED = """
import sys
from dualdist.cli import main
code = main(["doctor", "--json", "-"])
heavy = [name for name in ("torch", "horovod", "mpi4py", "numpy") if name in sys.modules]
assert not heavy, heavy
raise SystemExit(code)
"""


def python(env: Mapping[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *argv]
    return subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=120, check=False, input="")


BROKEN = next(name for name, rows in RECORDS.items() if "error" in rows[-1]["expect"])


@pytest.mark.parametrize("table", ["slurm_srun-none_N2x2", BROKEN])
def test_explain_env_returns_the_recorded_topology(base_env: Mapping[str, str], table: str) -> None:
    row = RECORDS[table][-1]
    answer = python({**base_env, **row["env"]}, *DOCTOR, "--explain-env", "--json", "-")
    report = json.loads(answer.stdout)
    assert answer.stderr == ""
    if table == BROKEN:
        assert (report["topology"], answer.returncode) == (None, 2)
        assert all(word in report["error"] for word in row["expect"]["error"])
    else:
        assert {name: report["topology"][name] for name in row["expect"]} == row["expect"]
        assert answer.returncode == 0
        assert {"node_rank", "num_nodes", "source", "address", "port", "inferred"} <= report["topology"].keys()


def test_doctor_imports_nothing_heavy_and_its_json_is_complete(base_env: Mapping[str, str], tmp_path: Path) -> None:
    answer = python(base_env, "-c", IMPORTED)
    assert answer.stderr == ""
    report = json.loads(answer.stdout)
    assert {"native", "horovod", "mpi", "single"} <= report["backends"].keys()
    expected = {"info": 0, "warning": 1, "error": 2}
    worst = max((expected[each["level"]] for each in report["findings"]), default=0)
    assert answer.returncode == worst == report["exit_code"]
    assert all({"name", "level", "message", "why", "fix", "command"} <= each.keys() for each in report["findings"])


def test_json_is_written_to_a_file_in_addition_to_text_and_secrets_nowhere(
    base_env: Mapping[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "doctor.json"
    answer = python(base_env, *DOCTOR, "--explain-env", "--json", str(path))
    assert json.loads(path.read_text())["topology"]["launcher"] == "none"
    assert answer.stdout.startswith("launcher    none ")
    assert "\x1b" not in answer.stdout
    answer = python(base_env, *DOCTOR, "--json", str(tmp_path / "no" / "where.json"))
    assert answer.returncode == 2
    assert "where.json" in answer.stderr
    assert "Traceback" not in answer.stderr
    env = {**base_env, **recorded("torchrun"), "DUALDIST_RENDEZVOUS": "tcp://user:hush@n1:7", "HF_TOKEN": "hush2"}
    for options in ((), ("--json", "-")):
        answer = python({**env, "MASTER_ADDR": "hush2.example"}, *DOCTOR, "--explain-env", *options)
        assert "hush" not in answer.stdout + answer.stderr
        assert "***" in answer.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-np", "0"), "-np 0: expected 1 or more"),
        (("--launchers", "mpirun"), "--launchers requires --run"),
        (("--yes",), "--yes requires --fix"),
        (("--hosts", "a", "--hostfile", "b"), "give one of them"),
        (("--run", "--launchers", "mpiru"), "did you mean 'mpirun'"),
    ],
)
def test_invalid_options_are_usage_errors(base_env: Mapping[str, str], options: tuple[str, ...], message: str) -> None:
    answer = python(base_env, *DOCTOR, *options)
    assert answer.returncode == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (recorded("torchrun"), "backend native, rank 0 of 2, started by torchrun ("),
        (recorded("horovodrun_gloo_more"), "backend horovod, rank 0 of 2, started by horovodrun ("),
        ({}, "backend single, rank 0 of 1, started by none ("),
        ({"DUALDIST_BACKEND": "nativ"}, ""),
    ],
)
def test_info_prints_the_backend_in_one_line_or_an_error(
    base_env: Mapping[str, str], environ: Mapping[str, str], words: str
) -> None:
    answer = python({**base_env, **environ}, "-m", "dualdist", "info")
    assert (answer.returncode, answer.stdout.count("\n")) == ((0, 1) if words else (1, 0))
    assert words in answer.stdout
    assert words or "expected one of auto, native" in answer.stderr


@pytest.mark.parametrize(
    ("gpus", "build", "environ", "expected"),
    [
        (("0000:65:00.0",), "2.13.0", {}, True),
        (("0000:65:00.0",), "2.13.0+cu130", {"CUDA_VISIBLE_DEVICES": "0"}, True),
        (("0000:65:00.0",), "2.13.0", {"CUDA_VISIBLE_DEVICES": ""}, False),
        (("0000:65:00.0",), "2.13.0", {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        (("0000:65:00.0",), "2.13.0+cpu", {}, False),
        ((), "2.13.0", {}, False),
    ],
)
def test_may_use_gpus_needs_a_driver_visibility_and_a_gpu_build(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...],
    build: str,
    environ: dict[str, str],
    expected: bool,
) -> None:
    for gpu in gpus:
        (tmp_path / "gpus" / gpu).mkdir(parents=True)
    about = tmp_path / f"torch-{build}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {build}\n")
    monkeypatch.setattr(facts, "GPUS", tmp_path / "gpus")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert facts.may_use_gpus(environ) == expected


FIXABLE = Finding("error", "x", "x is missing", "it is needed", "make x", (sys.executable, "-c", "open('made', 'w')"))


@pytest.mark.parametrize(
    ("typed", "is_made"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False), (None, False)]
)
def test_a_fix_runs_only_after_yes_on_a_terminal(
    typed: str | None, is_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.chdir(tmp_path)
    with os.fdopen(theirs) as terminal, os.fdopen(ours, "w") as keyboard, Path(os.devnull).open() as null:
        monkeypatch.setattr(sys, "stdin", null if typed is None else terminal)
        keyboard.write(typed or "")
        keyboard.flush()
        done = apply_fixes(collect_fixes([FIXABLE, FIXABLE]), os.environ, command._confirm, command._log)
    assert (done, (tmp_path / "made").exists()) == (int(is_made), is_made)
    report = capfd.readouterr().err
    assert "x is missing" in report
    assert ("pass --yes to confirm" if typed is None else "[y/N]") in report
