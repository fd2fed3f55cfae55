"""srun, sbatch and salloc of a real Slurm with two nodes: who the ranks are, that they connect, what they compute."""

import shlex
import socket
import sys

import pytest
from harness.jobs import REPORT_DIR, Launch, collect
from harness.slurm import Slurm
from launch.running import TINY_RANK, check

TRANSPORT = "DUALDIST_TRANSPORT"
# Options of srun and sbatch, and the numbers of ranks that they start on each node.
LAYOUTS = {
    "2": (("-N1", "-n2"), (2,)),
    "1+1": (("-N2", "-n2"), (1, 1)),
    "2+2": (("-N2", "-n4", "--ntasks-per-node=2"), (2, 2)),
    "3+1": (("-N2", "-n4"), (3, 1)),
}


def tiny_rank(backend: str) -> list[str]:
    return [sys.executable, TINY_RANK, backend]


def script(launch: Launch, *commands: str) -> str:
    """Write a batch script that ends at the first command that fails."""
    return launch.write("batch.sh", "\n".join(["#!/bin/sh", "set -e", *commands, ""]))


def cases(text: str) -> list[object]:
    """Return a parameter of each word, whose parts are joined by `/`."""
    return [pytest.param(*word.split("/"), id=word.replace("/", "-")) for word in text.split()]


@pytest.mark.smoke("native-pmi2-gloo-1+1", "mpi-pmix-mpi-1+1")
@pytest.mark.parametrize(
    ("backend", "mpi", "transport", "layout"),
    cases("""
        native/none/shm/2 native/none/gloo/3+1 native/pmi2/gloo/1+1 native/pmix/gloo/1+1
        horovod/none/gloo/3+1 horovod/pmi2/gloo/2 horovod/pmix/mpi/1+1 mpi/pmix/mpi/2 mpi/pmix/mpi/1+1
    """),
)
def test_srun_trains(slurm: Slurm, launch: Launch, backend: str, mpi: str, transport: str, layout: str) -> None:
    options, per_node = LAYOUTS[layout]
    env = slurm.env if backend == "native" else {**slurm.env, TRANSPORT: transport}  # native chooses its own
    reports = launch.reports([*slurm.srun(*options, mpi=mpi), *tiny_rank(backend)], sum(per_node), env=env)
    same = {} if backend == "native" else {"transport": transport}
    check(reports, per_node, launcher="srun", backend=backend, **same)


@pytest.mark.parametrize("backend", ["horovod", "mpi"])
def test_mpi_is_refused_without_pmix(slurm: Slurm, launch: Launch, backend: str) -> None:
    outcome = launch([*slurm.srun("-N1", "-n2"), *tiny_rank(backend)], env={**slurm.env, TRANSPORT: "mpi"}, check=False)
    assert outcome.rc != 0
    assert outcome.stderr.count("UnsupportedError") >= 2, str(outcome)
    assert "srun --mpi=pmix" in outcome.stderr, str(outcome)
    assert "MPI_ERRORS_ARE_FATAL" not in outcome.stderr, str(outcome)


def test_ranks_need_not_fill_one_node_after_the_other(slurm: Slurm, launch: Launch) -> None:
    srun = slurm.srun("-N2", "-n4", "--ntasks-per-node=2", "--distribution=cyclic")
    reports = launch.reports([*srun, *tiny_rank("auto")], 4, env=slurm.env)
    assert {seen["backend"] for seen in reports} == {"native"}
    assert [seen["node_rank"] for seen in reports] == [0, 1, 0, 1]
    assert [seen["local_rank"] for seen in reports] == [0, 0, 1, 1]


def test_concurrent_steps_of_one_job_do_not_mix(slurm: Slurm, launch: Launch) -> None:
    folders = [launch.directory / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    step = shlex.join([*slurm.srun("-N2", "-n2", "--ntasks-per-node=1", "--exact"), *tiny_rank("native")])
    commands = [f'{REPORT_DIR}={shlex.quote(str(folder))} {step} & pids="$pids $!"' for folder in folders]
    both = script(launch, *commands, "for pid in $pids; do wait $pid; done")
    outcome = launch([*slurm.salloc(*LAYOUTS["2+2"][0]), "sh", both], env=slurm.env)
    for folder in folders:
        check(collect(folder, 2, outcome), (1, 1), launcher="srun", backend="native")


@pytest.mark.parametrize("allocate", ["sbatch", "salloc"])
def test_python_without_srun_is_one_rank(slurm: Slurm, launch: Launch, allocate: str) -> None:
    batch = script(launch, shlex.join(tiny_rank("auto")))
    argv = [*slurm.sbatch("-N2", "-n4"), batch] if allocate == "sbatch" else [*slurm.salloc("-N2", "-n4"), "sh", batch]
    check(launch.reports(argv, 1, env=slurm.env), (1,), launcher="none", backend="single", transport="none")


def test_torchrun_under_srun_starts_the_ranks(slurm: Slurm, launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    srun = slurm.srun("-N2", "-n2", "--ntasks-per-node=1")
    reports = launch.reports([*srun, *torchrun, TINY_RANK, "native"], 4, env=slurm.env)
    check(reports, (2, 2), launcher="torchrun", backend="native")
