"""Job scripts that `dualdist run --scheduler` wrote, submitted to Slurm or run by stand-ins, and requeued."""

import json
import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from faults import elastic_rank
from harness import slurm
from harness.hosts import Hosts
from harness.installed import lack
from harness.jobs import REPORT_DIR, Launch, Outcome
from harness.slurm import Slurm, eventually
from launch.running import (
    AS_ROOT,
    AWAY,
    JSRUN,
    PBSDSH,
    RUN,
    TINY_RANK,
    check,
    collected,
    side_by_side,
    stand_in,
    written,
)

from dualdist.launch.schedulers.kubernetes import HOST_KEY, MPI_HOSTFILE, SSH_KEY, SSH_KEYS


@pytest.mark.parametrize(
    ("launcher", "nodes", "tasks", "backend", "transport"),
    [
        ("srun", 2, 1, "horovod", "gloo"),
        ("srun", 1, 2, "mpi", "mpi"),
        ("torchrun", 2, 2, "native", "gloo"),
        ("torchrun", 1, 2, "native", "shm"),
        ("mpirun", 2, 1, "horovod", "mpi"),
        ("mpirun", 2, 1, "mpi", "mpi"),
        ("horovodrun", 1, 2, "horovod", "gloo"),
    ],
)
def test_sbatch_runs_the_written_script(
    slurm: Slurm, launch: Launch, launcher: str, nodes: int, tasks: int, backend: str, transport: str
) -> None:
    asked = ("--scheduler", "slurm", "--nodes", str(nodes), "--tasks-per-node", str(tasks), "--time", "0:05:00")
    path = written(launch, *asked, "--launcher", launcher, "--backend", backend, program=(TINY_RANK, backend))
    env = {**slurm.env, **AS_ROOT, "DUALDIST_TRANSPORT": transport}
    reports = launch.reports([*slurm.sbatch(), path], nodes * tasks, env=env)
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
    reports = launch.reports([*slurm.sbatch(), path], 2, env=slurm.env)
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
    hosts = lines.split()
    nodefile = launch.write("nodes", "\n".join([*hosts, ""]))
    env = {"PBS_NODEFILE": nodefile, "PBS_JOBID": "1.pbs", "PBS_O_WORKDIR": str(launch.directory)}
    env |= stand_in(launch, "pbsdsh", PBSDSH)
    names = ["localhost", socket.gethostname(), *(f"node{index}" for index in range(len(hosts)))]
    launch.write("bin/hosts", f"127.0.0.1 {' '.join(names)}\n")

    def run(reports: Mapping[str, str]) -> Outcome:
        needs = {"PATH": env["PATH"], "PYTHONPATH": launch.env["PYTHONPATH"], **reports}
        setup = [word for name, value in needs.items() for word in ("--setup", f"export {name}={shlex.quote(value)}")]
        asked = ("--scheduler", "pbs", "--nodes", "2", "--tasks-per-node", "2", "--time", "1:00:00")
        return launch(["bash", written(launch, *asked, *setup, program=(TINY_RANK, "native", "PBS_NODENUM"))], env=env)

    nodes = len(set(hosts))
    reports = collected(launch, 2 * nodes, run)
    check(reports, (2,) * nodes, launcher="torchrun", backend="native")
    firsts = {str(hosts.index(host)) for host in hosts}
    assert {seen["variables"]["PBS_NODENUM"] for seen in reports} == firsts


def test_an_lsf_script_gives_jsrun_a_resource_set_a_rank(launch: Launch) -> None:
    path = written(launch, "--scheduler", "lsf", "--tasks-per-node", "2", program=(TINY_RANK, "native"))
    env = {"LS_SUBCWD": str(launch.directory), "LSB_JOBID": "7", **stand_in(launch, "jsrun", JSRUN)}
    check(launch.reports(["bash", path], 2, env=env), (2,), launcher="jsrun", backend="native")


def test_a_workstation_script_trains(launch: Launch) -> None:
    path = written(launch, "--scheduler", "workstation", "-np", "2", program=(TINY_RANK, "native"))
    check(launch.reports(["bash", path], 2), (2,), launcher="torchrun", backend="native", transport="shm")


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
        return launch(two_hosts.on(0, "bash", path), env={**two_hosts.env, **AS_ROOT, **AWAY, **env})

    check(collected(launch, 4, run), (2, 2), launcher=launcher, backend=backend)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_hosts_by_ssh_train_together(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    train_on_hosts(launch, two_hosts, launcher, ("--scheduler", "ssh", "-H", "hosta:2,hostb:2"), {})


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_hosts_of_a_nodefile_train_together(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    """As PBS runs the script after qsub, but for the nodefile and PBS's variables."""
    nodefile = launch.write("nodes", "hosta\nhosta\nhostb\nhostb\n")
    env = {"PBS_NODEFILE": nodefile, "PBS_O_WORKDIR": str(launch.directory), "PBS_JOBID": "1"}
    asked = ("--scheduler", "pbs", "--nodes", "2", "--tasks-per-node", "2")
    train_on_hosts(launch, two_hosts, launcher, asked, env)


PROGRAM = elastic_rank.__file__
SIZE = 2
WITHIN_S = 60


def record(launch: Launch, cluster: slurm.Slurm, job: str) -> dict[str, str]:
    """Return Slurm's record of the job."""
    shown = launch(["scontrol", "--oneliner", "show", "job", job], env=cluster.env)
    return dict(re.findall(r"(\w+)=(\S*)", shown.stdout))


@pytest.fixture
def hasty(base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """Yield a cluster in which a requeued job starts soon."""
    if lacking := slurm.missing(base_env["PATH"]):
        lack(", ".join(lacking), slurm.PACKAGES)
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), base_env, credential_s=10) as cluster:
        yield cluster
        cluster.cancel_all()


def test_slurm_requeues_a_job_that_it_signalled(hasty: slurm.Slurm, launch: Launch) -> None:
    """By the signal that the script's --signal requests."""
    folder = launch.directory / "reports"
    folder.mkdir()
    asked = ("--scheduler", "slurm", "--nodes", str(SIZE), "--time", "0:10:00", "--requeue", "120", "--write", "job.sh")
    launch([*RUN, *asked, PROGRAM, str(launch.directory), "all@7=waits"])
    job = launch(["sbatch", "--parsable", "job.sh"], env={**hasty.env, REPORT_DIR: str(folder)}).stdout.strip()
    assert record(launch, hasty, job)["Requeue"] == "1"

    def output() -> str:
        return "\n".join(path.read_text() for path in Path(launch.directory).glob("*.out"))

    assert eventually(lambda: len(list(launch.directory.glob("waiting-*"))) == SIZE, within_s=WITHIN_S), output()
    launch(["scancel", "--batch", "--signal=USR1", job], env=hasty.env)
    requeued = lambda: record(launch, hasty, job)["JobState"] == "PENDING" or not hasty.queue()  # noqa: E731
    assert eventually(requeued, within_s=WITHIN_S), output()
    assert record(launch, hasty, job)["Restarts"] == "1", output()
    assert not list(launch.directory.glob(".dualdist-stop*"))
    assert eventually(lambda: not hasty.queue(), within_s=WITHIN_S), output()
    assert record(launch, hasty, job)["JobState"] == "COMPLETED", output()
    assert output().count("dualdist: stopped after a step, as requested by the file") == 1, output()
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(SIZE)]
    assert reports[0]["parameters"] == reports[1]["parameters"]
    assert {report["begun"][0] >= 8 for report in reports} == {True}
    elastic_rank.assert_seen_once(reports[0])


def test_a_pbs_script_stops_by_the_clock_and_exits_with_75_until_the_job_is_done(launch: Launch) -> None:
    """There is no PBS here: this is what qsub runs on one node. torchrun itself exits with 1."""
    asked = ("--scheduler", "pbs", "--launcher", "torchrun", "--tasks-per-node", str(SIZE), "--time", "0:01:00")
    launch([*RUN, *asked, "--requeue", "52", "--write", "job.sh", PROGRAM, str(launch.directory), "all@7=waits"])
    env = {"PBS_O_WORKDIR": str(launch.directory), "PBS_JOBID": "7.server"}
    first = launch(["bash", "job.sh"], env=env, check=False)
    assert first.rc == 75, str(first)
    assert "exitcode  : 75" in first.stderr, str(first)
    again = launch.reports(["bash", "-c", "until bash job.sh; do [ $? = 75 ] || exit 1; done"], SIZE, env=env)
    assert again[0]["begun"][0] >= 8
    elastic_rank.assert_seen_once(again[0])
    assert not list(launch.directory.glob(".dualdist-stop*"))


def written_train_job(launch: Launch, launcher: str, reports: Mapping[str, str]) -> str:
    """Return the YAML of a TrainJob of two pods with two ranks each."""
    needs = {"PYTHONPATH": launch.env["PYTHONPATH"], **reports}
    words = [word for name, value in needs.items() for word in ("--env", f"{name}={value}")]
    asked = ("--launcher", launcher, "--nodes", "2", "--tasks-per-node", "2", "--container", "image", *words)
    path = written(launch, "--scheduler", "kubernetes", "--kubeflow", "v2", *asked, program=(TINY_RANK, "native"))
    return Path(path).read_text()


def test_a_train_job_starts_torchrun_in_each_pod(launch: Launch, two_hosts: Hosts) -> None:
    """There is no Kubernetes here: hosts take the places of pods, and have the variables of Trainer's torch plugin."""

    def run(reports: Mapping[str, str]) -> list[Outcome]:
        _, job = yaml.safe_load_all(written_train_job(launch, "torchrun", reports))
        trainer = job["spec"]["trainer"]
        plugin = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"], "MASTER_PORT": 29500}
        plugin |= {"MASTER_ADDR": "hosta"}
        env = {f"PET_{name}": str(value) for name, value in plugin.items()}
        env |= {one["name"]: one["value"] for one in trainer["env"]}
        ranks = ({**AWAY, **env, "PET_NODE_RANK": str(index)} for index in (0, 1))
        return side_by_side(launch, [(two_hosts.on(n, *trainer["command"]), env) for n, env in enumerate(ranks)])

    check(collected(launch, 4, run), (2, 2), launcher="torchrun", backend="native")


def test_a_train_job_starts_mpi_between_its_pods(launch: Launch, two_hosts: Hosts) -> None:
    """There is no Kubernetes here: hosts take the places of pods, and files those that Trainer's MPI plugin mounts."""
    keys = launch.directory / "keys"
    keys.mkdir()
    launch(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", str(keys / "id_rsa")])
    (keys / "id_rsa").chmod(0o640)
    (keys / "authorized_keys").write_bytes((keys / "id_rsa.pub").read_bytes())
    hostfile = launch.write("hostfile", "hosta slots=2\nhostb slots=2\n")
    places = {SSH_KEYS: keys, MPI_HOSTFILE: hostfile}
    places |= {SSH_KEY: launch.directory / "key", HOST_KEY: launch.directory / "host"}

    def run(reports: Mapping[str, str]) -> Outcome:
        text = written_train_job(launch, "mpirun", reports)
        text = re.sub("|".join(map(re.escape, places)), lambda place: str(places[place[0]]), text)
        runtime, job = yaml.safe_load_all(text)
        worker = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (container,), trainer = worker["containers"], job["spec"]["trainer"]
        plugin = {"OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}
        env = {**AWAY, **plugin, **{one["name"]: one["value"] for one in trainer["env"]}}
        with ExitStack() as stack:
            for host in (0, 1):
                stack.enter_context(launch.start(two_hosts.on(host, *container["command"])))
            return launch(two_hosts.on(0, *trainer["command"], *trainer["args"]), env=env)

    check(collected(launch, 4, run), (2, 2), launcher="mpirun", backend="native")
