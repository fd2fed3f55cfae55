"""Job scripts that `dualdist run --scheduler` wrote, submitted for real to Slurm; the others run by stand-ins."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import problem
from harness.hosts import Hosts
from harness.jobs import REPORT_DIR, Launch, collect
from harness.slurm import Slurm, eventually
from launch.job_scripts import AS_ROOT, AWAY, JSRUN, PBSDSH, stand_in, written

PROGRAM = Path(problem.__file__).with_name("tiny_rank.py")
RUN = (sys.executable, "-m", "dualdist", "run")
# More than two gradients are added in an order of the backend's own, each sum rounding to 2**-24 of its size.
TOLERANCE = 1e-6


def check(reports: Sequence[Mapping[str, Any]], nodes: int, tasks: int, **same: str) -> None:
    """The ranks fill node after node, say `same`, and hold what one process trains."""
    size = nodes * tasks
    for rank, seen in enumerate(reports):
        place = (
            seen["rank"],
            seen["size"],
            seen["local_rank"],
            seen["local_size"],
            seen["node_rank"],
            seen["num_nodes"],
        )
        assert place == (rank, size, rank % tasks, tasks, rank // tasks, nodes)
        assert {name: seen[name] for name in same} == same
        assert seen["sum"] == [(1 << size) - 1, size << 40]
        assert seen["parameters"] == reports[0]["parameters"], "ranks differ"
    expected = problem.trained_by_one_process(size)
    assert reports[0]["parameters"] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("launcher", "nodes", "tasks", "backend", "transport"),
    [
        pytest.param("srun", 2, 2, "native", "gloo", id="srun-native"),
        pytest.param("srun", 2, 1, "horovod", "gloo", id="srun-horovod"),
        pytest.param("srun", 1, 2, "mpi", "mpi", id="srun-mpi"),
        pytest.param("torchrun", 2, 2, "native", "gloo", id="torchrun-2-nodes"),
        pytest.param("torchrun", 2, 1, "horovod", "gloo", id="torchrun-horovod"),
        pytest.param("torchrun", 1, 2, "native", "shm", id="torchrun-1-node"),
        pytest.param("mpirun", 2, 2, "native", "gloo", id="mpirun-native"),
        pytest.param("mpirun", 2, 1, "horovod", "mpi", id="mpirun-horovod"),
        pytest.param("horovodrun", 1, 2, "horovod", "gloo", id="horovodrun"),
    ],
)
def test_sbatch_runs_what_was_written(
    slurm: Slurm, launch: Launch, launcher: str, nodes: int, tasks: int, backend: str, transport: str
) -> None:
    asked = ("--scheduler", "slurm", "--nodes", str(nodes), "--tasks-per-node", str(tasks), "--time", "0:05:00")
    path = written(launch, *asked, "--launcher", launcher, "--backend", backend, program=(str(PROGRAM), backend))
    env = {**slurm.env, **AS_ROOT, "DUALDIST_TRANSPORT": transport}
    reports = launch.reports([*slurm.sbatch(), str(path)], nodes * tasks, env=env)
    check(reports, nodes, tasks, launcher=launcher, backend=backend, transport=transport)


def test_submit_hands_the_job_to_sbatch(slurm: Slurm, launch: Launch) -> None:
    folder = launch.directory / "reports"
    folder.mkdir()
    words = ("--scheduler", "slurm", "--nodes", "2", "--submit", str(PROGRAM), "native")
    outcome = launch([*RUN, *words], env={**slurm.env, REPORT_DIR: str(folder)})
    assert outcome.stdout.startswith("Submitted batch job "), str(outcome)
    assert eventually(lambda: not slurm.queue(), within_s=60)
    check(collect(folder, 2, outcome), 2, 1, launcher="srun", backend="native")


@pytest.mark.smoke
def test_what_sbatch_refuses_is_said(slurm: Slurm, launch: Launch) -> None:
    words = ("--scheduler", "slurm", "--nodes", "3", "--partition", "nowhere", "--submit", str(PROGRAM), "native")
    outcome = launch([*RUN, *words], env=slurm.env, check=False)
    assert outcome.rc == 1
    assert "sbatch refused the job with exit code 1: " in outcome.stderr
    assert "invalid partition specified: nowhere" in outcome.stderr


@pytest.mark.parametrize(("gpus", "seen"), [("--gpus-per-task", ["0", "1"]), ("--gpus-per-node", ["0,1", "0,1"])])
def test_tasks_get_the_cores_and_gpus_that_were_asked_for(
    slurm: Slurm, launch: Launch, gpus: str, seen: list[str]
) -> None:
    """By number alone: the cluster takes other devices for GPUs, and counts no memory and no accounts."""
    count = "1" if gpus == "--gpus-per-task" else "2"
    asked = ("--scheduler", "slurm", "--tasks-per-node", "2", "--cpus-per-task", "2", gpus, count, "--memory", "1G")
    names = "SRUN_CPUS_PER_TASK,OMP_NUM_THREADS,CUDA_VISIBLE_DEVICES"
    path = written(launch, *asked, "--partition", "all", "--account", "me", program=(str(PROGRAM), "native", names))
    reports = launch.reports([*slurm.sbatch(), str(path)], 2, env=slurm.env)
    for report, visible in zip(reports, seen, strict=True):
        assert report["variables"] == {
            "SRUN_CPUS_PER_TASK": "2",
            "OMP_NUM_THREADS": "2",
            "CUDA_VISIBLE_DEVICES": visible,
        }


@pytest.mark.parametrize("lines", ["a b", "a a b b"])
def test_a_pbs_script_starts_one_agent_a_host(launch: Launch, lines: str) -> None:
    """The nodefile has a line a node (PBS Pro) or a line a core (Torque)."""
    if os.geteuid() != 0:
        pytest.skip("host names of their own need root")
    nodefile, hosts, folder = launch.directory / "nodes", lines.split(), launch.directory / "reports"
    nodefile.write_text("\n".join([*hosts, ""]))
    folder.mkdir()
    env = {"PBS_NODEFILE": str(nodefile), "PBS_JOBID": "1.pbs", "PBS_O_WORKDIR": str(launch.directory)}
    env |= stand_in(launch, "pbsdsh", PBSDSH)
    names = ["localhost", socket.gethostname(), *(f"node{index}" for index in range(len(hosts)))]
    (launch.directory / "bin" / "hosts").write_text(f"127.0.0.1 {' '.join(names)}\n")
    needs = {"PATH": env["PATH"], "PYTHONPATH": launch.env["PYTHONPATH"], REPORT_DIR: str(folder)}
    setup = [word for name, value in needs.items() for word in ("--setup", f"export {name}={shlex.quote(value)}")]
    asked = ("--scheduler", "pbs", "--nodes", "2", "--tasks-per-node", "2", "--time", "1:00:00")
    path = written(launch, *asked, *setup, program=(str(PROGRAM), "native", "PBS_NODENUM"))
    outcome = launch(["bash", str(path)], env=env)
    nodes = len(set(hosts))
    reports = collect(folder, 2 * nodes, outcome)
    check(reports, nodes, 2, launcher="torchrun", backend="native")
    firsts = {str(hosts.index(host)) for host in hosts}
    assert {seen["variables"]["PBS_NODENUM"] for seen in reports} == firsts


def test_an_lsf_script_gives_jsrun_a_resource_set_a_rank(launch: Launch) -> None:
    path = written(launch, "--scheduler", "lsf", "--tasks-per-node", "2", program=(str(PROGRAM), "native"))
    env = {"LS_SUBCWD": str(launch.directory), "LSB_JOBID": "7", **stand_in(launch, "jsrun", JSRUN)}
    check(launch.reports(["bash", str(path)], 2, env=env), 1, 2, launcher="jsrun", backend="native")


def test_a_workstation_script_trains(launch: Launch) -> None:
    path = written(launch, "--scheduler", "workstation", "-np", "2", program=(str(PROGRAM), "native"))
    check(launch.reports(["bash", str(path)], 2), 1, 2, launcher="torchrun", backend="native", transport="shm")


def train_on_hosts(
    launch: Launch, two_hosts: Hosts, launcher: str, asked: Sequence[str], env: Mapping[str, str]
) -> None:
    """The script, run on the first of two hosts, trains two ranks on each."""
    backend, folder = "horovod" if launcher == "horovodrun" else "native", launch.directory / "reports"
    folder.mkdir()
    needs = {"PYTHONPATH": launch.env["PYTHONPATH"], REPORT_DIR: str(folder)}
    words = [word for name, value in needs.items() for word in ("--env", f"{name}={value}")]
    setup = ("--setup", f"export PATH={shlex.quote(two_hosts.env['PATH'])}")
    asked = (*asked, "--launcher", launcher, "--backend", backend, *words, *setup)
    path = written(launch, *asked, program=(str(PROGRAM), backend))
    outcome = launch(two_hosts.on(0, "bash", str(path)), env={**two_hosts.env, **AS_ROOT, **AWAY, **env})
    check(collect(folder, 4, outcome), 2, 2, launcher=launcher, backend=backend)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_hosts_by_ssh_train_together(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    train_on_hosts(launch, two_hosts, launcher, ("--scheduler", "ssh", "-H", "hosta:2,hostb:2"), {})


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_the_hosts_of_a_nodefile_train_together(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    """What PBS's scripts do after qsub: only the nodefile and PBS's variables are written by hand."""
    nodefile = launch.directory / "nodes"
    nodefile.write_text("hosta\nhosta\nhostb\nhostb\n")
    env = {"PBS_NODEFILE": str(nodefile), "PBS_O_WORKDIR": str(launch.directory), "PBS_JOBID": "1"}
    asked = ("--scheduler", "pbs", "--nodes", "2", "--tasks-per-node", "2")
    train_on_hosts(launch, two_hosts, launcher, asked, env)
