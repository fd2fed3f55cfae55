"""Detection of environments recorded from real launches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dualdist.environments import ORDER, detect
from dualdist.errors import TopologyError

RECORDS: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "launcher_env.json").read_text())
ROWS = [(f"{name}-{index}", row) for name, rows in RECORDS.items() for index, row in enumerate(rows)]
RIGHT = [pytest.param(row, id=name) for name, row in ROWS if "error" not in row["expect"]]
WRONG = [pytest.param(row, id=name) for name, row in ROWS if "error" in row["expect"]]

HEAVY = """
import json, sys
sys.path[:0] = sys.argv[1:]
from dualdist.environments import detect
for row in json.load(sys.stdin):
    try:
        detect(row["env"])
    except Exception as error:
        assert type(error).__name__ == "TopologyError" and "error" in row["expect"], error
print(sorted(name for name in ("torch", "mpi4py", "horovod", "numpy") if name in sys.modules))
"""


def env_of(table: str, index: int = 0) -> dict[str, str]:
    """Return a copy of a recorded environment."""
    return dict(RECORDS[table][index]["env"])


@pytest.mark.parametrize("row", RIGHT)
def test_a_recorded_launch_gives_its_topology(row: Mapping[str, Any]) -> None:
    found = detect(row["env"])
    assert {name: getattr(found, name) for name in row["expect"]} == row["expect"]


@pytest.mark.parametrize("row", WRONG)
def test_a_recorded_contradiction_names_its_variables(row: Mapping[str, Any]) -> None:
    with pytest.raises(TopologyError) as caught:
        detect(row["env"])
    assert [word for word in row["expect"]["error"] if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", [name for name, rows in RECORDS.items() if "error" not in rows[0]["expect"]])
def test_the_ranks_of_a_recorded_launch_agree(name: str) -> None:
    """All ranks have the same size, launcher and inferred fields, on which the session relies."""
    found = [detect(row["env"]) for row in RECORDS[name]]
    size = found[0].size
    whole = [topology.rank for topology in found] == list(range(size))
    assert whole or name in ("slurm_sbatch_plain",) or size == 1
    for field in ("size", "launcher", "source", "rendezvous", "mpi", "address", "port", "inferred"):
        assert len({getattr(topology, field) for topology in found}) == 1, field


@pytest.mark.parametrize(
    ("table", "rendezvous", "mpi"),
    [
        ("torchrun", "agent", False),
        ("horovodrun_gloo_more", "horovod", False),
        ("horovodrun_mpi_openmpi4_more", "mpi", True),
        ("openmpi-4.1.4_mpirun", "mpi", True),
        ("mpich_hydra", "mpi", True),
        ("slurm_srun-none_N2x2", "slurm", False),
        ("slurm_srun_pmi2_more", "slurm", False),
        ("slurm_srun_pmix_more", "slurm", True),
        ("slurm_srun_master_exported_more", "address", False),
        ("slurm_srun_of_one_in_salloc_of_four_more", "none", False),
        ("slurm_sbatch_plain", "none", False),
    ],
)
def test_the_rendezvous_follows_from_the_launcher(table: str, rendezvous: str, mpi: bool) -> None:
    found = detect(env_of(table))
    assert (found.rendezvous, found.mpi) == (rendezvous, mpi)


def test_an_exported_master_address_is_used_under_srun_and_mpirun() -> None:
    master = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    for table in ("slurm_srun-none_N2x2", "openmpi-4.1.4_mpirun", "mpich_hydra"):
        found = detect(env_of(table) | master)
        assert (found.address, found.port, found.rendezvous) == ("n1", 29500, "address")
    found = detect(env_of("horovodrun_gloo_more") | master)
    assert (found.address, found.rendezvous) == (None, "horovod")


@pytest.mark.parametrize("half", [{"MASTER_ADDR": "n1"}, {"MASTER_PORT": "29500"}, {"MASTER_PORT": "none"}])
def test_half_a_master_address_is_ignored_if_the_launcher_has_a_rendezvous(half: dict[str, str]) -> None:
    for table in ("slurm_srun-none_N2x2", "openmpi-4.1.4_mpirun", "mpich_hydra", "horovodrun_gloo_more"):
        assert detect(env_of(table) | half) == detect(env_of(table))


def test_torchrun_takes_precedence_over_outer_launchers() -> None:
    inner = env_of("torchrun", 1)
    for outer in ("slurm_srun-none_N2x2", "openmpi-4.1.4_mpirun", "mpich_hydra", "slurm_sbatch_openmpi4"):
        assert detect(env_of(outer) | inner) == detect(inner)


def test_mpirun_takes_precedence_over_its_daemons_slurm_step() -> None:
    for inner in ("openmpi-4.1.4_mpirun", "mpich_hydra", "horovodrun_gloo_more"):
        for outer in ("slurm_srun-none_N2x2", "slurm_sbatch_plain", "slurm_interactive_step_more"):
            assert detect(env_of(outer) | env_of(inner, 1)) == detect(env_of(inner, 1))


def test_the_override_takes_precedence_without_checks() -> None:
    said = {"DUALDIST_RANK": "5", "DUALDIST_SIZE": "6", "DUALDIST_ADDRESS": "n1", "DUALDIST_PORT": "29500"}
    for rows in RECORDS.values():
        found = detect(rows[0]["env"] | said)
        assert (found.rank, found.size, found.launcher, found.address, found.port) == (5, 6, "override", "n1", 29500)


def test_special_step_ids_are_no_steps() -> None:
    env = env_of("slurm_srun-none_N2x2", 1)
    for step, launcher in (("4294967289", "srun"), ("4294967290", "none"), ("4294967294", "none")):
        assert detect(env | {"SLURM_STEP_ID": step, "SLURM_STEPID": step}).launcher == launcher


@pytest.mark.parametrize(
    ("counts", "node", "local_size"),
    [("3,1", 0, 3), ("3,1", 1, 1), ("2(x2),1", 0, 2), ("2(x2),1", 1, 2), ("2(x2),1", 2, 1), ("1(x2),3", 2, 3)],
)
def test_local_size_is_the_count_at_this_node(counts: str, node: int, local_size: int) -> None:
    env = env_of("slurm_srun-none_N2x2") | {
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_PROCID": "4",
    }
    found = detect(env)
    assert (found.local_size, found.node_rank, found.num_nodes, found.size) == (local_size, node, 3, 5)


def test_a_huge_repeat_count_is_fast() -> None:
    env = env_of("slurm_srun-none_N2x2") | {"SLURM_STEP_TASKS_PER_NODE": "2(x999999999)"}
    assert detect(env).local_size == 2


def test_an_empty_variable_counts_as_unset() -> None:
    names = {name for rows in RECORDS.values() for row in rows for name in row["env"]}
    for rows in RECORDS.values():
        row = rows[0]
        if "error" not in row["expect"]:
            assert detect(dict.fromkeys(names, "") | row["env"]) == detect(row["env"])


def test_a_lone_local_rank_or_master_address_is_no_launcher() -> None:
    found = detect(
        {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "x", "PATH": "/bin"}
    )
    assert (found.launcher, found.rank, found.size, found.rendezvous) == ("none", 0, 1, "none")


def test_agreeing_rank_and_world_size_are_accepted_with_a_launcher() -> None:
    for table in ("slurm_srun-none_N2x2", "openmpi-4.1.4_mpirun", "horovodrun_gloo_more"):
        for index, row in enumerate(RECORDS[table]):
            said = {"RANK": str(row["expect"]["rank"]), "WORLD_SIZE": str(row["expect"]["size"])}
            assert detect(env_of(table, index) | said) == detect(env_of(table, index))


def test_detect_reads_only_its_mapping_and_imports_nothing_heavy() -> None:
    root = str(Path(__file__).parents[2])
    rows = [row for rows in RECORDS.values() for row in rows]
    command = [sys.executable, "-S", "-c", HEAVY, root]
    poison = dict.fromkeys((name for row in rows for name in (*row["env"], "DUALDIST_RANK")), "from os.environ")
    done = subprocess.run(
        command, input=json.dumps(rows), env=poison, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


def test_only_the_last_environment_accepts_no_variables() -> None:
    assert len(set(ORDER)) == len(ORDER)
    assert [ask for ask in ORDER[:-1] if ask({}) is not None] == []
    assert ORDER[-1]({}) is not None
