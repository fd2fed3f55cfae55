"""srun, sbatch and salloc of a real Slurm with two nodes: who the ranks are, that they meet, and what they compute."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import problem
from harness.jobs import REPORT_DIR, Launch, collect
from harness.mpi import OpenMPI
from harness.slurm import Slurm

PROGRAM = Path(problem.__file__).with_name("tiny_rank.py")
TRANSPORT = "DUALDIST_TRANSPORT"
# The options of srun and sbatch, and the number of ranks on each node that they give.
ONE_NODE = (("-N1", "-n2"), (2,))
TWO_NODES = (("-N2", "-n2"), (1, 1))
EVEN = (("-N2", "-n4", "--ntasks-per-node=2"), (2, 2))
UNEVEN = (("-N2", "-n4"), (3, 1))
# More than two gradients are added in an order of the backend's own, each sum rounding to 2**-24 of its size.
TOLERANCE = 1e-6


def tiny_rank(backend: str) -> list[str]:
    return [sys.executable, str(PROGRAM), backend]


def script(path: Path, *commands: str) -> str:
    """A batch script that ends at the first command that fails."""
    path.write_text("\n".join(["#!/bin/sh", "set -e", *commands, ""]))
    return str(path)


def places(per_node: Sequence[int]) -> list[dict[str, int]]:
    """Where the ranks are that fill one node after the other."""
    return [
        {"local_rank": local_rank, "local_size": local_size, "node_rank": node, "num_nodes": len(per_node)}
        for node, local_size in enumerate(per_node)
        for local_rank in range(local_size)
    ]


def check(reports: Sequence[Mapping[str, Any]], per_node: Sequence[int], **same: str) -> None:
    """All ranks are where per_node puts them, say `same`, have the exact sum and what one process trains."""
    size = sum(per_node)
    expected = problem.trained_by_one_process(size)
    exact_sum = [(1 << size) - 1, size << 40]
    for rank, (seen, place) in enumerate(zip(reports, places(per_node), strict=True)):
        wanted = {"rank": rank, "size": size, **place, **same, "sum": exact_sum}
        assert {name: seen[name] for name in wanted} == wanted
        assert seen["parameters"] == reports[0]["parameters"], "ranks differ"
    if size <= 2:
        assert reports[0]["parameters"] == expected
    else:
        assert reports[0]["parameters"] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.smoke("pmi2-1+1")
@pytest.mark.parametrize(
    ("mpi", "options", "per_node"),
    [
        pytest.param("none", *ONE_NODE, id="none-2"),
        pytest.param("none", *EVEN, id="none-2+2"),
        pytest.param("none", *UNEVEN, id="none-3+1"),
        pytest.param("pmi2", *TWO_NODES, id="pmi2-1+1"),
        pytest.param("pmix", *TWO_NODES, id="pmix-1+1"),
    ],
)
def test_srun_trains_natively_with_any_mpi_plugin(
    slurm: Slurm, launch: Launch, mpi: str, options: tuple[str, ...], per_node: tuple[int, ...]
) -> None:
    reports = launch.reports([*slurm.srun(*options, mpi=mpi), *tiny_rank("native")], sum(per_node), env=slurm.env)
    check(reports, per_node, launcher="srun", backend="native")


@pytest.mark.parametrize(
    ("mpi", "transport", "options", "per_node"),
    [
        pytest.param("none", "gloo", *UNEVEN, id="none-gloo-3+1"),
        pytest.param("pmi2", "gloo", *ONE_NODE, id="pmi2-gloo-2"),
        pytest.param("pmix", "gloo", *ONE_NODE, id="pmix-gloo-2"),
        pytest.param("pmix", "mpi", *ONE_NODE, id="pmix-mpi-2"),
        pytest.param("pmix", "mpi", *TWO_NODES, id="pmix-mpi-1+1"),
    ],
)
def test_srun_trains_on_horovod(
    slurm: Slurm, launch: Launch, mpi: str, transport: str, options: tuple[str, ...], per_node: tuple[int, ...]
) -> None:
    reports = launch.reports(
        [*slurm.srun(*options, mpi=mpi), *tiny_rank("horovod")], sum(per_node), env={**slurm.env, TRANSPORT: transport}
    )
    check(reports, per_node, launcher="srun", backend="horovod", transport=transport)


@pytest.mark.smoke("1+1")
@pytest.mark.parametrize(("options", "per_node"), [pytest.param(*ONE_NODE, id="2"), pytest.param(*TWO_NODES, id="1+1")])
def test_srun_trains_on_mpi_with_pmix(
    slurm: Slurm, launch: Launch, options: tuple[str, ...], per_node: tuple[int, ...]
) -> None:
    argv = [*slurm.srun(*options, mpi="pmix"), *tiny_rank("mpi")]
    check(launch.reports(argv, sum(per_node), env=slurm.env), per_node, launcher="srun", backend="mpi", transport="mpi")


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


def test_steps_of_one_job_do_not_meet_each_other(slurm: Slurm, launch: Launch) -> None:
    folders = [launch.directory / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    step = shlex.join([*slurm.srun("-N2", "-n2", "--ntasks-per-node=1", "--exact"), *tiny_rank("native")])
    commands = [f'{REPORT_DIR}={shlex.quote(str(folder))} {step} & pids="$pids $!"' for folder in folders]
    both = script(launch.directory / "steps.sh", *commands, "for pid in $pids; do wait $pid; done")
    outcome = launch([*slurm.salloc(*EVEN[0]), "sh", both], env=slurm.env)
    for folder in folders:
        check(collect(folder, 2, outcome), (1, 1), launcher="srun", backend="native")


def test_a_batch_script_that_starts_python_itself_is_one_rank(slurm: Slurm, launch: Launch) -> None:
    batch = script(launch.directory / "batch.sh", shlex.join(tiny_rank("auto")))
    reports = launch.reports([*slurm.sbatch("-N2", "-n4"), batch], 1, env=slurm.env)
    check(reports, (1,), launcher="none", backend="single", transport="none")


def test_an_allocation_without_srun_is_one_rank(slurm: Slurm, launch: Launch) -> None:
    reports = launch.reports([*slurm.salloc("-N2", "-n4"), *tiny_rank("auto")], 1, env=slurm.env)
    check(reports, (1,), launcher="none", backend="single", transport="none")


@pytest.mark.parametrize(
    ("backend", "transport", "options", "per_node"),
    [
        pytest.param("native", "gloo", *EVEN, id="native-2+2"),
        pytest.param("horovod", "mpi", *TWO_NODES, id="horovod-mpi-1+1"),
        pytest.param("mpi", "mpi", *TWO_NODES, id="mpi-1+1"),
    ],
)
def test_mpirun_in_a_batch_script_is_mpiruns_job(
    slurm: Slurm,
    openmpi: OpenMPI,
    launch: Launch,
    backend: str,
    transport: str,
    options: tuple[str, ...],
    per_node: tuple[int, ...],
) -> None:
    size = sum(per_node)
    batch = script(launch.directory / "batch.sh", shlex.join([*openmpi.run(size), *tiny_rank(backend)]))
    env = {**slurm.env, TRANSPORT: transport}
    reports = launch.reports([*slurm.sbatch(*options), batch], size, env=env)
    check(reports, per_node, launcher="mpirun", backend=backend, transport=transport)


@pytest.mark.parametrize(
    ("allocate", "backend", "options", "per_node"),
    [
        pytest.param("sbatch", "native", *UNEVEN, id="sbatch-native-3+1"),
        pytest.param("sbatch", "horovod", *EVEN, id="sbatch-horovod-2+2"),
        pytest.param("salloc", "native", *UNEVEN, id="salloc-native-3+1"),
        pytest.param("salloc", "horovod", *TWO_NODES, id="salloc-horovod-1+1"),
    ],
)
def test_srun_in_an_allocation_takes_all_of_it(
    slurm: Slurm, launch: Launch, allocate: str, backend: str, options: tuple[str, ...], per_node: tuple[int, ...]
) -> None:
    batch = script(launch.directory / "batch.sh", shlex.join([*slurm.srun(), *tiny_rank(backend)]))
    argv = [*slurm.sbatch(*options), batch] if allocate == "sbatch" else [*slurm.salloc(*options), "sh", batch]
    check(launch.reports(argv, sum(per_node), env=slurm.env), per_node, launcher="srun", backend=backend)


def test_torchrun_in_a_batch_script_is_torchruns_job(slurm: Slurm, launch: Launch) -> None:
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", str(PROGRAM), "native"]
    batch = script(launch.directory / "batch.sh", shlex.join(torchrun))
    reports = launch.reports([*slurm.sbatch("-N1", "-n1"), batch], 2, env=slurm.env)
    check(reports, (2,), launcher="torchrun", backend="native")


def test_torchrun_under_srun_is_torchruns_job(slurm: Slurm, launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    srun = slurm.srun("-N2", "-n2", "--ntasks-per-node=1")
    reports = launch.reports([*srun, *torchrun, str(PROGRAM), "native"], 4, env=slurm.env)
    check(reports, (2, 2), launcher="torchrun", backend="native")
