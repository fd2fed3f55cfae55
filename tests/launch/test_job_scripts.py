"""Job scripts that `dualdist run --scheduler` wrote, submitted for real to Slurm; the others run by stand-ins."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence

import pytest
from harness.hosts import Hosts
from harness.jobs import REPORT_DIR, Launch, Outcome
from harness.slurm import Slurm, eventually
from launch.running import AS_ROOT, AWAY, JSRUN, PBSDSH, RUN, TINY_RANK, check, collected, stand_in, written


@pytest.mark.parametrize(
    ("launcher", "nodes", "tasks", "backend", "transport"),
    [
        ("srun", 2, 2, "native", "gloo"),
        ("srun", 2, 1, "horovod", "gloo"),
        ("srun", 1, 2, "mpi", "mpi"),
        ("torchrun", 2, 2, "native", "gloo"),
        ("torchrun", 2, 1, "horovod", "gloo"),
        ("torchrun", 1, 2, "native", "shm"),
        ("mpirun", 2, 2, "native", "gloo"),
        ("mpirun", 2, 1, "horovod", "mpi"),
        ("horovodrun", 1, 2, "horovod", "gloo"),
    ],
)
def test_sbatch_runs_the_written_script(
    slurm: Slurm, launch: Launch, launcher: str, nodes: int, tasks: int, backend: str, transport: str
) -> None:
    asked = ("--scheduler", "slurm", "--nodes", str(nodes), "--tasks-per-node", str(tasks), "--time", "0:05:00")
    path = written(launch, *asked, "--launcher", launcher, "--backend", backend, program=(TINY_RANK, backend))
    env = {**slurm.env, **AS_ROOT, "DUALDIST_TRANSPORT": transport}
    reports = launch.reports([*slurm.sbatch(), str(path)], nodes * tasks, env=env)
    check(reports, (tasks,) * nodes, launcher=launcher, backend=backend, transport=transport)


def test_submit_hands_the_job_to_sbatch(slurm: Slurm, launch: Launch) -> None:
    def submit(env: Mapping[str, str]) -> Outcome:
        words = ("--scheduler", "slurm", "--nodes", "2", "--submit", TINY_RANK, "native")
        outcome = launch([*RUN, *words], env={**slurm.env, **env})
        assert outcome.stdout.startswith("Submitted batch job "), str(outcome)
        assert eventually(lambda: not slurm.queue(), within_s=60)
        return outcome

    check(collected(launch, 2, submit), (1, 1), launcher="srun", backend="native")


@pytest.mark.smoke
def test_a_refusal_of_sbatch_is_reported(slurm: Slurm, launch: Launch) -> None:
    words = ("--scheduler", "slurm", "--nodes", "3", "--partition", "nowhere", "--submit", TINY_RANK, "native")
    outcome = launch([*RUN, *words], env=slurm.env, check=False)
    assert outcome.rc == 1
    assert "sbatch refused the job with exit code 1: " in outcome.stderr
    assert "invalid partition specified: nowhere" in outcome.stderr


@pytest.mark.parametrize(("gpus", "seen"), [("--gpus-per-task", ["0", "1"]), ("--gpus-per-node", ["0,1", "0,1"])])
def test_tasks_get_the_requested_cores_and_gpus(slurm: Slurm, launch: Launch, gpus: str, seen: list[str]) -> None:
    """Only their numbers: the cluster has stand-ins for GPUs, and does not count memory or accounts."""
    count = "1" if gpus == "--gpus-per-task" else "2"
    asked = ("--scheduler", "slurm", "--tasks-per-node", "2", "--cpus-per-task", "2", gpus, count, "--memory", "1G")
    names = "SRUN_CPUS_PER_TASK,OMP_NUM_THREADS,CUDA_VISIBLE_DEVICES"
    path = written(launch, *asked, "--partition", "all", "--account", "me", program=(TINY_RANK, "native", names))
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
    nodefile, hosts = launch.directory / "nodes", lines.split()
    nodefile.write_text("\n".join([*hosts, ""]))
    env = {"PBS_NODEFILE": str(nodefile), "PBS_JOBID": "1.pbs", "PBS_O_WORKDIR": str(launch.directory)}
    env |= stand_in(launch, "pbsdsh", PBSDSH)
    names = ["localhost", socket.gethostname(), *(f"node{index}" for index in range(len(hosts)))]
    (launch.directory / "bin" / "hosts").write_text(f"127.0.0.1 {' '.join(names)}\n")

    def run(reports: Mapping[str, str]) -> Outcome:
        needs = {"PATH": env["PATH"], "PYTHONPATH": launch.env["PYTHONPATH"], **reports}
        setup = [word for name, value in needs.items() for word in ("--setup", f"export {name}={shlex.quote(value)}")]
        asked = ("--scheduler", "pbs", "--nodes", "2", "--tasks-per-node", "2", "--time", "1:00:00")
        return launch(
            ["bash", str(written(launch, *asked, *setup, program=(TINY_RANK, "native", "PBS_NODENUM")))], env=env
        )

    nodes = len(set(hosts))
    reports = collected(launch, 2 * nodes, run)
    check(reports, (2,) * nodes, launcher="torchrun", backend="native")
    firsts = {str(hosts.index(host)) for host in hosts}
    assert {seen["variables"]["PBS_NODENUM"] for seen in reports} == firsts


def test_an_lsf_script_gives_jsrun_a_resource_set_a_rank(launch: Launch) -> None:
    path = written(launch, "--scheduler", "lsf", "--tasks-per-node", "2", program=(TINY_RANK, "native"))
    env = {"LS_SUBCWD": str(launch.directory), "LSB_JOBID": "7", **stand_in(launch, "jsrun", JSRUN)}
    check(launch.reports(["bash", str(path)], 2, env=env), (2,), launcher="jsrun", backend="native")


def test_a_workstation_script_trains(launch: Launch) -> None:
    path = written(launch, "--scheduler", "workstation", "-np", "2", program=(TINY_RANK, "native"))
    check(launch.reports(["bash", str(path)], 2), (2,), launcher="torchrun", backend="native", transport="shm")


def train_on_hosts(
    launch: Launch, two_hosts: Hosts, launcher: str, asked: Sequence[str], env: Mapping[str, str]
) -> None:
    """Run the script on the first of two hosts: it trains two ranks on each."""
    backend = "horovod" if launcher == "horovodrun" else "native"
    setup = ("--setup", f"export PATH={shlex.quote(two_hosts.env['PATH'])}")

    def run(reports: Mapping[str, str]) -> Outcome:
        needs = {"PYTHONPATH": launch.env["PYTHONPATH"], REPORT_DIR: reports[REPORT_DIR]}
        words = [word for name, value in needs.items() for word in ("--env", f"{name}={value}")]
        options = (*asked, "--launcher", launcher, "--backend", backend, *words, *setup)
        path = written(launch, *options, program=(TINY_RANK, backend))
        return launch(two_hosts.on(0, "bash", str(path)), env={**two_hosts.env, **AS_ROOT, **AWAY, **env})

    check(collected(launch, 4, run), (2, 2), launcher=launcher, backend=backend)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_hosts_by_ssh_train_together(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    train_on_hosts(launch, two_hosts, launcher, ("--scheduler", "ssh", "-H", "hosta:2,hostb:2"), {})


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_hosts_of_a_nodefile_train_together(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    """As PBS runs the script after qsub, but for the nodefile and PBS's variables."""
    nodefile = launch.directory / "nodes"
    nodefile.write_text("hosta\nhosta\nhostb\nhostb\n")
    env = {"PBS_NODEFILE": str(nodefile), "PBS_O_WORKDIR": str(launch.directory), "PBS_JOBID": "1"}
    asked = ("--scheduler", "pbs", "--nodes", "2", "--tasks-per-node", "2")
    train_on_hosts(launch, two_hosts, launcher, asked, env)
