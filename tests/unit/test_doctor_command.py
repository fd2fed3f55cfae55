"""The commands `dualdist doctor` and `dualdist info`, as processes of their own."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import RECORDS, recorded

from dualdist.cli import doctor as command
from dualdist.doctor import Finding, host
from dualdist.doctor.findings import apply, fixes

DOCTOR = ("-m", "dualdist", "doctor")
IMPORTED = """
import sys
from dualdist.cli import main
code = main(["doctor", "--json", "-"])
heavy = [name for name in ("torch", "horovod", "mpi4py", "numpy") if name in sys.modules]
assert not heavy, heavy
raise SystemExit(code)
"""


def python(env: Mapping[str, str], *argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )


# Of each kind one; without processes all are explained in test_explain_env.py.
TABLES = ("torchrun", "openmpi-4.1.4_mpirun", "slurm_srun-none_N2x2", "slurm_sbatch_plain")
BROKEN = next(name for name, rows in RECORDS.items() if "error" in rows[-1]["expect"])


def test_the_environment_is_explained_as_it_was_recorded(base_env: Mapping[str, str]) -> None:
    rows: list[dict[str, Any]] = [RECORDS[name][-1] for name in (*TABLES, BROKEN)]
    explain = (*DOCTOR, "--explain-env", "--json", "-")
    with ThreadPoolExecutor(max_workers=2) as pool:
        answers = list(pool.map(lambda row: python({**base_env, **row["env"]}, *explain), rows))
    for row, answer in zip(rows, answers, strict=True):
        said = json.loads(answer.stdout)
        assert answer.stderr == ""
        if "error" in row["expect"]:
            assert (said["topology"], answer.returncode) == (None, 2)
            assert all(word in said["error"] for word in row["expect"]["error"])
        else:
            assert {name: said["topology"][name] for name in row["expect"]} == row["expect"]
            assert answer.returncode == 0
            assert {"node_rank", "num_nodes", "source", "address", "port", "inferred"} <= said["topology"].keys()


def test_the_doctor_loads_nothing_heavy_and_says_all_in_json(base_env: Mapping[str, str], tmp_path: Path) -> None:
    answer = python(base_env, "-c", IMPORTED)
    assert answer.stderr == ""
    said = json.loads(answer.stdout)
    assert {"native", "horovod", "mpi", "single"} <= said["backends"].keys()
    expected = {"info": 0, "warning": 1, "error": 2}
    worst = max((expected[each["level"]] for each in said["findings"]), default=0)
    assert answer.returncode == worst == said["exit_code"]
    assert all({"name", "level", "seen", "why", "do"} <= each.keys() for each in said["findings"])


def test_json_goes_to_a_file_beside_the_findings(base_env: Mapping[str, str], tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    answer = python(base_env, *DOCTOR, "--explain-env", "--json", str(path))
    assert json.loads(path.read_text())["topology"]["launcher"] == "none"
    assert answer.stdout.startswith("launcher    none ")
    assert "\x1b" not in answer.stdout
    answer = python(base_env, *DOCTOR, "--json", str(tmp_path / "no" / "where.json"))
    assert answer.returncode == 2
    assert "where.json" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_secrets_stay_here(base_env: Mapping[str, str]) -> None:
    env = {**base_env, **recorded("torchrun"), "DUALDIST_RENDEZVOUS": "tcp://user:hush@n1:7", "HF_TOKEN": "hush2"}
    for options in ((), ("--json", "-")):
        answer = python({**env, "MASTER_ADDR": "hush2.example"}, *DOCTOR, "--explain-env", *options)
        assert "hush" not in answer.stdout + answer.stderr
        assert "***" in answer.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-np", "0"), "-np 0: expected 1 or more"),
        (("--launchers", "mpirun"), "--launchers goes with --run"),
        (("--yes",), "--yes goes with --fix"),
        (("--hosts", "a", "--hostfile", "b"), "give one of them"),
        (("--run", "--launchers", "mpiru"), "did you mean 'mpirun'"),
    ],
)
def test_what_cannot_be_asked_for_is_an_error_and_no_warning(
    base_env: Mapping[str, str], words: tuple[str, ...], said: str
) -> None:
    answer = python(base_env, *DOCTOR, *words)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("torchrun", ["backend native, rank 0 of 2, started by torchrun ("]),
        ("horovodrun_gloo_more", ["backend horovod, rank 0 of 2, started by horovodrun ("]),
        (None, ["backend single, rank 0 of 1, started by none ("]),
    ],
)
def test_one_line_says_which_backend_it_would_be(
    base_env: Mapping[str, str], table: str | None, words: list[str]
) -> None:
    answer = python({**base_env, **(recorded(table) if table else {})}, "-m", "dualdist", "info")
    assert answer.returncode == 0
    assert answer.stdout.count("\n") == 1
    assert all(word in answer.stdout for word in words), answer.stdout


def test_no_line_says_a_backend_that_there_is_not(base_env: Mapping[str, str]) -> None:
    for words, code in ((("info",), 1), (("doctor", "--explain-env"), 2)):
        answer = python({**base_env, "DUALDIST_BACKEND": "nativ"}, "-m", "dualdist", *words)
        assert (answer.returncode, "expected one of auto, native" in answer.stdout + answer.stderr) == (code, True)


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
def test_a_gpu_counts_where_torch_may_use_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...],
    build: str,
    environ: dict[str, str],
    expected: bool,
) -> None:
    """By the driver's list, the variable, and the build of the torch that is found first."""
    for gpu in gpus:
        (tmp_path / "gpus" / gpu).mkdir(parents=True)
    about = tmp_path / f"torch-{build}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {build}\n")
    monkeypatch.setattr(host, "GPUS", tmp_path / "gpus")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert host.may_use_gpus(environ) == expected


FIXABLE = Finding("x", "error", "x is missing", "it is needed", "make x", (sys.executable, "-c", "open('made', 'w')"))


@pytest.mark.parametrize(("typed", "is_made"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False)])
def test_a_fix_waits_for_a_yes(
    typed: str, is_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a real terminal: nothing happens before the answer, and nothing after another one."""
    ours, theirs = pty.openpty()
    monkeypatch.chdir(tmp_path)
    with os.fdopen(theirs, "r") as terminal, os.fdopen(ours, "w") as keyboard:
        monkeypatch.setattr(sys, "stdin", terminal)
        keyboard.write(typed)
        keyboard.flush()
        done = apply(fixes([FIXABLE, FIXABLE]), os.environ, command._ask, command._say)
    assert (done, (tmp_path / "made").exists()) == (int(is_made), is_made)
    said = capfd.readouterr().err
    assert "x is missing" in said
    assert "[y/N]" in said


def test_where_nobody_can_answer_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert apply(fixes([FIXABLE]), os.environ, command._ask, command._say) == 0
    assert not (tmp_path / "made").exists()
    assert "--yes means yes" in capfd.readouterr().err
