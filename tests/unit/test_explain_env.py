"""From which variable each part of a place came, and why others did not count, in every recorded environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from doctor_facts import HOROVOD, MPIRUN, RECORDS, VERSIONS, recorded

from dualdist.backends.availability import available
from dualdist.doctor.diagnosis import place
from dualdist.doctor.explain import TopologyExplanation, explain
from dualdist.environments import detect
from dualdist.environments.env_values import FIELDS

BACKENDS = available(VERSIONS, HOROVOD)
SOUND = [name for name, rows in RECORDS.items() if "error" not in rows[0]["expect"]]


def explained(environ: Mapping[str, str], **changes: Any) -> TopologyExplanation:
    return explain(environ, place(environ), changes.get("backends", BACKENDS), has_gpu=changes.get("has_gpu", False))


def sources(told: TopologyExplanation) -> dict[str, str]:
    return {part.name: part.source for part in told.parts}


def ignored(told: TopologyExplanation) -> dict[str, str]:
    return {each.name: each.why for each in told.ignored}


@pytest.mark.parametrize("table", SOUND)
def test_every_part_names_a_variable_that_has_its_value_or_says_that_it_was_inferred(table: str) -> None:
    for row in RECORDS[table]:
        environ, topology = row["env"], detect(row["env"])
        told = explained(environ)
        for name in FIELDS:
            source, origin = sources(told)[name], dict(topology.origins).get(name)
            if origin is None:
                assert source.startswith(("inferred", "follows", "a job of one rank")), (name, source)
                assert (name in topology.inferred) == source.startswith("inferred"), (name, source)
            elif "[" in origin:  # SLURM_STEP_TASKS_PER_NODE[0] is the first of "2(x2),1"
                assert source == f"{origin} ({environ[origin.partition('[')[0]]})"
            else:
                assert environ[origin] == str(getattr(topology, name)), (name, origin)
                assert source.startswith(origin)


@pytest.mark.parametrize("table", SOUND)
def test_a_variable_is_used_or_ignored_and_never_both(table: str) -> None:
    environ = RECORDS[table][-1]["env"]
    told = explained(environ)
    used = {origin.partition("[")[0] for _, origin in detect(environ).origins}
    assert not used & ignored(told).keys()
    assert all(why and environ[name] for name, why in ignored(told).items())


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
def test_what_is_ignored_is_ignored_for_its_own_reason(table: str, name: str, words: str) -> None:
    assert words in ignored(explained(recorded(table)))[name]


def test_the_step_that_told_that_srun_started_this_is_not_called_ignored() -> None:
    told = explained(recorded("slurm_srun-none_N2x2"))
    assert not {"SLURM_STEP_ID", "SLURM_STEPID", "SLURM_PROCID"} & ignored(told).keys()
    assert sources(told)["local_size"] == "SLURM_STEP_TASKS_PER_NODE[0] (2(x2))"


def test_rank_0_is_met_where_the_variables_say() -> None:
    told = {part.name: part for part in explained(recorded("torchrun")).parts}
    assert told["ranks meet"].source.startswith("MASTER_ADDR and MASTER_PORT; the launcher's agent")
    set_by_hand = {"DUALDIST_RANK": "0", "DUALDIST_SIZE": "2", "DUALDIST_ADDRESS": "n1", "DUALDIST_PORT": "7"}
    told = {part.name: part for part in explained(set_by_hand).parts}
    assert (told["ranks meet"].value, told["rank"].source) == ("n1 port 7", "DUALDIST_RANK (0)")
    file = recorded("openmpi-4.1.4_mpirun") | {"DUALDIST_RENDEZVOUS": "file:///a/b"}
    told = {part.name: part for part in explained(file).parts}
    assert (told["ranks meet"].value, told["ranks meet"].source) == ("file:///a/b", "DUALDIST_RENDEZVOUS")
    assert "MASTER_PORT" in ignored(explained({"MASTER_ADDR": "n1"}))["MASTER_ADDR"]


@pytest.mark.parametrize(
    ("environ", "changes", "backend", "words"),
    [
        ({}, {}, "single", "no launcher"),
        (recorded("torchrun"), {}, "native", "torchrun"),
        (recorded("torchrun") | {"DUALDIST_BACKEND": "horovod"}, {}, "horovod", "DUALDIST_BACKEND"),
        (recorded("torchrun") | {"DUALDIST_BACKEND": "auto"}, {}, "native", "torchrun"),
        (recorded("horovodrun_gloo_more"), {}, "horovod", "Horovod's own"),
        (MPIRUN, {}, "horovod", "built with MPI"),
        (MPIRUN, {"backends": available(VERSIONS, replace(HOROVOD, mpi=False))}, "mpi", "mpi4py"),
        (MPIRUN, {"backends": available({**VERSIONS, "mpi4py": None}, None)}, "native", "neither"),
        (MPIRUN, {"backends": available(VERSIONS, None), "has_gpu": True}, "native", "NCCL"),
        (recorded("slurm_srun-none_N2x2"), {}, "native", "srun"),
    ],
)  # fmt: skip
def test_the_backend_is_the_one_that_init_would_take(
    environ: Mapping[str, str], changes: dict[str, Any], backend: str, words: str
) -> None:
    told = {part.name: part for part in explained(environ, **changes).parts}
    assert told["backend"].value == backend
    assert words in told["backend"].source


def test_a_choice_that_means_nothing_is_told_beside_the_place() -> None:
    told = explained(recorded("torchrun") | {"DUALDIST_BACKEND": "nativ", "DUALDIST_TRANSPORT": "tcp"})
    assert "'nativ': expected one of auto, native" in told.error
    assert "'tcp': expected one of gloo" in told.error
    assert {"rank", "size", "launcher"} <= sources(told).keys()
    assert "backend" not in sources(told)


def test_a_broken_environment_is_shown_as_it_is() -> None:
    told = explained({"RANK": "0", "SLURM_NTASKS": "4", "HOME": "/root"})
    assert "WORLD_SIZE not set" in told.error
    assert told.parts == ()
    assert list(ignored(told)) == ["RANK", "SLURM_NTASKS"]
