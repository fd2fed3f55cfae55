"""The doctor: findings from facts, and the command in every recorded environment, as a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualdist.cli.doctor import configure, lines
from dualdist.doctor import Diagnosis, diagnose, judge, to_json
from dualdist.environments import detect
from dualdist.errors import TopologyError
from dualdist.horovod_build.record import BuildRecord
from dualdist.topology import Topology

RECORDS = json.loads((Path(__file__).parent / "launcher_env.json").read_text())
VERSIONS = {"dualdist": "1", "python": "3.11", "torch": "2.13.0+cpu", "horovod": "0.28.1", "mpi4py": "4.1.2"}
HOROVOD = BuildRecord(horovod="0.28.1", torch="2.13.0+cpu", gloo=True, mpi=True)
IMPORTED = """
import sys
from dualdist.cli import main
code = main(["doctor", "--json", "-"])
heavy = [name for name in ("torch", "horovod", "mpi4py", "numpy") if name in sys.modules]
assert not heavy, heavy
raise SystemExit(code)
"""


def recorded(table: str, index: int = 0) -> dict[str, str]:
    return dict(RECORDS[table][index]["env"])


def diagnosis(environ: Mapping[str, str], record: BuildRecord | None = HOROVOD, **versions: str | None) -> Diagnosis:
    found: Topology | TopologyError
    try:
        found = detect(environ)
    except TopologyError as error:
        found = error
    return judge(found, environ, VERSIONS | versions, record)


def levels(found: Diagnosis) -> list[str]:
    return [finding.level for finding in found.findings]


@pytest.mark.parametrize("table", [name for name, rows in RECORDS.items() if "error" not in rows[0]["expect"]])
def test_a_sound_launch_on_a_sound_installation_is_healthy(table: str) -> None:
    found = diagnosis(recorded(table))
    assert found.exit_code == 0
    assert found.topology == detect(recorded(table))
    assert [name for name, backend in found.backends.items() if not backend.available] == []


@pytest.mark.parametrize(
    ("record", "versions", "expected", "words"),
    [
        (None, {"horovod": None}, ["info"], "dualdist install-horovod"),
        (replace(HOROVOD, torch="2.12.0+cpu"), {}, ["warning"], "built for torch 2.12.0+cpu, but torch 2.13.0+cpu"),
        (replace(HOROVOD, torch="2.13.0+cu130"), {}, ["warning"], "2.13.0+cu130"),
        (replace(HOROVOD, torch="2.13.0+cu130"), {"torch": "2.13.0"}, [], ""),
        (replace(HOROVOD, torch=None), {}, [], ""),
        (HOROVOD, {"torch": None}, ["error"], "torch is not installed"),
        (None, {"torch": None, "horovod": None}, ["error"], "pip install torch"),
    ],
)
def test_the_installation_is_judged_by_what_would_happen(
    record: BuildRecord | None, versions: dict[str, str | None], expected: list[str], words: str
) -> None:
    found = diagnosis({}, record, **versions)
    assert sorted(levels(found)) == sorted(expected)
    assert words in json.dumps(to_json(found))
    assert found.backends["horovod"].available == (expected == [])


def test_asking_for_a_horovod_that_is_not_there_will_fail() -> None:
    found = diagnosis({"DUALDIST_BACKEND": "horovod"}, None, horovod=None)
    assert (levels(found), found.exit_code) == (["error"], 2)


def test_a_broken_environment_has_no_place_and_will_fail() -> None:
    found = diagnosis({"RANK": "0"})
    assert (found.topology, found.exit_code, to_json(found)["topology"]) == (None, 2, None)
    assert "WORLD_SIZE not set" in found.findings[0].seen


@pytest.mark.parametrize("table", ["slurm_sbatch_plain", "slurm_salloc_command_more", "slurm_interactive_step_more"])
def test_a_job_of_one_in_an_allocation_of_four_is_told_of_srun(table: str) -> None:
    found = diagnosis(recorded(table))
    assert levels(found) == ["info"]
    assert "SLURM_NTASKS=4" in found.findings[0].seen
    assert "srun -n 4 python script.py" in found.findings[0].do


@pytest.mark.parametrize("tasks", ["1", "", "x", "99999999999999999999", "٣"])
def test_no_other_number_of_tasks_is_worth_a_word(tasks: str) -> None:
    assert diagnosis({"SLURM_JOB_ID": "1", "SLURM_NTASKS": tasks}).findings == ()


def test_ranks_that_only_mpi_brings_together_need_something_that_speaks_mpi() -> None:
    env = recorded("openmpi-4.1.4_mpirun")
    without = replace(HOROVOD, mpi=False)
    assert levels(diagnosis(env, without, mpi4py=None)) == ["error"]
    assert levels(diagnosis(env, without)) == []
    assert levels(diagnosis(env, HOROVOD, mpi4py=None)) == []
    master = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert levels(diagnosis(env | master, without, mpi4py=None)) == []
    assert levels(diagnosis(env | {"DUALDIST_RENDEZVOUS": "file:///a/b"}, without, mpi4py=None)) == []


def test_asking_for_mpi_will_fail_where_it_was_not_started_or_is_missing() -> None:
    mpirun, torchrun = recorded("openmpi-4.1.4_mpirun"), recorded("torchrun")
    asked = {"DUALDIST_BACKEND": "mpi"}
    assert levels(diagnosis(mpirun | asked)) == []
    assert levels(diagnosis(mpirun | asked, mpi4py=None)) == ["error"]
    assert not diagnosis(mpirun | asked, mpi4py=None).backends["mpi"].available
    assert "MPI was not started by torchrun" in diagnosis(torchrun | asked).findings[0].seen
    assert levels(diagnosis(torchrun, mpi4py=None)) == []
    assert levels(diagnosis(asked)) == []


def test_what_is_printed_names_no_foreign_variable() -> None:
    secret = {"HOROVOD_SECRET_KEY": "hush", "PMI_SHARED_SECRET": "hush", "AWS_SECRET_ACCESS_KEY": "hush"}
    for rows in RECORDS.values():
        found = diagnosis(rows[0]["env"] | secret)
        assert "hush" not in json.dumps(to_json(found)) + "".join(lines(found))


def test_the_table_says_what_the_json_says() -> None:
    found = diagnosis(recorded("slurm_sbatch_openmpi4", 3), replace(HOROVOD, torch="1"))
    text = "\n".join(lines(found))
    for words in (
        "mpirun",
        "rank        3 of 4",
        "1 (inferred) of 2 (inferred)",
        "not available: built for torch 1",
        "warning",
    ):
        assert words in text
    assert "place       unknown" in "\n".join(lines(diagnosis({"RANK": "0"})))


def test_this_installation_has_the_versions_that_pip_says() -> None:
    from importlib.metadata import version

    found = diagnose({})
    assert found.versions["torch"] == version("torch")
    assert found.topology is not None
    assert found.topology.launcher == "none"


def test_only_one_option_is_asked_for() -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    assert parser.parse_args(["--json", "-"]).json == "-"
    assert parser.parse_args([]).json is None


def doctor(env: Mapping[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(argv or ("-m", "dualdist", "doctor", "--json", "-"))]
    return subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=60, check=False)


def test_the_command_answers_in_every_recorded_environment(base_env: Mapping[str, str]) -> None:
    rows: list[dict[str, Any]] = [rows[-1] for rows in RECORDS.values()]
    with ThreadPoolExecutor(max_workers=2) as pool:
        answers = list(pool.map(lambda row: doctor({**base_env, **row["env"]}), rows))
    for row, answer in zip(rows, answers, strict=True):
        said = json.loads(answer.stdout)
        assert answer.stderr == ""
        if "error" in row["expect"]:
            assert (said["topology"], answer.returncode) == (None, 2)
            assert all(word in said["findings"][0]["seen"] for word in row["expect"]["error"])
        else:
            assert {name: said["topology"][name] for name in row["expect"]} == row["expect"]
            assert {"node", "nodes", "source", "address", "port", "inferred"} <= said["topology"].keys()
            assert {"native", "horovod", "mpi", "single"} <= said["backends"].keys()
            expected = {"info": 0, "warning": 1, "error": 2}
            assert answer.returncode == max((expected[each["level"]] for each in said["findings"]), default=0)


def test_the_command_loads_nothing_heavy(base_env: Mapping[str, str]) -> None:
    for table in ("torchrun", "openmpi-4.1.4_mpirun", "slurm_srun-none_N2x2"):
        answer = doctor({**base_env, **recorded(table)}, "-c", IMPORTED)
        assert answer.stderr == ""
        assert json.loads(answer.stdout)["topology"]["rank"] == 0


def test_json_goes_to_a_file_beside_the_table(base_env: Mapping[str, str], tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    answer = doctor(base_env, "-m", "dualdist", "doctor", "--json", str(path))
    assert json.loads(path.read_text())["topology"]["launcher"] == "none"
    assert answer.stdout.startswith("launcher    none\n")
    answer = doctor(base_env, "-m", "dualdist", "doctor", "--json", str(tmp_path / "no" / "where.json"))
    assert answer.returncode != 0
    assert "where.json" in answer.stderr
    assert "Traceback" not in answer.stderr
