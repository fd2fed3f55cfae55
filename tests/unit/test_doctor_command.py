"""The commands `dualdist doctor` and `dualdist info`, and the variable behind each topology field."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import HOROVOD, MPIRUN, RECORDS, VALID, VERSIONS, recorded

from dualdist.backends.registry import availability
from dualdist.doctor import facts
from dualdist.doctor.diagnosis import detect_topology
from dualdist.doctor.explain import TopologyExplanation, explain
from dualdist.environments import detect
from dualdist.environments.env_values import FIELDS
from dualdist.utils import machine

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
    assert all({"name", "level", "message", "why", "fix"} <= each.keys() for each in report["findings"])


def test_json_is_written_to_a_file_in_addition_to_text_and_secrets_nowhere(
    base_env: Mapping[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "doctor.json"
    answer = python(base_env, *DOCTOR, "--explain-env", "--json", str(path))
    assert json.loads(path.read_text())["topology"]["launcher"] == "none"
    assert answer.stdout.startswith("launcher    none ")
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
        ({}, "backend single, rank 0 of 1 (no launcher started this process), with"),
        ({"DUALDIST_BACKEND": "nativ"}, ""),
    ],
)
def test_info_prints_the_backend_in_one_line_or_an_error(
    base_env: Mapping[str, str], environ: Mapping[str, str], words: str
) -> None:
    answer = python({**base_env, **environ}, "-m", "dualdist", "info")
    assert (answer.returncode, answer.stdout.count("\n")) == ((0, 1) if words else (2, 0))
    assert words in answer.stdout
    assert words or "expected one of auto, native" in answer.stderr


@pytest.mark.parametrize(
    ("build", "environ", "expected"),
    [
        ("2.13.0", {}, True),
        ("2.13.0+cu130", {"CUDA_VISIBLE_DEVICES": "0"}, True),
        ("2.13.0", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("2.13.0", {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        ("2.13.0+cpu", {}, False),
    ],
)
def test_may_use_gpus_needs_a_driver_visibility_and_a_gpu_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str, environ: dict[str, str], expected: bool
) -> None:
    about = tmp_path / f"torch-{build}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {build}\n")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not facts.may_use_gpus(environ)
    listed = tmp_path / "driver/nvidia/gpus/0000:65:00.0/information"
    listed.parent.mkdir(parents=True)
    listed.write_text("Model: \t\t NVIDIA H200\n")
    assert facts.may_use_gpus(environ) == expected


BACKENDS = availability(VERSIONS, HOROVOD)


def explained(environ: Mapping[str, str], **changes: Any) -> TopologyExplanation:
    return explain(
        environ, detect_topology(environ), changes.get("backends", BACKENDS), has_gpu=changes.get("has_gpu", False)
    )


def sources(result: TopologyExplanation) -> dict[str, str]:
    return {each.name: each.source for each in result.fields}


def ignored(result: TopologyExplanation) -> dict[str, str]:
    return {each.name: each.why for each in result.ignored}


@pytest.mark.parametrize("table", VALID)
def test_a_field_names_its_variable_or_is_inferred_and_other_variables_are_ignored(table: str) -> None:
    for row in RECORDS[table]:
        environ, topology = row["env"], detect(row["env"])
        result = explained(environ)
        for name in FIELDS:
            source, origin = sources(result)[name], dict(topology.origins).get(name)
            if origin is None:
                assert source.startswith(("inferred", "derived", "a 1-rank job")), (name, source)
                assert (name in topology.inferred) == source.startswith("inferred"), (name, source)
            elif "[" in origin:  # SLURM_STEP_TASKS_PER_NODE[0] is the first of "2(x2),1"
                assert source == f"{origin} ({environ[origin.partition('[')[0]]})"
            else:
                assert environ[origin] == str(getattr(topology, name)), (name, origin)
                assert source.startswith(origin)
        assert not {origin.partition("[")[0] for _, origin in topology.origins} & ignored(result).keys()
        assert all(why and environ[name] for name, why in ignored(result).items())


IGNORED = [
    ("mpirun_torchrun_more", "OMPI_COMM_WORLD_RANK", "torchrun is the innermost"),
    ("slurm_srun_torchrun_more", "SLURM_PROCID", "torchrun is the innermost"),
    ("slurm_batch_openmpi4_more", "SLURM_STEP_NUM_TASKS", "the daemon that started them"),
    ("slurm_batch_mpich_more", "SLURM_PROCID", "the daemon that started them"),
    ("slurm_batch_horovodrun_gloo_more", "SLURM_PROCID", "no task of a Slurm step"),
    ("slurm_srun_pmix_in_mpirun_more", "OMPI_COMM_WORLD_SIZE", "left over"),
    ("slurm_sbatch_plain", "SLURM_NTASKS", "tasks of the allocation"),
    ("slurm_sbatch_plain", "SLURM_PROCID", "no task of a Slurm step"),
    ("slurm_interactive_step_more", "SLURM_STEP_NUM_TASKS", "shells have"),
    ("slurm_batch_from_step_more", "SLURM_STEP_NUM_TASKS", "from which this batch script was submitted"),
    ("slurm_srun-none_N2x2", "SLURM_LAUNCH_NODE_IPADDR", "where srun was typed"),
    ("slurm_srun-none_N2x2", "SLURM_NTASKS", "tasks of the allocation"),
    ("openmpi-4.1.4_mpirun", "OMPI_COMM_WORLD_NODE_RANK", "not the nodes"),
    ("openmpi-4.1.4_mpirun", "PMIX_RANK", "no variable gives a size"),
    ("horovodrun_gloo_more", "HOROVOD_CROSS_RANK", "unequal hosts"),
    ("torchrun", "ROLE_RANK", "RANK is the job's"),
]


@pytest.mark.parametrize(("table", "name", "words"), IGNORED, ids=[f"{row[0]}-{row[1]}" for row in IGNORED])
def test_ignored_variables_have_a_reason(table: str, name: str, words: str) -> None:
    result = explained(recorded(table))
    assert words in ignored(result)[name]
    if table == "slurm_srun-none_N2x2":
        assert not {"SLURM_STEP_ID", "SLURM_STEPID", "SLURM_PROCID"} & ignored(result).keys()
        assert sources(result)["local_size"] == "SLURM_STEP_TASKS_PER_NODE[0] (2(x2))"


def test_the_rendezvous_is_the_one_in_the_variables() -> None:
    result = {each.name: each for each in explained(recorded("torchrun")).fields}
    assert result["rendezvous"].source.startswith("MASTER_ADDR and MASTER_PORT; the launcher's agent")
    set_by_hand = {"DUALDIST_RANK": "0", "DUALDIST_SIZE": "2", "DUALDIST_ADDRESS": "n1", "DUALDIST_PORT": "7"}
    result = {each.name: each for each in explained(set_by_hand).fields}
    assert (result["rendezvous"].value, result["rank"].source) == ("n1 port 7", "DUALDIST_RANK (0)")
    file = recorded("openmpi-4.1.4_mpirun") | {"DUALDIST_RENDEZVOUS": "file:///a/b"}
    result = {each.name: each for each in explained(file).fields}
    assert (result["rendezvous"].value, result["rendezvous"].source) == ("file:///a/b", "DUALDIST_RENDEZVOUS")
    assert "MASTER_PORT" in ignored(explained({"MASTER_ADDR": "n1"}))["MASTER_ADDR"]


@pytest.mark.parametrize(
    ("environ", "changes", "backend", "words"),
    [
        ({}, {}, "single", "no launcher"),
        (recorded("torchrun") | {"DUALDIST_BACKEND": "horovod"}, {}, "horovod", "DUALDIST_BACKEND"),
        (recorded("torchrun") | {"DUALDIST_BACKEND": "auto"}, {}, "native", "torchrun"),
        (MPIRUN, {}, "horovod", "built with MPI"),
        (MPIRUN, {"backends": availability(VERSIONS, replace(HOROVOD, mpi=False))}, "mpi", "mpi4py"),
        (MPIRUN, {"backends": availability({**VERSIONS, "mpi4py": None}, None)}, "native", "neither"),
        (MPIRUN, {"backends": availability(VERSIONS, None), "has_gpu": True}, "native", "NCCL"),
    ],
)
def test_the_backend_is_the_one_that_init_would_choose(
    environ: Mapping[str, str], changes: dict[str, Any], backend: str, words: str
) -> None:
    result = {each.name: each for each in explained(environ, **changes).fields}
    assert result["backend"].value == backend
    assert words in result["backend"].source


def test_invalid_choices_and_variables_are_listed_with_the_error() -> None:
    result = explained(recorded("torchrun") | {"DUALDIST_BACKEND": "nativ", "DUALDIST_TRANSPORT": "tcp"})
    assert "'nativ': expected one of auto, native" in result.error
    assert "'tcp': expected one of shm, gloo" in result.error
    assert {"rank", "size", "launcher"} <= sources(result).keys()
    assert "backend" not in sources(result)
    result = explained({"RANK": "0", "SLURM_NTASKS": "4", "HOME": "/root"})
    assert "WORLD_SIZE not set" in result.error
    assert result.fields == ()
    assert list(ignored(result)) == ["RANK", "SLURM_NTASKS"]
