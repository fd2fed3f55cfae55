"""Findings about a host and the job on it, by tables of facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doctor_facts import (
    FACTS,
    GPUS,
    MPIRUN,
    TORCHRUN,
    levels,
    recorded,
    with_facts,
    with_horovod,
    with_host,
    with_versions,
)

from dualdist.doctor.collect import InstallationFacts

SRUN = recorded("slurm_srun-none_N2x2")
BUSY = with_host(cores=4, total_cores=4)
JOBS = [
    ("Slurm gives one task all GPUs", GPUS, recorded("slurm_srun_of_one_in_salloc_of_four_more") |
     {"SLURM_STEP_GPUS": "0,1,2,3"}, None, {"slurm-one-task": "warning"}),
    ("a script that is one task has all GPUs", GPUS, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
     "SLURM_JOB_GPUS": "0,1,2,3"}, None, {"slurm-one-task": "warning"}),
    ("a script that is one task has one GPU", GPUS, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
     "SLURM_JOB_GPUS": "3"}, None, {}),
    ("a script on two nodes that names no tasks", FACTS, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0",
     "SLURM_JOB_NUM_NODES": "2"}, None, {"slurm-one-process": "warning"}),
    ("srun without PMIx", with_facts(srun_mpi_types=("none", "pmi2")), {}, None, {"srun-without-pmix": "info"}),
    ("srun without PMIx, wanted", with_facts(srun_mpi_types=("none", "pmi2")), {"DUALDIST_BACKEND": "mpi"}, None,
     {"srun-without-pmix": "error"}),
    ("srun with PMIx", with_facts(srun_mpi_types=("none", "pmix_v4")), {}, None, {}),
    ("MPI wanted where it was not started", FACTS, TORCHRUN | {"DUALDIST_BACKEND": "mpi"}, None,
     {"mpi-not-started": "error"}),
    ("MPI wanted where mpi4py is missing", with_versions(with_facts(mpi4py=None), mpi4py=None),
     MPIRUN | {"DUALDIST_BACKEND": "mpi"}, None, {"mpi4py-missing": "error"}),
    ("ranks that only MPI brings together", with_versions(replace(with_horovod(mpi=False), mpi4py=None), mpi4py=None),
     MPIRUN, None, {"no-rendezvous": "error"}),
    ("the same with an address", with_versions(replace(with_horovod(mpi=False), mpi4py=None), mpi4py=None),
     MPIRUN | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, None, {}),
    ("the same with a file", with_versions(replace(with_horovod(mpi=False), mpi4py=None), mpi4py=None),
     MPIRUN | {"DUALDIST_RENDEZVOUS": "file:///a/b"}, None, {}),
    ("more ranks than GPUs", replace(GPUS, torch=replace(GPUS.torch, gpus=1)), TORCHRUN, None,
     {"more-ranks-than-gpus": "error"}),
    ("a GPU and no number of ranks", replace(GPUS, torch=replace(GPUS.torch, gpus=1)), {}, None, {}),
    ("a GPU for a job of one task", replace(GPUS, torch=replace(GPUS.torch, gpus=1)),
     recorded("slurm_srun_of_one_in_salloc_of_four_more") | {"CUDA_VISIBLE_DEVICES": "0"}, None, {}),
    ("a GPU and two ranks planned", replace(GPUS, torch=replace(GPUS.torch, gpus=1)), {}, 2,
     {"more-ranks-than-gpus": "warning"}),
    ("more ranks planned than GPUs", GPUS, {}, 5, {"more-ranks-than-gpus": "warning"}),
    ("a GPU for each task", replace(GPUS, torch=replace(GPUS.torch, gpus=1)),
     recorded("slurm_srun_pmi2_more") | {"CUDA_VISIBLE_DEVICES": "0"}, None, {"gpus-hidden-per-task": "info"}),
    ("one GPU for two tasks", with_host(replace(GPUS, torch=replace(GPUS.torch, gpus=1)), gpus=1),
     recorded("slurm_srun_pmi2_more"), None, {"more-ranks-than-gpus": "error"}),
    ("little shared memory", with_host(shm_free=64 << 20), {}, None, {"shm-too-small": "warning"}),
    ("enough for one", with_host(shm_free=64 << 20), {}, 1, {}),
    ("no shared memory", with_host(shm_free=None), {}, 1, {"shm-too-small": "warning"}),
    ("few files", with_host(open_files=(256, 256)), {}, None, {"too-few-files": "warning"}),
    ("few files, but more may be had", with_host(open_files=(256, 4096)), {}, None, {}),
    ("few files for many ranks", with_host(open_files=(4096, 4096)), {}, 1000, {"too-few-files": "warning",
     "shm-too-small": "warning"}),
    ("little locked memory", with_host(locked_memory=(8 << 20, 8 << 20), infiniband=("mlx5_0",)), {}, None,
     {"locked-memory": "warning"}),
    ("little locked memory without InfiniBand", with_host(locked_memory=(8 << 20, 8 << 20)), {}, None, {}),
    ("InfiniBand without a limit", with_host(infiniband=("mlx5_0",)), {}, None, {}),
    ("too many threads", BUSY, {"OMP_NUM_THREADS": "4"}, 2, {"thread-oversubscription": "warning"}),
    ("threads that fit", BUSY, {"OMP_NUM_THREADS": "2"}, 2, {}),
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
    ("a slow name", with_host(resolve_s=5.0), {}, None, {"hostname-slow": "warning"}),
    ("a name server that does not answer", with_host(reverse_lookup_s=5.0), {}, None,
     {"reverse-lookup-slow": "warning"}),
    ("a trace in no folder", with_facts(timeline_error="there is no folder /x"), {"DUALDIST_TIMELINE": "/x/trace.json"},
     None, {"timeline-unwritable": "error"}),
    ("an interface that is not there", FACTS, {"GLOO_SOCKET_IFNAME": "ib0"}, None, {"interface-missing": "error"}),
    ("interfaces of which one is not there", FACTS, {"GLOO_SOCKET_IFNAME": "eth0,ib0"}, None,
     {"interface-missing": "error"}),
    ("an interface that is there", FACTS, {"GLOO_SOCKET_IFNAME": "eth0", "HOROVOD_GLOO_IFACE": "eth0"}, None, {}),
    ("NCCL's interface prefixes", FACTS, {"NCCL_SOCKET_IFNAME": "eth,ib"}, None, {}),
    ("NCCL's excluded interfaces", FACTS, {"NCCL_SOCKET_IFNAME": "^docker0"}, None, {}),
    ("NCCL's exact interfaces", FACTS, {"NCCL_SOCKET_IFNAME": "=eth"}, None, {"interface-missing": "error"}),
    ("no network on two nodes", with_host(interfaces={"lo": "127.0.0.1"}), SRUN, None, {"no-network": "error"}),
    ("no network on one", with_host(interfaces={"lo": "127.0.0.1"}), {}, None, {}),
    ("two networks on two nodes", with_host(interfaces={"eth0": "10.0.0.1", "ib0": "10.1.0.1"}), SRUN, None,
     {"several-networks": "info"}),
    ("a bridge under mpirun on two nodes", with_host(interfaces={"eth0": "10.0.0.1", "docker0": "172.17.0.1"}),
     recorded("slurm_sbatch_openmpi4"), None, {"bridges": "warning"}),
    ("a bridge that is excluded", with_host(interfaces={"eth0": "10.0.0.1", "docker0": "172.17.0.1"}),
     recorded("slurm_sbatch_openmpi4") | {"OMPI_MCA_btl_tcp_if_include": "eth0"}, None, {}),
    ("the bridge of a network of Docker's", with_host(interfaces={"eth0": "10.0.0.1", "br-350f16f6fa10": "172.18.0.1"}),
     recorded("slurm_sbatch_openmpi4"), None, {"bridges": "warning"}),
    ("a bridge that leads to others", with_host(interfaces={"br-ex": "10.0.0.1"}), recorded("slurm_sbatch_openmpi4"),
     None, {}),
    ("an unknown backend", FACTS, {"DUALDIST_BACKEND": "nativ"}, None, {"choice-unknown": "error"}),
    ("two unknown values", FACTS, {"DUALDIST_BACKEND": "a", "DUALDIST_TRANSPORT": "b"}, None,
     {"choice-unknown": "error"}),
    ("a transport that the backend lacks", FACTS, {"DUALDIST_BACKEND": "native", "DUALDIST_TRANSPORT": "mpi"}, None,
     {"transport-impossible": "error"}),
    ("a transport that the launcher's backend lacks", FACTS, TORCHRUN | {"DUALDIST_TRANSPORT": "mpi"}, None,
     {"transport-impossible": "error"}),
    ("Horovod over MPI where MPI was not started", FACTS,
     TORCHRUN | {"DUALDIST_BACKEND": "horovod", "HOROVOD_CONTROLLER": "MPI"}, None, {"transport-impossible": "error"}),
    ("Horovod over MPI", FACTS, MPIRUN | {"DUALDIST_BACKEND": "horovod", "HOROVOD_CONTROLLER": "mpi"}, None, {}),
    ("NCCL without GPUs", FACTS, TORCHRUN | {"DUALDIST_TRANSPORT": "nccl"}, None, {"transport-impossible": "error"}),
    ("NCCL with GPUs", GPUS, TORCHRUN | {"DUALDIST_TRANSPORT": "nccl"}, None, {}),
    ("shared memory", FACTS, TORCHRUN | {"DUALDIST_TRANSPORT": "shm"}, None, {}),
    ("a transport for one rank", FACTS, {"DUALDIST_TRANSPORT": "mpi"}, None, {}),
    ("rank 0's host name does not resolve", with_facts(is_master_unresolved=True),
     TORCHRUN | {"MASTER_ADDR": "nowhere"}, None, {"master-unresolved": "error"}),
    ("loopback for two nodes", FACTS, SRUN | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, None,
     {"master-is-loopback": "error"}),
    ("half-set variables", FACTS, {"RANK": "0"}, None, {"topology-unknown": "error"}),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "environ", "ranks", "expected"), [row[1:] for row in JOBS], ids=[r[0] for r in JOBS])
def test_host_and_job_problems_have_a_name_and_a_level(
    facts: InstallationFacts, environ: Any, ranks: int | None, expected: Any
) -> None:
    assert levels(environ, facts, ranks) == expected


@pytest.mark.parametrize("tasks", ["1", "", "x", "99999999999999999999", "٣"])
def test_other_values_of_slurm_ntasks_have_no_findings(tasks: str) -> None:
    assert levels({"SLURM_JOB_ID": "1", "SLURM_NTASKS": tasks}) == {}
