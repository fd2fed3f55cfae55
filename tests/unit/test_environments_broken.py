"""Incomplete, impossible and contradicting variables: errors that name them, never a job of one rank."""

import pytest
from doctor_facts import recorded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualdist.environments import detect, horovodrun, mpi, slurm, torchrun
from dualdist.environments.env_values import AGENT_STORE
from dualdist.errors import TopologyError
from dualdist.topology import Topology

Env = dict[str, str]
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


# A complete environment each, and its required variables.
WHOLE = {
    "override": ({"DUALDIST_RANK": "1", "DUALDIST_SIZE": "2"} | MASTER, torchrun.OVERRIDE_NEEDED),
    "torchrun": (recorded("torchrun", 1), torchrun.NEEDED[1:]),  # without the run id it is no torchrun
    "horovodrun": (
        recorded("horovodrun_gloo_more", 1),
        (*horovodrun.RANK_VARIABLES, horovodrun.STORE_ADDRESS, horovodrun.STORE_PORT),
    ),
    "openmpi": (recorded("openmpi-4.1.4_mpirun", 1), mpi.OPENMPI.given()),
    "hydra": (recorded("mpich_hydra", 1), mpi.HYDRA.given()),
    "mvapich": (
        dict(zip(mpi.MVAPICH.given(), ("1", "4", "1", "2"), strict=True)),
        mpi.MVAPICH.given(),
    ),
    "jsm": (dict(zip(mpi.JSM.given(), ("1", "4", "1", "2"), strict=True)), mpi.JSM.given()),
    "pals": (
        {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "0", "PMI_SIZE": "4"},
        (mpi.PALS.rank, mpi.PALS.size),
    ),
    "flux": (dict(zip(mpi.FLUX.given(), ("1", "4", "1", "2"), strict=True)), mpi.FLUX.given()),
    "slurm": (recorded("slurm_srun-none_N2x2", 1), slurm.NEEDED),
    "env": ({"RANK": "1", "WORLD_SIZE": "2"} | MASTER, (*torchrun.ENV_NEEDED, *MASTER)),
}
WORDS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", horovodrun.STORE_ADDRESS, slurm.TASKS_PER_NODE)
HALVES = [pytest.param(env, name, id=f"{kind}-{name}") for kind, (env, needed) in WHOLE.items() for name in needed]
NUMBERS = [half for half in HALVES if half.values[1] not in WORDS]


def error_of(env: Env) -> str:
    with pytest.raises(TopologyError) as caught:
        detect(env)
    return str(caught.value)


@pytest.mark.parametrize(("env", "name"), HALVES)
@pytest.mark.parametrize("empty", [False, True])
def test_a_missing_variable_is_named(env: Env, name: str, empty: bool) -> None:
    half = {key: value for key, value in env.items() if key != name} | ({name: ""} if empty else {})
    message = error_of(half)
    assert name in message.partition("not set")[0], message


def test_variables_that_a_launcher_need_not_set_are_inferred() -> None:
    env = recorded("torchrun", 1)
    del env["TORCHELASTIC_RUN_ID"]
    found = detect(env)
    assert (found.launcher, found.rank, found.size, found.rendezvous) == ("torchrun", 1, 2, "agent")
    env = recorded("slurm_srun-none_N2x2", 1)
    for name in slurm.STEP_IDS:
        assert detect({key: value for key, value in env.items() if key != name}).launcher == "srun"
    env = {key: value for key, value in recorded("mpich_hydra", 1).items() if not key.startswith("MPI_")}
    found = detect(env)
    assert (found.launcher, found.rank, found.size) == ("mpirun", 1, 2)
    assert found.inferred == {"local_rank", "local_size", "node_rank", "num_nodes"}
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}).rendezvous == "none"
    assert detect({"RANK": "1", "WORLD_SIZE": "2", "DUALDIST_RENDEZVOUS": "tcp://n1:29500"}).address is None


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "0x1", "1_0", "+1", "٣", "1 2", "9" * 5000, "nan"])
@pytest.mark.parametrize(("env", "name"), NUMBERS)
def test_a_non_integer_value_is_named(env: Env, name: str, value: str) -> None:
    message = error_of(env | {name: value})
    assert message.startswith(f"{name}={value[:40]!r}"), message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("slurm", {"SLURM_PROCID": "4"}, ["SLURM_PROCID=4 but SLURM_STEP_NUM_TASKS=4", "below the size", "srun"]),
        ("slurm", {"SLURM_LOCALID": "2"}, ["SLURM_LOCALID=2 but SLURM_STEP_TASKS_PER_NODE[0]=2"]),
        ("slurm", {"SLURM_NODEID": "2"}, ["SLURM_NODEID=2 but SLURM_STEP_NUM_NODES=2"]),
        ("slurm", {"SLURM_STEP_TASKS_PER_NODE": "5"}, ["SLURM_STEP_TASKS_PER_NODE[0]=5", "SLURM_STEP_NUM_TASKS=4"]),
        ("slurm", {"SLURM_STEP_TASKS_PER_NODE": "0,4"}, ["SLURM_STEP_TASKS_PER_NODE='0,4'"]),
        ("slurm", {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "1"}, ["SLURM_NODEID=1", "1 nodes"]),
        ("slurm", {"SLURM_STEP_ID": "x"}, ["SLURM_STEP_ID='x'"]),
        ("torchrun", {"RANK": "2"}, ["RANK=2 but WORLD_SIZE=2", "torchrun"]),
        ("torchrun", {"GROUP_RANK": "1"}, ["GROUP_RANK=1 but GROUP_WORLD_SIZE=1"]),
        ("torchrun", {"MASTER_PORT": "65536"}, ["MASTER_PORT=65536", "65535"]),
        ("horovodrun", {"HOROVOD_RANK": "2"}, ["HOROVOD_RANK=2 but HOROVOD_SIZE=2"]),
        ("horovodrun", {"HOROVOD_CROSS_RANK": "1"}, ["HOROVOD_CROSS_RANK=1 but HOROVOD_CROSS_SIZE=1"]),
        ("hydra", {"PMI_SIZE": "0"}, ["PMI_SIZE=0", "at least one rank"]),
        ("env", {"LOCAL_RANK": "7"}, ["LOCAL_RANK=7 but WORLD_SIZE=2"]),
        ("override", {"DUALDIST_LOCAL_SIZE": "0"}, ["DUALDIST_LOCAL_SIZE=0 but DUALDIST_SIZE=2"]),
        ("override", {"MASTER_ADDR": ""}, ["MASTER_ADDR not set", "MASTER_PORT=29500"]),
        ("override", {"MASTER_ADDR": "", "MASTER_PORT": ""}, ["DUALDIST_ADDRESS and DUALDIST_PORT not set"]),
        ("override", {"DUALDIST_ADDRESS": "n1"}, ["DUALDIST_PORT not set", "DUALDIST_ADDRESS=n1"]),
        ("pals", {"PALS_NODEID": "4"}, ["PALS_NODEID=4 but PMI_SIZE=4"]),
        ("flux", {"FLUX_JOB_NNODES": "5"}, ["FLUX_JOB_NNODES=5 but FLUX_JOB_SIZE=4"]),
    ],
)
def test_an_impossible_number_is_named_with_its_bound(kind: str, change: Env, words: list[str]) -> None:
    message = error_of(WHOLE[kind][0] | change)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize("kind", ["slurm", "openmpi", "hydra", "mvapich", "jsm", "pals", "flux", "horovodrun"])
@pytest.mark.parametrize("said", [{"RANK": "0"}, {"WORLD_SIZE": "8"}, {"RANK": "0", "WORLD_SIZE": "8"}])
def test_rank_and_world_size_must_not_contradict_a_launcher(kind: str, said: Env) -> None:
    env, needed = WHOLE[kind]
    message = error_of(env | said)
    shown = [f"{name}={value}" for name, value in said.items()]
    assert [word for word in [*shown, needed[0], "unset", "DUALDIST_SIZE"] if word not in message] == [], message


def test_mpirun_of_one_rank_in_an_interactive_step_is_a_job_of_one() -> None:
    """Without SLURM_PTY_PORT the same variables are srun's tasks within an mpirun, which are refused."""
    step = recorded("slurm_srun_pty_more", 0)
    mpirun = dict.fromkeys(mpi.OPENMPI.given(), "1") | {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    assert detect(step | mpirun).launcher == "mpirun"
    del step["SLURM_PTY_PORT"]
    assert "mpirun says one rank, srun 2" in error_of(step | mpirun)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"PMI_RANK": "1"}, "PMI_SIZE not set"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-1@1"}, "PMIX_RANK=1"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, "SLURM_STEP_ID"),
        (recorded("slurm_srun-none_N2x2") | dict.fromkeys(slurm.STEP_IDS, ""), "SLURM_STEP_ID not set"),
        (recorded("slurm_srun_of_one_in_salloc_of_four_more") | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        (recorded("slurm_sbatch_plain") | {"WORLD_SIZE": "4"} | MASTER, "RANK not set, but WORLD_SIZE=4"),
        (WHOLE["jsm"][0] | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "OMPI_COMM_WORLD_RANK=0"),
        (WHOLE["jsm"][0] | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "JSM_NAMESPACE_RANK"),
    ],
)  # fmt: skip
def test_half_a_launcher_is_refused_and_never_a_job_of_one_rank(env: Env, words: str) -> None:
    assert words in error_of(env)


NAMES = sorted(
    {name for env, needed in WHOLE.values() for name in (*env, *needed)}
    | {*slurm.STEP_IDS, slurm.NODE_TASKS, slurm.TERMINAL, slurm.PMIX_NAMESPACE, AGENT_STORE, "PMIX_RANK"}
    | {
        *mpi.PALS_LOCAL_RANKS,
        *mpi.PALS_LOCAL_SIZES,
        *torchrun.OVERRIDE_VARIABLES.given(),
        *torchrun.OVERRIDE_ADDRESS,
        torchrun.OVERRIDE_LAUNCHER,
    }
)
VALUES = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "3", "4", "2(x2),1", "3,1", "", "slurm.pmix.1.0", "4294967290", "127.0.0.1", "65536"]
    ),
    st.text("0123456789x(),.-+_ a\u0663\x00", max_size=6),
)
ALWAYS = settings(max_examples=1000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
BASES = st.sampled_from([{}, *(env for env, _ in WHOLE.values())])


def assert_topology_or_error(env: Env) -> None:
    before = dict(env)
    try:
        found: Topology | str = detect(env)
    except TopologyError as error:
        found = str(error)
    assert isinstance(found, Topology) or any(name in found for name in env), found
    assert env == before


@ALWAYS
@given(BASES, BASES, st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_change_of_an_environment_gives_a_topology_or_a_named_error(outer: Env, inner: Env, change: Env) -> None:
    assert_topology_or_error(outer | inner | change)
