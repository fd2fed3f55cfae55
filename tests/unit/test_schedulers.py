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
from dualdist.launch.option import parse_duration, parse_mebibytes
from dualdist.launch.run_request import RunRequest
from dualdist.launch.schedulers import SCHEDULERS, build_script_request, job_script, submit_script
from dualdist.launch.script_request import ScriptRequest

GOLDEN = """\
#!/bin/bash
# Slurm, torchrun: 2 nodes, 4 ranks on each. Made by `dualdist run --scheduler`, see launch/README.md.
# Not run on GPUs yet: dualdist's tests have CPUs only.

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
        ("slurm", {"gpus_per_node": 2, "tasks_per_node": 4}, "two ranks would share a GPU"),
        ("slurm", {"gpus_per_node": 4, "gpus_per_task": 1}, "request the same resource"),
        ("slurm", {"memory": "4G", "memory_per_task": "1G"},
         "memory 4G and memory_per_task 1G request the same resource"),
        ("slurm", {"gpus_per_task": 1, "tasks_per_node": 4}, "torchrun is one task on each node.*--gpus-per-node 4"),
        ("slurm", {"launcher": "horovodrun", "container": "i.sif"}, "outside of any container"),
        ("slurm", {"launcher": "mpiexec"},
         "launcher 'mpiexec': expected one of srun, torchrun, mpirun, horovodrun under"),
        ("slurm", {"launcher": "horovodrun", "transport": "mpi"}, "choose the launcher mpirun itself"),
        ("slurm", {"requeue": 120, "time": "0:02:00"}, "requeue 120: the job has 120 seconds; expected fewer"),
        ("pbs", {"requeue": 120}, "--requeue 120 under PBS: its script looks at the clock; say --time, too"),
        ("ssh", {"requeue": 120, "hosts": ("a",)}, "--requeue with the scheduler ssh: there is no queue"),
        ("workstation", {"requeue": 120}, "--requeue with the scheduler workstation: there is no queue"),
        ("lsf", {"launcher": "jsrun", "gpus_per_node": 3, "tasks_per_node": 2}, "3 GPUs for 2 tasks"),
        ("lsf", {"launcher": "jsrun", "memory": "4G"}, "whole nodes"),
        ("kubernetes", {}, "--container registry/name:tag"),
        ("kubernetes", {"container": "image", "setup": ("module load x",)}, "must be in the image"),
        ("kubernetes", {"container": "image", "account": "a"}, "namespace"),
        ("slurm", {"kubeflow": "v2"}, "--kubeflow v2 with the scheduler slurm: it is for kubernetes; leave it out"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused(name: str, given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job_script(name, ScriptRequest(("train.py",), **{"launcher": "torchrun", **given}))


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("--nodes", "0", "a whole number of 1 or more"),
        ("--tasks-per-node", "-1", "a whole number of 1 or more"),
        ("--cpus-per-task", "two", "a whole number of 1 or more"),
        ("--requeue", "9" * 10, "a whole number of 1 or more"),
        *(("--memory", size, "a number and a unit of K, M, G or T, as 64G") for size in ("64", "0G", "-4G")),
        *(("--time", time, "[days-]hours:minutes:seconds above 0") for time in ("90", "2:00", "0:00:00", "1:60:00")),
        ("--account", "a b", "one word"),
        ("--partition", "x\n#SBATCH --nodes=9", "one word"),
        ("--container", "$(id)", "one word"),
        ("--job-name", "a b", "letters, digits, dots, dashes and underscores"),
        ("--kubeflow", "2", "one of v1, v2"),
    ],
)
def test_resources_are_checked_as_they_are_read(
    option: str, given: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--scheduler", "slurm", f"{option}={given}", "train.py"]) == 2
    assert capsys.readouterr().err.startswith(f"dualdist run: {option} {given!r}: expected {expected}")


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
        ({"ranks": 2}, (1, 2)),
        ({"hosts": parse_hosts("a:2,b:2")}, (2, 2)),
        ({"hosts": parse_hosts("a:3,b:3"), "ranks": 6}, (2, 3)),
    ],
)
def test_ranks_fill_the_nodes(asked: Mapping[str, Any], found: tuple[int, int]) -> None:
    request = build_script_request("ssh" if "hosts" in asked else "slurm", RunRequest("train.py", **asked))
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
        build_script_request("ssh", RunRequest("train.py", **asked))


@pytest.mark.parametrize("asked", [{"backend": "mpi"}, {"backend": "horovod", "transport": "mpi"}])
def test_mpi_gets_a_launcher_that_starts_it(asked: Mapping[str, str]) -> None:
    found = {name: build_script_request(name, RunRequest("train.py", **asked)).launcher for name in SCHEDULERS}
    assert found == {"slurm": "srun", "lsf": "jsrun"} | dict.fromkeys(
        ("pbs", "kubernetes", "ssh", "workstation"), "mpirun"
    )
    assert "srun --kill-on-bad-exit=1 --mpi=pmix" in job_script(
        "slurm", build_script_request("slurm", RunRequest("train.py", **asked))
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus-per-node 4", "--gpus-per-node is an option of job scripts: add --scheduler NAME"),
        ("--scheduler slurm --launcher torchrun --backend mpi",
         "the backend mpi needs a launcher that starts MPI, not torchrun: choose srun or mpirun\n"),
        ("--scheduler slurm --max-restarts 2", "--max-restarts: only for ranks that dualdist run starts itself"),
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


DIRECTIVES = {
    "slurm": ("#SBATCH", ["--gres=gpu:a100:4", "--exclusive", "--constraint 'a&b' --qos=high", "--nodelist=a"]),
    "pbs": ("#PBS", ["-l place=scatter:excl", "-l software=2", "-W group_list=x"]),
    "lsf": ("#BSUB", ['-gpu "num=4:gmodel=A100"', '-R "rusage[licence=1]"', "-x"]),
}


@pytest.mark.parametrize("name", DIRECTIVES)
def test_directives_stand_in_the_script_as_they_are_given(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    prefix, given = DIRECTIVES[name]
    options = [word for directive in given for word in ("--directive", directive)]
    program = ["train.py", "--directive", "--lr"]
    words = ["run", "--scheduler", name, "--launcher", "mpirun", "--memory", "4G", *options, *program]
    assert main(words) == 0
    text = capsys.readouterr().out
    head, _, body = text.partition("program=")
    assert [line for line in head.splitlines() if line.startswith(prefix)][-len(given) :] == [
        f"{prefix} {directive}" for directive in given
    ]
    assert body.startswith("(train.py --directive --lr)\n")
    ranks = {"slurm": "--ntasks-per-node=4", "lsf": "span[ptile=4]", "pbs": "mpiprocs=1"}
    assert ranks[name] in head, "a rank for each GPU that a directive requests"
    assert ("place=scatter\n" in head) is False


@pytest.mark.parametrize(
    ("name", "given", "directive", "message"),
    [
        ("slurm", {}, "--nodes=2", "the option --nodes of dualdist run sets that: use it instead"),
        ("slurm", {}, "-N2", "--nodes"),
        ("slurm", {}, "--qos=high -n 4", "--tasks-per-node"),
        ("slurm", {}, "--cpus-per-task=2", "--cpus-per-task"),
        ("slurm", {"time": "1:00:00"}, "-t 5", "--time 1:00:00 sets that, too: leave one of them out"),
        ("slurm", {"queue": "gpu"}, "--part=cpu", "--partition gpu"),
        ("slurm", {"gpus_per_task": 1}, "--gres=lustre:1,gpu:a100:4", "--gpus-per-task 1"),
        ("slurm", {"requeue": 60, "time": "1:00:00"}, "--signal=USR2", "--requeue 60"),
        ("slurm", {}, "--comment=a\n#SBATCH --nodes=9", "expected one line of what follows #SBATCH"),
        ("slurm", {}, "gres=gpu:4", "expected one line of what follows #SBATCH"),
        ("slurm", {}, "--comment='a", "its quotes do not match"),
        ("pbs", {}, "-l select=2:ncpus=4", "--nodes"),
        ("pbs", {"time": "1:00:00"}, "-l software=1,walltime=5", "--time 1:00:00"),
        ("pbs", {"handed_on": ("HF_TOKEN",)}, "-v A", "--env HF_TOKEN"),
        ("pbs", {}, "-l place=excl", "expected scatter"),
        ("lsf", {}, "-n 4", "--nodes"),
        ("lsf", {"memory_per_task": "1G"}, "-R rusage[mem=4]", "--memory-per-task 1G"),
        ("kubernetes", {"container": "image"}, "--gres=gpu:4", "with the scheduler kubernetes: only slurm, pbs, lsf"),
        ("ssh", {"hosts": ("a",)}, "--gres=gpu:4", "with the scheduler ssh"),
    ],
)
def test_a_directive_that_sets_what_an_option_sets_is_refused(
    name: str, given: Mapping[str, Any], directive: str, message: str
) -> None:
    request = ScriptRequest(("train.py",), "mpirun", **given, directives=(directive,))
    with pytest.raises(UsageError, match=f"^{re.escape(f'--directive {directive!r}')}.*{re.escape(message)}"):
        job_script(name, request)
    if "sets that, too" in message:  # and without the option it is not
        assert directive in job_script(name, ScriptRequest(("train.py",), "mpirun", directives=(directive,)))


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


@pytest.mark.parametrize("nodes", [1, 2])
def test_horovodrun_under_pbs_names_hosts_only_where_there_are_several(nodes: int) -> None:
    request = RunRequest("train.py", launcher="horovodrun", ranks=2, resources={"nodes": nodes})
    assert ("-H " in job_script("pbs", build_script_request("pbs", request))) == (nodes == 2)
