"""Job scripts: the exact text of one, the documented words of each scheduler, and what is refused."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dualdist.cli import main
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.hosts import parse_hosts
from dualdist.launch.job import parse_duration, parse_mebibytes
from dualdist.launch.schedulers import SCHEDULERS, ScriptRequest, build_script_request, job_script, submit_script

GOLDEN = """\
#!/bin/bash
# Slurm, torchrun: 2 nodes, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.

# ==== edit from here ====
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --mem=256G
#SBATCH --time=36:00:00
#SBATCH --partition=gpu
#SBATCH --account=project
ranks_per_node=4
program=(train.py --name 'a b')
container=(apptainer exec --nv image.sif)
variables=(OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1 'A=it'"'"'s' DUALDIST_BACKEND=native) # of every rank
setup() { # makes python the one that has dualdist
    module load python
}
# ==== to here; what follows needs no change ====

set -eo pipefail
setup
export "${variables[@]}"
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# The ranks meet on the first node, where this script runs: take a port that is free here.
head="$(hostname)"
port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')"
srun --kill-on-bad-exit=1 \\
    "${container[@]}" torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks_per_node" \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:$port" \\
    "${program[@]}"
"""
# Every option that a script may use, as sbatch(1), qsub(1B) of PBS Pro and Torque, and bsub of LSF 10.1 have them.
DOCUMENTED = {
    "slurm": r"#SBATCH --(job-name|output|partition|account)=[\w./%@+-]+|#SBATCH --(nodes|ntasks-per-node|"
    r"cpus-per-task|gpus-per-node|gpus-per-task)=\d+|#SBATCH --mem=\d+[MG]|#SBATCH --time=\d+:\d\d:\d\d|"
    r"#SBATCH --signal=B:USR1@\d+|#SBATCH --requeue|#SBATCH --open-mode=append",
    "pbs": r"##?PBS -[NqA] \S+|#PBS -j oe|#PBS -l select=\d+:ncpus=\d+:mpiprocs=\d+(:ngpus=\d+)?(:mem=\d+[mg]b)?|"
    r"#PBS -r y|#PBS -v \w+(,\w+)*|#PBS -l place=scatter|#PBS -l walltime=\d+:\d\d:\d\d|"
    r"##PBS -l nodes=\d+:ppn=\d+(:gpus=\d+)?",
    "lsf": r"#BSUB -[JoqP] \S+|#BSUB -(nnodes|n) \d+|#BSUB -W \d+:\d\d|#BSUB -gpu \"num=\d+:mode=shared\"|"
    r"#BSUB -R \"(span\[ptile=\d+\]|affinity\[core\(\d+\)\]|rusage\[mem=\d+[MG]B\])\"|"
    r"#BSUB -r|#BSUB -Q 75|#BSUB -wa USR1|#BSUB -wt \d+",
}
EVERYTHING: dict[str, Any] = {
    "nodes": 2, "tasks_per_node": 4, "gpus_per_node": 4, "cpus_per_task": 8, "memory": "256G", "time": "1-12:00:00",
    "queue": "gpu", "account": "project",
}  # fmt: skip
KINDS = [(name, launcher) for name, one in SCHEDULERS.items() for launcher in one.launchers if name != "kubernetes"]


def everything(name: str, launcher: str, requeue: int | None = None) -> ScriptRequest:
    given: dict[str, Any] = {key: value for key, value in EVERYTHING.items() if (launcher, key) != ("jsrun", "memory")}
    given |= {"nodes": 1} if name == "workstation" else {}
    hosts = ("a", "b") if name == "ssh" else ()
    return ScriptRequest(("train.py",), launcher, **given, hosts=hosts, requeue=requeue, handed_on=("HF_TOKEN", "A"))


def test_a_script_is_what_a_person_would_write() -> None:
    more: dict[str, Any] = {"setup": ("module load python",), "container": "image.sif", "env": {"A": "it's"}}
    request = ScriptRequest(("train.py", "--name", "a b"), "torchrun", **EVERYTHING, **more, backend="native")
    assert job_script("slurm", request) == GOLDEN
    assert "#BSUB -W 0:02\n" in job_script("lsf", ScriptRequest(("train.py",), "jsrun", time="0:01:01")), "rounded up"


@pytest.mark.parametrize(
    ("name", "launcher", "requeue"),
    [(*kind, None) for kind in KINDS] + [(*kind, 120) for kind in KINDS if SCHEDULERS[kind[0]].submit],
)
def test_a_script_is_bash_and_uses_documented_options_alone(name: str, launcher: str, requeue: int | None) -> None:
    text = job_script(name, everything(name, launcher, requeue))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=30)
    directives = re.findall(r"^##?(?:SBATCH|PBS|BSUB) .*", text, re.MULTILINE)
    assert bool(directives) == (name in DOCUMENTED)
    for line in directives:
        assert re.fullmatch(DOCUMENTED[name], line), line
    if directives:  # a scheduler stops reading at the first command
        first = next(n for n, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
        assert max(text.splitlines().index(line) for line in directives) < first


@pytest.mark.parametrize(("name", "launcher"), [kind for kind in KINDS if kind[1] != "horovodrun"])
def test_in_a_container_every_rank_is_in_it(name: str, launcher: str) -> None:
    given = {"nodes": 1} if name == "workstation" else {"nodes": 2}
    request = ScriptRequest(
        ("train.py",), launcher, **given, hosts=("a", "b")[: given["nodes"] * (name == "ssh")], container="i"
    )
    body = job_script(name, request).partition("# ==== to here")[2]
    starts = re.findall(r"(?:(\"\$\{container\[@\]\}\") )?(?:torchrun --|python -m dualdist exec \"\$\{program)", body)
    assert starts == ['"${container[@]}"']


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("slrum", {"launcher": "srun"}, r"scheduler 'slrum'.*did you mean 'slurm'\?"),
        ("slurm", {"nodes": 0}, "--nodes 0: expected a whole number of 1 or more"),
        ("slurm", {"tasks_per_node": -1}, "--tasks-per-node -1"),
        ("slurm", {"cpus_per_task": 0}, "--cpus-per-task 0"),
        ("slurm", {"gpus_per_node": -1}, "--gpus-per-node -1: expected a whole number of 0 or more"),
        ("slurm", {"gpus_per_node": 2, "tasks_per_node": 4}, "two ranks would share a GPU"),
        ("slurm", {"gpus_per_node": 4, "gpus_per_task": 1}, "request the same resource"),
        ("slurm", {"memory": "4G", "memory_per_task": "1G"},
         "memory 4G and memory_per_task 1G request the same resource"),
        ("slurm", {"gpus_per_task": 1, "tasks_per_node": 4}, "torchrun is one task on each node.*--gpus-per-node 4"),
        ("slurm", {"memory": "64"}, "--memory '64': expected a number and a unit"),
        ("slurm", {"memory": "0G"}, "--memory '0G'"),
        ("slurm", {"memory": "-4G"}, "--memory '-4G'"),
        ("slurm", {"time": "90"}, r"--time '90': expected \[days-\]hours:minutes:seconds"),
        ("slurm", {"time": "2:00"}, "--time '2:00': expected"),
        ("slurm", {"time": "0:00:00"}, "above 0"),
        ("slurm", {"time": "1:60:00"}, "--time '1:60:00'"),
        ("slurm", {"account": "a b"}, "--account 'a b': expected one word"),
        ("slurm", {"queue": "x\n#SBATCH --nodes=9"}, "--partition"),
        ("slurm", {"container": "$(id)"}, "--container"),
        ("slurm", {"job_name": "a b"}, "--job-name 'a b'"),
        ("slurm", {"launcher": "horovodrun", "container": "i.sif"}, "outside of any container"),
        ("slurm", {"launcher": "mpiexec"},
         "launcher 'mpiexec': expected one of srun, torchrun, mpirun, horovodrun under"),
        ("slurm", {"launcher": "horovodrun", "transport": "mpi"}, "choose the launcher mpirun itself"),
        ("slurm", {"requeue": 0}, "--requeue 0: expected a whole number of 1 or more"),
        ("slurm", {"requeue": 120, "time": "0:02:00"}, "requeue 120: the job has 120 seconds; expected fewer"),
        ("pbs", {"requeue": 120}, "--requeue 120 under PBS: its script looks at the clock; say --time, too"),
        ("ssh", {"requeue": 120, "hosts": ("a",)}, "--requeue with the scheduler ssh: there is no queue"),
        ("workstation", {"requeue": 120}, "--requeue with the scheduler workstation: there is no queue"),
        ("lsf", {"launcher": "jsrun", "gpus_per_node": 3, "tasks_per_node": 2}, "3 GPUs for 2 tasks"),
        ("lsf", {"launcher": "jsrun", "memory": "4G"}, "whole nodes"),
        ("kubernetes", {}, "--container registry/name:tag"),
        ("kubernetes", {"container": "image", "setup": ("module load x",)}, "must be in the image"),
        ("kubernetes", {"container": "image", "account": "a"}, "namespace"),
        ("kubernetes", {"container": "image", "kubeflow": "2"}, "version of Kubeflow's API '2': expected one"),
        ("slurm", {"kubeflow": "v2"}, "--kubeflow v2 with the scheduler slurm: it is for kubernetes; leave it out"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused(name: str, given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job_script(name, ScriptRequest(("train.py",), **{"launcher": "torchrun", **given}))


def test_time_and_memory_are_read_in_one_way() -> None:
    for text, seconds in (("2:00:00", 7200), ("0:00:01", 1), ("1-12:00:00", 129600), ("100:00:00", 360000)):
        assert parse_duration(text) == seconds
        assert parse_duration(str(ScriptRequest(("train.py",), "srun", time=text).clock)) == seconds
    for text, mib in (("64G", 65536), ("1.5GB", 1536), ("512MiB", 512), ("1T", 1 << 20), ("1K", 1)):
        assert parse_mebibytes(text) == mib


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, (1, 1)),
        ({"ranks": 8}, (1, 8)),
        ({"resources": {"nodes": 4}}, (4, 1)),
        ({"resources": {"nodes": 4, "gpus_per_node": 8}}, (4, 8)),
        ({"resources": {"nodes": 4, "gpus_per_node": 8, "tasks_per_node": 2}}, (4, 2)),
        ({"resources": {"nodes": 4}, "ranks": 16}, (4, 4)),
        ({"resources": {"nodes": None, "tasks_per_node": None}, "ranks": 2}, (1, 2)),
        ({"hosts": parse_hosts("a:2,b:2")}, (2, 2)),
        ({"hosts": parse_hosts("a:3,b:3"), "ranks": 6}, (2, 3)),
    ],
)
def test_ranks_fill_the_nodes(asked: Mapping[str, Any], found: tuple[int, int]) -> None:
    request = build_script_request("ssh" if "hosts" in asked else "slurm", ("train.py",), **asked)
    assert (request.nodes, request.tasks_per_node) == found


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"resources": {"nodes": 3}, "ranks": 4}, "4 ranks on 3 nodes with the same number on each"),
        ({"resources": {"nodes": 2, "tasks_per_node": 3}, "ranks": 4}, "with 3 on each"),
        ({"hosts": parse_hosts("a:1,b:2")}, "the same number of slots on each"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(asked: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_script_request("ssh", ("train.py",), **asked)


@pytest.mark.parametrize("asked", [{"backend": "mpi"}, {"backend": "horovod", "transport": "mpi"}])
def test_mpi_gets_a_launcher_that_starts_it(asked: Mapping[str, str]) -> None:
    found = {name: build_script_request(name, ("train.py",), **asked).launcher for name in SCHEDULERS}
    assert found == {"slurm": "srun", "lsf": "jsrun"} | dict.fromkeys(
        ("pbs", "kubernetes", "ssh", "workstation"), "mpirun"
    )
    assert "srun --kill-on-bad-exit=1 --mpi=pmix" in job_script(
        "slurm", build_script_request("slurm", ("train.py",), **asked)
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus-per-node 4", "--gpus-per-node is an option of job scripts: add --scheduler NAME"),
        ("--scheduler slurm --launcher torchrun --backend mpi",
         "the backend mpi needs a launcher that starts MPI, not torchrun: choose srun or mpirun\n"),
        ("--scheduler slurm --max-restarts 2", "--max-restarts: only for ranks that dualdist run starts itself"),
        ("--scheduler slurm --timeout 60", "--timeout: only"),
        ("--scheduler slurm --log-dir logs", "--log-dir: only"),
        ("--scheduler slurm --tag-output", "--tag-output: only"),
        ("--scheduler slurm --json -", "--json: only"),
        ("--scheduler slurm -H a:2,b:2", "hosts a:2,b:2: slurm chooses the nodes itself"),
    ],
)  # fmt: skip
def test_options_that_conflict_or_that_scripts_ignore_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["run", *words.split(), "train.py"]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_a_job_is_called_as_its_program() -> None:
    titles = {("a/train.py",): "train", ("-m", "pkg.module"): "module", ("my job!.py",): "my-job", ("...",): "train"}
    for program, title in {**titles, ("3d.py",): "job-3d"}.items():
        assert ScriptRequest(program, "srun").title == title


def test_a_file_that_a_person_changed_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    words = f"run --scheduler slurm --nodes 4 --gpus-per-node 4 --time 2:00:00 --write {path} train.py --lr 1".split()
    for _ in range(2):
        assert main(words) == 0
    changed = path.read_text().replace("nodes=4", "nodes=8")
    path.write_text(changed)
    assert (main(words), path.read_text()) == (2, changed)
    assert "job.sh exists with another text" in capsys.readouterr().err


def test_a_job_file_serves_hosts_and_schedulers_that_choose_nodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Scripts ignore some options of job files, with a warning."""
    (tmp_path / "job.yaml").write_text("program: train.py\nranks: 4\nhosts: a:2,b:2\ntag_output: true\n")
    words = ["run", "--config", str(tmp_path / "job.yaml"), "--scheduler", "slurm", "--nodes", "2"]
    assert main(words) == 0
    output = capsys.readouterr()
    assert output.err == "dualdist run: slurm scripts ignore: tag_output, hosts\n"
    assert "--ntasks-per-node=2" in output.out
    (tmp_path / "job.yaml").write_text("program: train.py\nhosts: [hosta:2, hostb:2]\n")
    words = ["run", "--config", str(tmp_path / "job.yaml"), "-np", "8"]
    assert main([*words, "--scheduler", "slurm"]) == 0
    assert "#SBATCH --ntasks" in capsys.readouterr().out
    assert main([*words, "--dry-run"]) == 2
    assert "8 ranks on hosts with 4 slots" in capsys.readouterr().err


@pytest.mark.parametrize(("scheduler", "line"), [("workstation", "ranks_per_node=4"), ("ssh", "hosts=(localhost)")])
def test_this_hosts_own_names_say_how_many_ranks_it_takes(
    scheduler: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", "--scheduler", scheduler, "-H", "localhost:4", "train.py"]) == 0
    output = capsys.readouterr()
    assert {line, "ranks_per_node=4"} <= {*output.out.splitlines()}
    (tmp_path / "job.yaml").write_text("program: train.py\nhosts: localhost:4\n")
    assert main(["run", "--config", str(tmp_path / "job.yaml"), "--scheduler", scheduler]) == 0
    assert capsys.readouterr() == output


def test_a_dry_run_writes_and_submits_nothing_and_submit_names_a_missing_scheduler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no scheduler
    words = ["--submit", "--write", str(tmp_path / "job.sh"), "--network-interface", "ib0"]
    assert main(["run", "--scheduler", "slurm", "--dry-run", *words, "train.py"]) == 0
    assert "GLOO_SOCKET_IFNAME=ib0" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"qsub was not found on PATH: log in to a host of the cluster"):
        submit_script("pbs", "")
    with pytest.raises(UsageError, match="it has no queue"):
        submit_script("ssh", "")


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("slurm", "check that its setup() loads what a node needs, then sbatch < 'a job'"),
        ("kubernetes", "next: kubectl create -f - < 'a job'"),
        ("workstation", "check that its setup() loads what a node needs, then bash 'a job'"),
    ],
)
def test_a_written_script_is_reported_with_the_next_step(
    scheduler: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--container", "image"] if scheduler == "kubernetes" else []
    assert main(["run", "--scheduler", scheduler, *options, "--write", "a job", "train.py"]) == 0
    assert capsys.readouterr().err == f"dualdist run: wrote a job; {message}\n"


def test_horovodrun_under_pbs_names_hosts_only_where_there_are_several() -> None:
    one, two = (
        job_script(
            "pbs", build_script_request("pbs", ("train.py",), launcher="horovodrun", ranks=2, resources={"nodes": n})
        )
        for n in (1, 2)
    )
    assert "-H " not in one
    assert "-H " in two
