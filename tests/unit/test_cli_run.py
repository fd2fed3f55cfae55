"""`dualdist run`: from its options to a command line, and errors before anything starts."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dualdist.cli import main
from dualdist.cli.run import shell_line, shell_lines
from dualdist.launch.env_defaults import allocated_tasks, cpus_per_task, default_launcher
from dualdist.launch.job import Command, Site
from dualdist.launch.processes import termination_raises
from dualdist.launch.ssh import start_peer

ALLOCATION = {"SLURM_JOB_ID": "17"}
STEP = ALLOCATION | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
ON_HOSTS = {"has_hosts": True}


@pytest.mark.parametrize(
    ("environ", "backend", "options", "launcher", "why"),
    [
        ({}, None, {}, "torchrun", "this is no Slurm allocation"),
        ({"SLURM_JOB_ID": ""}, None, {}, "torchrun", "this is no Slurm allocation"),
        (ALLOCATION, None, {}, "srun", "SLURM_JOB_ID=17"),
        (STEP, None, {}, "torchrun", "srun started this process"),  # a nested srun would wait for its cores forever
        (STEP | {"SLURM_STEP_ID": "4294967290"}, None, {}, "srun", ""),  # a shell of salloc
        (STEP, "horovod", ON_HOSTS, "horovodrun", ""),
        (ALLOCATION, "mpi", {}, "mpirun", ""),
        ({}, "native", {"transport": "mpi"}, "mpirun", ""),
        ({"DUALDIST_TRANSPORT": "mpi"}, "horovod", {}, "mpirun", ""),
        ({}, None, ON_HOSTS, "torchrun", ""),
        ({}, "horovod", ON_HOSTS, "horovodrun", ""),
        ({"DUALDIST_BACKEND": "horovod"}, None, ON_HOSTS, "horovodrun", ""),
        ({}, "mpi", ON_HOSTS, "mpirun", ""),
        (ALLOCATION, "horovod", ON_HOSTS, "srun", ""),
    ],
)
def test_the_default_launcher_fits_the_allocation_the_backend_and_the_hosts(
    environ: Mapping[str, str], backend: str | None, options: Any, launcher: str, why: str
) -> None:
    found, reason = default_launcher(environ, backend, **options)
    assert found == launcher
    assert why in reason


def test_an_allocation_says_how_many_tasks_were_asked_for_and_their_cores() -> None:
    for environ in ({}, {"SLURM_NTASKS": "4"}, ALLOCATION, STEP):
        assert allocated_tasks(environ) is None
    nodes = ALLOCATION | {"SLURM_JOB_NUM_NODES": "2"}
    assert allocated_tasks(nodes) == (2, "SLURM_JOB_NUM_NODES")
    assert allocated_tasks(nodes | {"SLURM_NTASKS": "4"}) == (4, "SLURM_NTASKS")
    cores = ALLOCATION | {"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "8"}
    assert [cpus_per_task(cores, ranks) for ranks in (1, 4, 8, 64)] == [8, 8, 4, 1], "more ranks than tasks share them"
    assert cpus_per_task(ALLOCATION, 4) is None


def test_lines_can_be_pasted_into_a_shell() -> None:
    built = Command(("torchrun", "a script.py"), {"DUALDIST_BACKEND": "native", "A": "b c"})
    assert shlex.split(shell_line(built)) == ["env", "DUALDIST_BACKEND=native", "A=b c", "torchrun", "a script.py"]
    assert shell_line(Command(("python", "x.py"))) == "python x.py"
    assert shell_lines([Command(("a", "1")), Command(("b c",))]) == ["a 1 &", "'b c' &", "wait"], "side by side"


DualdistRun = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dualdist_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> DualdistRun:
    """Call `dualdist run` in a folder with a program; return its exit code, stdout and stderr."""
    (tmp_path / "train.py").write_text("print('started')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main(["run", *words])
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
        return code, *capsys.readouterr()

    return run


def test_a_daemon_that_has_closed_its_output_gets_the_code_of_the_job(
    base_env: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    typed = f"{sys.executable} -m dualdist run -np 1 --launcher python -- train.py >&-"
    done = subprocess.run(["sh", "-c", typed], env=dict(base_env), cwd=tmp_path, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 7, done.stderr.decode()


def test_dry_run_prints_the_command_on_stdout_and_verbose_the_choice_on_stderr(dualdist_run: DualdistRun) -> None:
    program = ["-m", "package.train", "-np", "7", "--dry-run"]
    words = ["--verbose", "-np", "2", "--backend", "native", "--as-horovod", "--dry-run", *program]
    code, out, err = dualdist_run(*words)
    assert code == 0
    variables, backend, torchrun, *rest = shlex.split(out)
    assert (variables, backend, os.path.basename(torchrun)) == ("env", "DUALDIST_BACKEND=native", "torchrun")
    expected = ["--nproc-per-node=2", "-m", "--", "dualdist.launch.rank", "-m", "dualdist.hvd", *program]
    assert rest[-len(expected) :] == expected
    assert err == (
        "dualdist run: torchrun starts 2 rank(s), as no --launcher was given and this is no Slurm allocation "
        "(SLURM_JOB_ID is not set)\n"
    )
    assert dualdist_run(*words[1:]) == (0, out, "")
    for late in ("-np", "--np", "--nproc-per-node", "--nproc-per-node=3"):
        _, out, err = dualdist_run("--dry-run", "train.py", late, "2")
        name = late.partition("=")[0]
        assert err == f"dualdist run: {name} goes to train.py: options of dualdist run stand before it\n"
        assert "--nproc-per-node=1" in out
    # Also those that could be an abbreviation of several options, here or of torchrun.
    code, out, _ = dualdist_run("--dry-run", "train.py", "--n", "3", "--no=4")
    assert code == 0
    assert shlex.split(out)[-7:] == ["-m", "--", "dualdist.launch.rank", "train.py", "--n", "3", "--no=4"]


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        ((), 3, "srun starts 3 rank(s) (SLURM_NTASKS=3), as no --launcher was given and this is a Slurm allocation"),
        (("--launcher", "srun"), 3, "srun starts 3 rank(s) (SLURM_NTASKS=3), as no -np was given\n"),
        (("-np", "2"), 2, "srun starts 2 rank(s), as no --launcher was given and this is a Slurm allocation"),
    ],
)
def test_in_an_allocation_each_task_is_a_rank_with_its_cores(
    dualdist_run: DualdistRun, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], ranks: int, message: str
) -> None:
    Path("srun").write_text("#!/bin/sh\n")
    Path("srun").chmod(0o755)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PATH", os.getcwd(), prepend=":")
    for name, value in (("SLURM_JOB_ID", "17"), ("SLURM_NTASKS", "3"), ("SLURM_CPUS_PER_TASK", "5")):
        monkeypatch.setenv(name, value)
    _, out, err = dualdist_run(*words, "--dry-run", "train.py")
    assert message in err
    assert {f"--ntasks={ranks}", "--cpus-per-task=5", "OMP_NUM_THREADS=5"} <= {*shlex.split(out)}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--launcher torchrunn train.py", 2, "did you mean 'torchrun'?"),
        ("--launcher slurm train.py", 2, "did you mean 'srun'?"),
        ("--nproc-per-node 2 train.py", 2, "did you mean '-np'?"),
        ("--launcher jsrun train.py", 2, "only job scripts use jsrun: add --scheduler"),
        ("-np 0 train.py", 2, "dualdist run: -np '0': expected a whole number of 1 or more\n"),
        ("-np two train.py", 2, "-np 'two': expected a whole number of 1 or more"),
        ("--backend nccl train.py", 2, "expected one of auto, native, horovod, mpi; did you mean 'native'?"),
        ("--launcher python -np 2 train.py", 2, "plain python starts one rank"),
        ("--timeout nan train.py", 2, "--timeout 'nan': expected seconds above 0"),
        ("--network-interface eth7 train.py", 1, "has no network interface 'eth7' with an address; it has "),
        ("--env 'A B=1' train.py", 2, "--env A B=1: expected a variable's name"),
        ("--env NOWHERE train.py", 2, "--env NOWHERE: it is not set here; set it, or give a value"),
        ("", 2, "no program"),
        ("nowhere.py", 2, "no script 'nowhere.py' in "),
        ("python train.py", 2, "leave out the interpreter"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(
    dualdist_run: DualdistRun, words: str, code: int, message: str
) -> None:
    found, out, err = dualdist_run(*shlex.split(words))
    assert (found, out) == (code, "")
    assert message in err


def test_ending_it_while_it_looks_at_hosts_takes_no_time(base_env: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ntouch {tmp_path}/up\nexec sleep 60\n")
    (tmp_path / "ssh").chmod(0o755)
    argv = [sys.executable, "-m", "dualdist", "run", "-H", "localhost:1,elsewhere:1", "x.py"]
    env = {**base_env, "PATH": f"{tmp_path}:{base_env['PATH']}"}
    with subprocess.Popen(argv, env=env, cwd=tmp_path, stderr=subprocess.DEVNULL) as running:
        while not (tmp_path / "up").exists():
            assert running.poll() is None
        running.terminate()
        assert running.wait(10) == 143


def test_ending_it_while_ssh_is_being_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)  # before the caller knows of the process

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(SystemExit), termination_raises(), start_peer("b", ["sleep", "60"], Site("", {}, "")):
        pytest.fail("it goes on")
    assert [process.returncode for process in started] == [-signal.SIGKILL]
