"""The variable behind each topology field, and the ignored ones, in every recorded environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from doctor_facts import HOROVOD, MPIRUN, RECORDS, VERSIONS, recorded

from dualdist.backends.registry import availability
from dualdist.doctor.diagnosis import detect_topology
from dualdist.doctor.explain import TopologyExplanation, explain
from dualdist.environments import detect
from dualdist.environments.env_values import FIELDS

BACKENDS = availability(VERSIONS, HOROVOD)
VALID = [name for name, rows in RECORDS.items() if "error" not in rows[0]["expect"]]


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
        (recorded("torchrun"), {}, "native", "torchrun"),
        (recorded("torchrun") | {"DUALDIST_BACKEND": "horovod"}, {}, "horovod", "DUALDIST_BACKEND"),
        (recorded("torchrun") | {"DUALDIST_BACKEND": "auto"}, {}, "native", "torchrun"),
        (recorded("horovodrun_gloo_more"), {}, "horovod", "Horovod's launcher"),
        (MPIRUN, {}, "horovod", "built with MPI"),
        (MPIRUN, {"backends": availability(VERSIONS, replace(HOROVOD, mpi=False))}, "mpi", "mpi4py"),
        (MPIRUN, {"backends": availability({**VERSIONS, "mpi4py": None}, None)}, "native", "neither"),
        (MPIRUN, {"backends": availability(VERSIONS, None), "has_gpu": True}, "native", "NCCL"),
        (recorded("slurm_srun-none_N2x2"), {}, "native", "srun"),
    ],
)  # fmt: skip
def test_the_backend_is_the_one_that_init_would_choose(
    environ: Mapping[str, str], changes: dict[str, Any], backend: str, words: str
) -> None:
    result = {each.name: each for each in explained(environ, **changes).fields}
    assert result["backend"].value == backend
    assert words in result["backend"].source


def test_invalid_choices_and_variables_are_listed_with_the_error() -> None:
    result = explained(recorded("torchrun") | {"DUALDIST_BACKEND": "nativ", "DUALDIST_TRANSPORT": "tcp"})
    assert "'nativ': expected one of auto, native" in result.error
    assert "'tcp': expected one of gloo" in result.error
    assert {"rank", "size", "launcher"} <= sources(result).keys()
    assert "backend" not in sources(result)
    result = explained({"RANK": "0", "SLURM_NTASKS": "4", "HOME": "/root"})
    assert "WORLD_SIZE not set" in result.error
    assert result.fields == ()
    assert list(ignored(result)) == ["RANK", "SLURM_NTASKS"]
