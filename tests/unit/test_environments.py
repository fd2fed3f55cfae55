"""Detection of environments recorded from real launches, and of those in launchers' manuals and sources."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import RECORDS, recorded

from dualdist.environments import ORDER, detect
from dualdist.errors import TopologyError
from dualdist.topology import Topology

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


def test_the_override_takes_precedence_without_checks_and_an_exported_address_over_none() -> None:
    master = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    for table in ("slurm_srun-none_N2x2", "openmpi-4.1.4_mpirun", "mpich_hydra"):
        found = detect(recorded(table) | master)
        assert (found.address, found.port, found.rendezvous) == ("n1", 29500, "address")
    found = detect(recorded("horovodrun_gloo_more") | master)
    assert (found.address, found.rendezvous) == (None, "horovod")
    said = {"DUALDIST_RANK": "5", "DUALDIST_SIZE": "6", "DUALDIST_ADDRESS": "n1", "DUALDIST_PORT": "29500"}
    for rows in RECORDS.values():
        found = detect(rows[0]["env"] | said)
        assert (found.rank, found.size, found.launcher, found.address, found.port) == (5, 6, "override", "n1", 29500)


def test_special_step_ids_are_no_steps() -> None:
    env = recorded("slurm_srun-none_N2x2", 1)
    for step, launcher in (("4294967289", "srun"), ("4294967290", "none"), ("4294967294", "none")):
        assert detect(env | {"SLURM_STEP_ID": step, "SLURM_STEPID": step}).launcher == launcher


@pytest.mark.parametrize(
    ("counts", "node", "local_size"),
    [("3,1", 0, 3), ("3,1", 1, 1), ("2(x999999999)", 0, 2), ("2(x2),1", 1, 2), ("2(x2),1", 2, 1), ("1(x2),3", 2, 3)],
)
def test_local_size_is_the_count_at_this_node(counts: str, node: int, local_size: int) -> None:
    env = recorded("slurm_srun-none_N2x2") | {
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_PROCID": "4",
    }
    found = detect(env)
    assert (found.local_size, found.node_rank, found.num_nodes, found.size) == (local_size, node, 3, 5)


def test_an_empty_variable_counts_as_unset() -> None:
    names = {name for rows in RECORDS.values() for row in rows for name in row["env"]}
    for rows in RECORDS.values():
        row = rows[0]
        if "error" not in row["expect"]:
            assert detect(dict.fromkeys(names, "") | row["env"]) == detect(row["env"])


def test_detect_reads_only_its_mapping_and_imports_nothing_heavy() -> None:
    root = str(Path(__file__).parents[2])
    rows = [row for rows in RECORDS.values() for row in rows]
    command = [sys.executable, "-S", "-c", HEAVY, root]
    poison = dict.fromkeys((name for row in rows for name in (*row["env"], "DUALDIST_RANK")), "from os.environ")
    done = subprocess.run(
        command, input=json.dumps(rows), env=poison, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


def test_only_the_last_environment_accepts_few_variables() -> None:
    assert len(set(ORDER)) == len(ORDER)
    assert [each for each in ORDER[:-1] if each.detect({}) is not None] == []
    assert ORDER[-1].detect({}) is not None
    found = detect(
        {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "x", "PATH": "/bin"}
    )
    assert (found.launcher, found.rank, found.size, found.rendezvous) == ("none", 0, 1, "none")


Env = dict[str, str]
ALL = frozenset({"local_rank", "local_size", "node_rank", "num_nodes"})


def place(found: Topology) -> tuple[int, ...]:
    return (found.rank, found.size, found.local_rank, found.local_size, found.node_rank, found.num_nodes)


def two_by_two(ranks: str, local_ranks: str, node_ranks: str = "", **same: str) -> list[Env]:
    """Two ranks on each of two nodes: the variables that have these numbers, and those that all ranks share."""
    return [
        same
        | dict.fromkeys(ranks.split(), str(rank))
        | dict.fromkeys(local_ranks.split(), str(rank % 2))
        | dict.fromkeys(node_ranks.split(), str(rank // 2))
        for rank in range(4)
    ]


# Lightning's LSFEnvironment; jsrun also sets Open MPI's variables.
JSM_SIZES = {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4", "LSB_JOBID": "1"}
JSM_RANKS = ("JSM_NAMESPACE_RANK OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_LOCAL_RANK")
JSM = two_by_two(*JSM_RANKS, **JSM_SIZES)
# MVAPICH2's mpispawn.c.
MVAPICH_SIZES = {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}
MVAPICH = two_by_two("MV2_COMM_WORLD_RANK PMI_ID", "MV2_COMM_WORLD_LOCAL_RANK", **MVAPICH_SIZES)
# Job scripts for ALCF's Polaris and Aurora.
PALS_SIZES = {"PMI_SIZE": "4", "PMI_LOCAL_SIZE": "2", "PALS_APID": "a", "PBS_JOBID": "1"}
PALS = two_by_two("PALS_RANKID PMI_RANK", "PALS_LOCAL_RANKID PMI_LOCAL_RANK", "PALS_NODEID", **PALS_SIZES)
# flux-environment(7).
FLUX_SIZES = {"FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "PMI_SIZE": "4", "PMI_FD": "5"}
FLUX = two_by_two("FLUX_TASK_RANK PMI_RANK", "FLUX_TASK_LOCAL_ID", **FLUX_SIZES)
BLOCK = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]


@pytest.mark.parametrize(
    ("envs", "launcher", "inferred"),
    [
        (JSM, "jsrun", {"node_rank", "num_nodes"}),
        (MVAPICH, "mpirun", {"node_rank", "num_nodes"}),
        (PALS, "mpiexec", {"num_nodes"}),
        (FLUX, "flux", {"local_size", "node_rank"}),
    ],
    ids=["jsm", "mvapich", "pals", "flux"],
)
def test_two_ranks_on_each_of_two_nodes(envs: list[Env], launcher: str, inferred: set[str]) -> None:
    found = [detect(env) for env in envs]
    assert [place(topology) for topology in found] == BLOCK
    assert {topology.launcher for topology in found} == {launcher}
    assert {topology.inferred for topology in found} == {frozenset(inferred)}
    assert all(topology.mpi and topology.rendezvous == "mpi" for topology in found)


# Ranks by slot, then by node in turn (mpirun --map-by node), then on 3 + 1.
@pytest.mark.parametrize(
    ("rank", "local_rank", "local_size", "node_rank", "num_nodes"),
    [
        *((0, 0, 2, 0, 2), (1, 1, 2, 0, 2), (2, 0, 2, 1, 2), (3, 1, 2, 1, 2)),
        *((1, 0, 2, 1, 2), (2, 1, 2, 0, 2)),
        *((0, 0, 3, 0, 2), (2, 2, 3, 0, 2)),
        *((0, 0, 4, 0, 1), (3, 1, 4, 0, 1)),
    ],
)
def test_the_node_is_inferred_for_usual_placements(
    rank: int, local_rank: int, local_size: int, node_rank: int, num_nodes: int
) -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, 4, local_rank, local_size)
    found = detect({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values, strict=True)})
    assert place(found) == (rank, 4, local_rank, local_size, node_rank, num_nodes)
    assert found.inferred == (frozenset() if local_size == 4 else {"node_rank", "num_nodes"})


def horovodrun(rank: int, size: int, local: tuple[int, int], cross: tuple[int, int]) -> Env:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local[0], "LOCAL_SIZE": local[1]}
    numbers |= {"CROSS_RANK": cross[0], "CROSS_SIZE": cross[1], "GLOO_RENDEZVOUS_PORT": 5000}
    env = {f"HOROVOD_{name}": str(value) for name, value in numbers.items()}
    return env | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "192.0.2.1"}


def test_horovodruns_node_is_inferred_on_even_hosts_and_its_cross_rank_is_none_on_uneven_ones() -> None:
    found = [
        detect(horovodrun(rank, 4, (local, 2), (node, 2)))
        for rank, local, node in ((0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1))
    ]
    assert [place(topology) for topology in found] == BLOCK
    assert {topology.inferred for topology in found} == {frozenset({"node_rank", "num_nodes"})}
    found = [
        detect(horovodrun(0, 3, (0, 1), (0, 2))),
        detect(horovodrun(1, 3, (0, 2), (1, 2))),
        detect(horovodrun(2, 3, (1, 2), (0, 1))),
    ]
    assert [(topology.local_rank, topology.local_size) for topology in found] == [(0, 1), (0, 2), (1, 2)]
    assert all({"node_rank", "num_nodes"} <= topology.inferred for topology in found)


# Kubeflow's PyTorchJob, one pod per rank without LOCAL_*; then by hand on one host; then as torch.distributed.launch.
@pytest.mark.parametrize(
    ("extra", "launcher", "expected", "inferred"),
    [
        ({"MASTER_ADDR": "job-master-0"}, "env", (1, 4, 0, 1, 1, 4), ALL),
        ({"MASTER_ADDR": "127.0.0.1"}, "env", (1, 4, 1, 4, 0, 1), ALL),
        ({"MASTER_ADDR": "n1", "LOCAL_RANK": "1"}, "env", (1, 4, 1, 4, 0, 1), ALL - {"local_rank"}),
        ({"MASTER_ADDR": "n1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
         *("torchrun", (1, 4, 1, 2, 0, 2), {"node_rank", "num_nodes"})),
        ({"MASTER_ADDR": "n1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
         "GROUP_WORLD_SIZE": "2"}, *("torchrun", (1, 4, 1, 2, 0, 2), set())),
        ({"MASTER_ADDR": "n1", "GROUP_RANK": "1"}, "torchrun", (1, 4, 0, 1, 1, 4), ALL - {"node_rank"}),
        ({"MASTER_ADDR": "n1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"},
         *("torchrun", (1, 4, 1, 2, 0, 2), {"local_rank", "local_size"})),
    ],
)  # fmt: skip
def test_rank_and_world_size_without_a_launcher(
    extra: Env, launcher: str, expected: tuple[int, ...], inferred: frozenset[str]
) -> None:
    found = detect({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"} | extra)
    assert (found.launcher, place(found), found.inferred) == (launcher, expected, frozenset(inferred))
    assert (found.address, found.port, found.rendezvous) == (extra["MASTER_ADDR"], 29500, "address")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, {"launcher": "override", "rendezvous": "none", "address": None}),
        ({"DUALDIST_LAUNCHER": "spawn"}, {"launcher": "spawn"}),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, {"address": "n1", "port": 29500, "rendezvous": "address"}),
        ({"DUALDIST_NODE_RANK": "1", "DUALDIST_NUM_NODES": "2", "DUALDIST_LOCAL_SIZE": "1"},
         {"node_rank": 1, "inferred": {"local_rank"}}),
    ],
)  # fmt: skip
def test_the_override_sets_the_given_fields(env: Env, expected: Mapping[str, Any]) -> None:
    rendezvous = {"DUALDIST_RENDEZVOUS": "file:///a/shared/folder/name"}
    found = detect({"DUALDIST_RANK": "1", "DUALDIST_SIZE": "2"} | rendezvous | env)
    assert {name: getattr(found, name) for name in expected} == expected


# The variables that pbs_mom of PBS Pro and of Torque gives to a batch script, as posted by users.
BATCH = [
    {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "188691.pbspl1", "PBS_NODENUM": "0", "PBS_TASKNUM": "1",
     "NCPUS": "8"},
    {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0", "PBS_TASKNUM": "146", "PBS_VNODENUM": "0", "PBS_NP": "4"},
]  # fmt: skip


def test_a_batch_script_of_pbs_is_one_rank_and_a_task_of_pbsdsh_is_refused() -> None:
    for env in BATCH:
        found = detect(env | {"PBS_NODEFILE": "/var/spool/pbs/aux/1"})
        assert (found.launcher, found.rank, found.size) == ("none", 0, 1)
    for name in ("PBS_NODENUM", "PBS_VNODENUM"):
        with pytest.raises(TopologyError, match=rf"{name}=1.*pbsdsh.*torchrun"):
            detect(BATCH[0] | {name: "1"})


# IBM Spectrum MPI under jsrun: PMIx gives the rank, Open MPI's variables the local rank too.
SPECTRUM = two_by_two(
    f"{JSM_RANKS[0]} PMIX_RANK",
    f"{JSM_RANKS[1]} OMPI_COMM_WORLD_LOCAL_RANK",
    **JSM_SIZES | {"JSM_NAMESPACE_ID": "1", "PMIX_NAMESPACE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    LSB_DJOB_RANKFILE="/a/rankfile",
)


def test_spectrum_mpi_must_agree_with_jsrun() -> None:
    assert [place(detect(env)) for env in SPECTRUM] == BLOCK
    with pytest.raises(TopologyError, match=r"OMPI_COMM_WORLD_RANK=0.*rank 3"):
        detect(SPECTRUM[3] | {"OMPI_COMM_WORLD_RANK": "0"})


SRUN, MPIRUN, HYDRA, HOROVODRUN = "slurm_srun-none_N2x2", "openmpi-4.1.4_mpirun", "mpich_hydra", "horovodrun_gloo_more"
PBS = {"PBS_NODENUM": "1", "LSB_JOBID": "1"}  # whose task manager may start ranks, and numbers their nodes too
WORKER = {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
HALVES = ({"MASTER_ADDR": "n1"}, {"MASTER_PORT": "29500"}, {"MASTER_PORT": "none"})


@pytest.mark.parametrize(
    ("env", "other"),
    [
        *((recorded("torchrun", 1), recorded(outer)) for outer in (SRUN, MPIRUN, HYDRA, "slurm_sbatch_openmpi4")),
        *((recorded(inner, 1), recorded(outer)) for inner in (MPIRUN, HYDRA, HOROVODRUN)
          for outer in (SRUN, "slurm_sbatch_plain", "slurm_interactive_step_more")),
        (MVAPICH[1], {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}),
        (FLUX[1], {"PALS_NODEID": "0", "PALS_RANKID": "1", "PALS_APID": "a"}),
        (FLUX[3], {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
        *((env, PBS) for env in (JSM[3], PALS[3], MVAPICH[3], WORKER | {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"})),
        *((recorded(table), half) for table in (SRUN, MPIRUN, HYDRA, HOROVODRUN) for half in HALVES),
        *((row["env"], {"RANK": str(row["expect"]["rank"]), "WORLD_SIZE": str(row["expect"]["size"])})
          for table in (SRUN, MPIRUN, HOROVODRUN) for row in RECORDS[table]),
    ],
)  # fmt: skip
def test_outer_launchers_halves_of_an_address_and_an_agreeing_rank_change_nothing(env: Env, other: Env) -> None:
    assert detect(other | env) == detect(env)
