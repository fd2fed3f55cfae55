"""Findings about an installation, a host and the job on it, by tables of facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doctor_facts import (
    FACTS,
    GPUS,
    HOROVOD,
    MPICH,
    MPIRUN,
    OPENMPI4,
    OPENMPI5,
    TORCHRUN,
    VALID,
    diagnosis,
    finding_named,
    levels,
    recorded,
    with_facts,
    with_horovod,
    with_host,
    with_python_core,
    with_torch,
    with_versions,
)

from dualdist.cli.doctor import format_diagnosis
from dualdist.doctor.diagnosis import to_json
from dualdist.doctor.facts import InstallationFacts, Mpi4pyProbe, MpiProgram, parse_srun_mpi_types
from dualdist.environments import detect

# A valid launch, but not of a training: a script or a shell in an allocation of several tasks.
OUTSIDE_STEP = {
    "slurm_sbatch_plain": "warning",
    "slurm_batch_more": "warning",
    "slurm_batch_from_step_more": "warning",
    "slurm_salloc_command_more": "info",
    "slurm_interactive_step_more": "info",
}


@pytest.mark.parametrize("table", VALID)
def test_a_valid_launch_of_a_healthy_installation_has_no_findings(table: str) -> None:
    environ, facts = recorded(table), FACTS
    if "mpich" in table or "intel" in table:
        facts = replace(
            FACTS,
            mpi_programs=(MPICH,),
            mpi4py=Mpi4pyProbe("MPICH Version: 4.0.2"),
            horovod=replace(HOROVOD, mpi_version="MPICH 4.0.2"),
        )
    result = diagnosis(environ, facts)
    expected = {"slurm-one-process": OUTSIDE_STEP[table]} if table in OUTSIDE_STEP else {}
    if table == "slurm_srun_torchrun_more":  # of two nodes that were one host
        expected = {"master-is-loopback": "error"}
    assert {each.name: each.level for each in result.findings} == expected
    assert result.topology == detect(environ)
    assert [name for name, backend in result.backends.items() if not backend.available] == []


BARE = with_versions(with_facts(torch=None, horovod=None, mpi4py=None), torch=None, horovod=None, mpi4py=None)
VISION = with_versions(torchvision="0.28.0")
OTHER_VISION = replace(VISION, torch=replace(VISION.torch, has_vision_operators=False))
NEWER = replace(OTHER_VISION.torch, version="2.15.0")
NO_HOROVOD = with_versions(with_facts(horovod=None), horovod=None)
OTHER_MPI, OTHER_MPI4PY = (
    with_horovod(mpi_version="MPICH 4.0.2"),
    with_facts(mpi4py=Mpi4pyProbe("MPICH Version: 4.0.2")),
)
REQUESTED = {"DUALDIST_BACKEND": "horovod"}


def openmpi5(**changes: Any) -> InstallationFacts:
    mpi4py = Mpi4pyProbe("Open MPI v5.0.11")
    return with_facts(mpi_programs=(OPENMPI5,), mpi4py=mpi4py, horovod=replace(HOROVOD, **changes))


INSTALLATIONS = [
    ("healthy", FACTS, {}, {}),
    ("healthy with GPUs", GPUS, {}, {}),
    ("nothing", BARE, {}, {"torch-missing": "error", "horovod-missing": "info"}),
    ("broken torch", with_facts(torch="ImportError: libc10.so"), {}, {"torch-broken": "error"}),
    ("old torch", with_versions(with_torch(version="2.7.1"), torch="2.7.1"), {},
     {"torch-old": "error", "horovod-other-torch": "warning"}),

    ("core in Python", with_python_core("2_13_0_cpu"), {"DUALDIST_NO_EXTENSION": "1"}, {}),
    ("no core", with_python_core(), {}, {"core-not-built": "info"}),
    ("core of another torch", with_python_core("2_12_0_cpu"), {}, {"core-not-built": "warning"}),
    ("another Python on PATH", with_facts(python_on_path="/usr/bin/python"), {}, {"python-on-path": "info"}),
    ("no Python on PATH", with_facts(python_on_path=""), {}, {"python-on-path": "info"}),
    ("torchvision that fits", replace(VISION, torch=replace(VISION.torch, has_vision_operators=True)), {}, {}),
    ("torchvision of another build", OTHER_VISION, {}, {"torchvision-operators": "info"}),
    ("a CPU torch beside GPUs", with_host(gpus=2), {}, {"torch-without-cuda": "warning"}),
    ("a driver that is too old", replace(GPUS, torch=replace(GPUS.torch, gpus=0)), {},
     {"torch-sees-no-gpu": "warning"}),
    ("GPUs that are hidden", replace(GPUS, torch=replace(GPUS.torch, gpus=0)), {"CUDA_VISIBLE_DEVICES": ""},
     {"gpus-hidden": "info"}),
    ("GPUs without NCCL", replace(GPUS, torch=replace(GPUS.torch, nccl=None)), {}, {"torch-without-nccl": "warning"}),
    ("no Horovod", NO_HOROVOD, {}, {"horovod-missing": "info"}),
    ("no Horovod, wanted", NO_HOROVOD, REQUESTED, {"horovod-missing": "error"}),
    ("Horovod of another torch", with_horovod(torch="2.12.0+cpu"), {}, {"horovod-other-torch": "warning"}),
    ("Horovod of another torch, wanted", with_horovod(torch="2.12.0"), REQUESTED, {"horovod-other-torch": "error"}),
    ("Horovod of PyPI's torch", with_versions(with_torch(with_horovod(torch="2.13.0+cu130"), version="2.13.0"),
     torch="2.13.0"), {}, {}),
    ("Horovod that says nothing", with_horovod(torch=None, mpi_version=None), {}, {}),
    ("Horovod of another Python", with_horovod(python="cpython-39-x86_64-linux-gnu"), {},
     {"horovod-other-python": "warning"}),
    ("Horovod of another MPI", OTHER_MPI, {}, {"horovod-other-mpi": "warning"}),
    ("Horovod of another MPI, under it", OTHER_MPI, MPIRUN | REQUESTED, {"horovod-other-mpi": "error"}),
    ("Horovod without NCCL", replace(GPUS, horovod=replace(HOROVOD, torch="2.13.0")), {},
     {"horovod-without-nccl": "warning"}),
    ("a foreign Horovod that says nothing", replace(GPUS, horovod=replace(HOROVOD, torch="2.13.0", gloo=None)), {}, {}),
    ("Horovod without Gloo", with_horovod(gloo=False), {}, {"horovod-without-gloo": "warning"}),
    ("Horovod without Gloo, wanted", with_horovod(gloo=False), TORCHRUN | REQUESTED, {"horovod-without-gloo": "error"}),
    ("Open MPI 5", openmpi5(mpi_version="Open MPI 5.0.11"), {}, {"horovodrun-openmpi-5": "warning"}),
    ("Open MPI 5, patched", openmpi5(mpi_version="Open MPI 5.0.11", patches=("horovod/runner/mpi_run.py: x",)), {},
     {}),
    ("Open MPI 5 and a foreign Horovod", openmpi5(gloo=None, mpi=None, mpi_version=None), {},
     {"horovodrun-openmpi-5": "warning"}),
    ("Open MPI 5 and a Horovod without MPI", openmpi5(mpi=False, mpi_version=None), {}, {}),
    ("mpi4py of another MPI, under it", OTHER_MPI4PY, MPIRUN, {"mpi4py-other-mpi": "error"}),
    ("mpi4py of an MPI that is not known", with_facts(mpi4py=Mpi4pyProbe("Fujitsu MPI")), {}, {}),
    ("broken mpi4py, wanted", with_facts(mpi4py="RuntimeError: cannot load"), MPIRUN, {"mpi4py-broken": "error"}),
    ("two MPIs, mixed", with_facts(mpi_programs=(OPENMPI4, replace(MPICH, program="mpiexec"))), {},
     {"two-mpis": "warning"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "environ", "expected"), [row[1:] for row in INSTALLATIONS], ids=[r[0] for r in INSTALLATIONS]
)
def test_installation_problems_have_a_name_and_a_level(
    facts: InstallationFacts, environ: dict[str, str], expected: Any
) -> None:
    assert levels(environ, facts) == expected


def test_findings_name_the_problem_and_the_fix() -> None:
    """Others are looked for where they are real: in tests/launch/test_doctor.py."""
    result = finding_named("torchvision-operators", diagnosis({}, OTHER_VISION))
    assert "torchvision 0.28.0" in result.message
    assert "nms does not exist" in result.why
    assert (
        "--no-deps --force-reinstall 'torchvision==0.28.0' --index-url https://download.pytorch.org/whl/cpu"
        in result.fix
    )
    newer = diagnosis({}, replace(OTHER_VISION, torch=NEWER))
    assert "'torchvision>=0.29.1'" in finding_named("torchvision-operators", newer).fix
    busy = diagnosis({"OMP_NUM_THREADS": "4"}, with_host(cores=4, total_cores=4), 2)
    assert "export OMP_NUM_THREADS=2" in finding_named("thread-oversubscription", busy).fix


def test_the_worst_finding_sets_the_exit_code_and_comes_first() -> None:
    mild = with_versions(with_facts(horovod=None), horovod=None)
    assert diagnosis({}, FACTS).exit_code == 0
    assert diagnosis({}, mild).exit_code == 0
    worse = with_host(mild, shm_free=0)
    assert diagnosis({}, worse).exit_code == 1
    worst = replace(worse, torch="no torch")
    result = diagnosis({}, worst)
    assert (result.exit_code, result.findings[0].level, result.findings[-1].level) == (2, "error", "info")
    assert to_json(result)["exit_code"] == 2


def test_the_text_shows_topology_backends_and_findings() -> None:
    result = diagnosis(recorded("slurm_sbatch_openmpi4", 3), with_horovod(torch="1"))
    text = "\n".join(format_diagnosis(result))
    for words in (
        "rank 3 of 4, local rank 1, node 1 (inferred)",
        "started by mpirun",
        "not horovod: built for torch 1",
        "warning",
    ):
        assert all(part in text for part in words.split(", ")), text
    unknown = diagnosis({"RANK": "0"})
    assert (unknown.topology, unknown.exit_code, to_json(unknown)["topology"]) == (None, 2, None)
    assert "WORLD_SIZE not set" in unknown.findings[0].message
    assert "unknown: the variables are invalid" in "\n".join(format_diagnosis(unknown))
    assert str(MpiProgram("mpirun", "/x", "unknown", "")) == "/x (an unknown MPI)"


@pytest.mark.parametrize(
    ("output", "types"),
    [
        ("MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\n"
         "specific pmix plugin versions available: pmix_v4",
         ("cray_shasta", "none", "pmi2", "pmix", "pmix_v4")),
        ("srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n", ("none", "pmi2", "openmpi")),
        ("srun: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_srun_mpi_types_are_parsed(output: str, types: tuple[str, ...] | None) -> None:
    assert parse_srun_mpi_types(output) == types


SRUN = recorded("slurm_srun-none_N2x2")
ON_TWO_NODES, ONE_TASK = recorded("slurm_sbatch_openmpi4"), recorded("slurm_srun_of_one_in_salloc_of_four_more")
ONE_GPU = replace(GPUS, torch=replace(GPUS.torch, gpus=1))
NO_PMIX = with_facts(srun_mpi_types=("none", "pmi2"))
BRIDGED = with_host(interfaces={"eth0": "10.0.0.1", "docker0": "172.17.0.1"})
BUSY = with_host(cores=4, total_cores=4)
JOBS = [
    ("Slurm gives one task all GPUs", GPUS, ONE_TASK |
     {"SLURM_STEP_GPUS": "0,1,2,3"}, None, {"slurm-one-task": "warning"}),
    ("a script that is one task has all GPUs", GPUS, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
     "SLURM_JOB_GPUS": "0,1,2,3"}, None, {"slurm-one-task": "warning"}),
    ("a script on two nodes that names no tasks", FACTS, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0",
     "SLURM_JOB_NUM_NODES": "2"}, None, {"slurm-one-process": "warning"}),
    ("srun without PMIx", NO_PMIX, {}, None, {"srun-without-pmix": "info"}),
    ("srun without PMIx, wanted", NO_PMIX, {"DUALDIST_BACKEND": "mpi"}, None, {"srun-without-pmix": "error"}),
    ("srun with PMIx", with_facts(srun_mpi_types=("none", "pmix_v4")), {}, None, {}),
    ("MPI wanted where it was not started", FACTS, TORCHRUN | {"DUALDIST_BACKEND": "mpi"}, None,
     {"backend-impossible": "error"}),
    ("MPI wanted where mpi4py is missing", with_versions(with_facts(mpi4py=None), mpi4py=None),
     MPIRUN | {"DUALDIST_BACKEND": "mpi"}, None, {"backend-impossible": "error"}),
    ("more ranks than GPUs", ONE_GPU, TORCHRUN, None, {"more-ranks-than-gpus": "error"}),
    ("a GPU and no number of ranks", ONE_GPU, {}, None, {}),
    ("a GPU and two ranks planned", ONE_GPU, {}, 2, {"more-ranks-than-gpus": "warning"}),
    ("a GPU for each task", ONE_GPU,
     recorded("slurm_srun_pmi2_more") | {"CUDA_VISIBLE_DEVICES": "0"}, None, {"gpus-hidden-per-task": "info"}),
    ("one GPU for two tasks", with_host(ONE_GPU, gpus=1),
     recorded("slurm_srun_pmi2_more"), None, {"more-ranks-than-gpus": "error"}),
    ("little shared memory", with_host(shm_free=7 << 20), {}, None, {"shm-too-small": "warning"}),
    ("no shared memory", with_host(shm_free=None), {}, 1, {"shm-too-small": "warning"}),
    ("few files", with_host(open_files=(256, 256)), {}, None, {"too-few-files": "warning"}),
    ("few files for many ranks", with_host(open_files=(4096, 4096)), {}, 1000, {"too-few-files": "warning"}),
    ("little locked memory", with_host(locked_memory=(8 << 20, 8 << 20), infiniband=("mlx5_0",)), {}, None,
     {"locked-memory": "warning"}),
    ("too many threads", BUSY, {"OMP_NUM_THREADS": "4"}, 2, {"thread-oversubscription": "warning"}),
    ("nested threads", BUSY, {"OMP_NUM_THREADS": "4,2"}, 2, {"thread-oversubscription": "warning"}),
    ("OMP_NUM_THREADS unset", BUSY, MPIRUN | {"OMP_NUM_THREADS": ""}, None, {"thread-oversubscription": "warning"}),
    ("threads that torchrun sets", BUSY, TORCHRUN | {"OMP_NUM_THREADS": ""}, None, {}),
    ("a rank bound to one core", with_host(cores=1, total_cores=8), MPIRUN | {"OMP_NUM_THREADS": "2"}, None,
     {"thread-oversubscription": "warning"}),
    ("ranks bound to separate cores", with_host(cores=4, total_cores=8), MPIRUN | {"OMP_NUM_THREADS": "4"}, None, {}),
    ("more ranks than cores", with_host(cores=1, total_cores=1), MPIRUN, None, {"more-ranks-than-cores": "warning"}),
    ("a container's limit", with_host(cpu_quota=2), {"OMP_NUM_THREADS": ""}, None, {"cpu-quota": "warning"}),
    ("a container's limit, known", with_host(cpu_quota=2), {}, None, {}),
    ("a name without an address", with_host(address=""), {}, None, {"hostname-unresolved": "info"}),
    ("a name without an address, on two nodes", with_host(address=""), SRUN, None, {"hostname-unresolved": "warning"}),
    ("a name that is loopback", with_host(address="127.0.1.1"), {}, None, {}),
    ("a name that is loopback, on two nodes", with_host(address="127.0.1.1"), SRUN, None,
     {"hostname-is-loopback": "warning"}),
    ("a name server that does not answer", with_host(reverse_lookup_s=5.0), {}, None,
     {"reverse-lookup-slow": "warning"}),
    ("an interface that is not there", FACTS, {"GLOO_SOCKET_IFNAME": "ib0"}, None, {"interface-missing": "error"}),
    ("an interface that is there", FACTS, {"GLOO_SOCKET_IFNAME": "eth0", "HOROVOD_GLOO_IFACE": "eth0"}, None, {}),
    ("NCCL's interface prefixes", FACTS, {"NCCL_SOCKET_IFNAME": "eth,ib"}, None, {}),
    ("NCCL's exact interfaces", FACTS, {"NCCL_SOCKET_IFNAME": "=eth"}, None, {"interface-missing": "error"}),
    ("no network on two nodes", with_host(interfaces={"lo": "127.0.0.1"}), SRUN, None, {"no-network": "error"}),
    ("a bridge under mpirun on two nodes", BRIDGED, ON_TWO_NODES, None, {"bridges": "warning"}),
    ("a bridge that is excluded", BRIDGED, ON_TWO_NODES | {"OMPI_MCA_btl_tcp_if_include": "eth0"}, None, {}),
    ("the bridge of a network of Docker's", with_host(interfaces={"eth0": "10.0.0.1", "br-350f16f6fa10": "172.18.0.1"}),
     ON_TWO_NODES, None, {"bridges": "warning"}),
    ("a bridge that leads to others", with_host(interfaces={"br-ex": "10.0.0.1"}), ON_TWO_NODES, None, {}),
    ("an unknown backend", FACTS, {"DUALDIST_BACKEND": "nativ"}, None, {"choice-unknown": "error"}),
    ("a misspelt variable", FACTS, {"DUALDIST_BAKEND": "mpi"}, None, {"variable-unknown": "warning"}),
    ("a transport that the backend lacks", FACTS, {"DUALDIST_BACKEND": "native", "DUALDIST_TRANSPORT": "mpi"}, None,
     {"backend-impossible": "error"}),
    ("Horovod over MPI where MPI was not started", FACTS,
     TORCHRUN | {"DUALDIST_BACKEND": "horovod", "HOROVOD_CONTROLLER": "MPI"}, None, {"backend-impossible": "error"}),
    ("Horovod over MPI", FACTS, MPIRUN | {"DUALDIST_BACKEND": "horovod", "HOROVOD_CONTROLLER": "mpi"}, None, {}),
    ("NCCL without GPUs", FACTS, TORCHRUN | {"DUALDIST_TRANSPORT": "nccl"}, None, {"backend-impossible": "error"}),
    ("NCCL with GPUs", GPUS, TORCHRUN | {"DUALDIST_TRANSPORT": "nccl"}, None, {}),
    ("a transport for one rank", FACTS, {"DUALDIST_TRANSPORT": "mpi"}, None, {}),
    ("rank 0's host name does not resolve", with_facts(is_master_unresolved=True),
     TORCHRUN | {"MASTER_ADDR": "nowhere"}, None, {"master-unresolved": "error"}),
    ("loopback for two nodes", FACTS, SRUN | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, None,
     {"master-is-loopback": "error"}),
    *((f"SLURM_NTASKS={tasks}", FACTS, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": tasks}, None, {})
      for tasks in ("1", "", "x", "99999999999999999999", "٣")),
    ("half-set variables", FACTS, {"RANK": "0"}, None, {"topology-unknown": "error"}),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "environ", "ranks", "expected"), [row[1:] for row in JOBS], ids=[r[0] for r in JOBS])
def test_host_and_job_problems_have_a_name_and_a_level(
    facts: InstallationFacts, environ: Any, ranks: int | None, expected: Any
) -> None:
    assert levels(environ, facts, ranks) == expected
