"""`dualdist run`: from its options to a command line, and errors before anything starts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dualdist.cli.run import program_words, shell_line, shell_lines
from dualdist.errors import UsageError
from dualdist.launch import hosts as host_check
from dualdist.launch.env_defaults import allocated_tasks, cpus_per_task, default_launcher
from dualdist.launch.job import Command
from dualdist.launch.processes import termination_raises

FACE = ("-m", "dualdist.hvd")


ALLOCATION = {"SLURM_JOB_ID": "17"}
STEP = ALLOCATION | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
ON_HOSTS = {"has_hosts": True}


@pytest.mark.parametrize(
    ("environ", "backend", "options", "launcher", "why"),
    [
        ({}, None, {}, "torchrun", "this is no Slurm allocation"),
        ({"SLURM_JOB_ID": ""}, None, {}, "torchrun", "this is no Slurm allocation"),
        ({"SLURM_CONF": "/etc/slurm.conf"}, None, {}, "torchrun", "this is no Slurm allocation"),
        (ALLOCATION, None, {}, "srun", "SLURM_JOB_ID=17"),
        (STEP, None, {}, "torchrun", "srun started this process"),  # a nested srun would wait for its cores forever
        (STEP | {"SLURM_STEP_ID": "4294967290"}, None, {}, "srun", ""),  # a shell of salloc
        (STEP, "horovod", ON_HOSTS, "horovodrun", ""),
        (ALLOCATION, "mpi", {}, "mpirun", ""),
        ({}, "native", {"transport": "mpi"}, "mpirun", ""),
        ({"DUALDIST_TRANSPORT": "mpi"}, "horovod", {}, "mpirun", ""),
        ({}, "horovod", {}, "torchrun", ""),
        ({}, None, ON_HOSTS, "torchrun", ""),
        ({}, "auto", ON_HOSTS, "torchrun", ""),
        ({}, "native", ON_HOSTS, "torchrun", ""),
        ({}, "horovod", ON_HOSTS, "horovodrun", ""),
        ({"DUALDIST_BACKEND": "horovod"}, None, ON_HOSTS, "horovodrun", ""),
        ({"DUALDIST_BACKEND": "horovod"}, "native", ON_HOSTS, "torchrun", ""),
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


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "4"}, None),
        ({"SLURM_JOB_ID": "17"}, None),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}, (2, "SLURM_JOB_NUM_NODES")),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}, (4, "SLURM_NTASKS")),
        (STEP, None),
    ],
)
def test_an_allocation_says_how_many_tasks_were_asked_for(
    environ: Mapping[str, str], found: tuple[int, str] | None
) -> None:
    assert allocated_tasks(environ) == found


@pytest.mark.parametrize(("ranks", "cpus"), [(1, 8), (4, 8), (8, 4), (64, 1)])
def test_more_ranks_than_tasks_share_their_cores(ranks: int, cpus: int) -> None:
    environ = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "8"}
    assert cpus_per_task(environ, ranks) == cpus
    assert cpus_per_task({"SLURM_JOB_ID": "17"}, ranks) is None


@pytest.mark.parametrize(
    ("as_horovod", "is_module", "expected"),
    [
        (False, False, ("train.py", "-m", "x")),
        (False, True, ("-m", "train.py", "-m", "x")),
        (True, False, (*FACE, "train.py", "-m", "x")),
        (True, True, (*FACE, "-m", "train.py", "-m", "x")),
    ],
)
def test_program_follows_the_face_and_keeps_its_arguments(
    as_horovod: bool, is_module: bool, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert program_words(("train.py", "-m", "x"), is_module=is_module, as_horovod=as_horovod) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no program"),
        (("nowhere.py",), "no script 'nowhere.py' in .*; or -m for a module"),
        (("python", "train.py"), "no script 'python' in .*; leave the interpreter out"),
        (("/usr/nowhere/python3.11", "train.py"), "leave the interpreter out"),
    ],
)
def test_program_that_cannot_be_run_is_refused_with_a_hint(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        program_words(words, is_module=False, as_horovod=False)


def test_line_can_be_pasted_into_a_shell() -> None:
    built = Command(("torchrun", "a script.py"), {"DUALDIST_BACKEND": "native", "A": "b c"})
    assert shlex.split(shell_line(built)) == ["env", "DUALDIST_BACKEND=native", "A=b c", "torchrun", "a script.py"]
    assert shell_line(Command(("python", "x.py"))) == "python x.py"


def test_several_commands_run_side_by_side_when_pasted() -> None:
    assert list(shell_lines([Command(("a", "1")), Command(("b c",))])) == ["a 1 &", "'b c' &", "wait"]


def dualdist_run(env: Mapping[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dualdist", "run", *words]
    return subprocess.run(argv, env=dict(env), cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_daemon_that_has_closed_its_output_gets_the_code_of_the_job(
    base_env: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    typed = f"{sys.executable} -m dualdist run -np 1 --launcher python train.py >&-"
    done = subprocess.run(["sh", "-c", typed], env=dict(base_env), cwd=tmp_path, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_dry_run_prints_the_command_on_stdout_and_the_choice_on_stderr(
    base_env: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    words = ("-np", "2", "--backend", "native", "--as-horovod", "--dry-run", "train.py", "-np", "7", "--dry-run")
    done = dualdist_run(base_env, tmp_path, *words)
    assert done.returncode == 0
    variables, backend, torchrun, *rest = shlex.split(done.stdout)
    assert (variables, backend, os.path.basename(torchrun)) == ("env", "DUALDIST_BACKEND=native", "torchrun")
    wrapped = ["-m", "dualdist.launch.rank", *FACE, "train.py", "-np", "7", "--dry-run"]
    assert rest[-9:] == ["--nproc-per-node=2", *wrapped]
    assert done.stderr == (
        "dualdist run: torchrun starts 2 rank(s), as no --launcher was given and this is no Slurm allocation "
        "(SLURM_JOB_ID is not set)\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "srun starts 3 rank(s) (SLURM_NTASKS=3), as no --launcher was given and this is a Slurm allocation"),
        (("--launcher", "srun"), "srun starts 3 rank(s) (SLURM_NTASKS=3), as no -np was given\n"),
        (("-np", "2"), "srun starts 2 rank(s), as no --launcher was given and this is a Slurm allocation"),
    ],
)
def test_in_an_allocation_each_task_is_a_rank_with_its_cores(
    base_env: Mapping[str, str], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    env = {name: value for name, value in base_env.items() if name != "OMP_NUM_THREADS"}
    env |= {"PATH": f"{tmp_path}:{env['PATH']}", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "3", "SLURM_CPUS_PER_TASK": "5"}
    done = dualdist_run(env, tmp_path, *words, "--dry-run", "train.py")
    assert message in done.stderr
    ranks = words[1] if words[:1] == ("-np",) else "3"
    assert {f"--ntasks={ranks}", "--cpus-per-task=5", "OMP_NUM_THREADS=5"} <= {*shlex.split(done.stdout)}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--launcher", "torchrunn", "x.py"), 1, "did you mean 'torchrun'?"),
        (("--launcher", "jsrun", "x.py"), 1, "only job scripts use jsrun: add --scheduler"),
        (("-np", "0", "x.py"), 1, "ranks=0"),
        (("-np", "two", "x.py"), 2, "invalid int value: 'two'"),
        (("--backend", "nccl", "x.py"), 2, "choose from"),
        (("--launcher", "python", "-np", "2", "x.py"), 1, "plain python starts one rank"),
        (("--timeout", "nan", "x.py"), 1, "--timeout nan: expected seconds above 0"),
        (("--network-interface", "eth7", "x.py"), 1, "has no network interface 'eth7' with an address; it has lo"),
        (("--env", "A B=1", "x.py"), 1, "--env A B=1: expected a variable's name"),
        (("--env", "NOWHERE", "x.py"), 1, "--env NOWHERE: it is not set here; set it, or give a value"),
        ((), 1, "no program"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(
    base_env: Mapping[str, str], tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "x.py").write_text("print('started')")
    done = dualdist_run(base_env, tmp_path, *words)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_ending_it_while_it_looks_at_hosts_takes_no_time(base_env: Mapping[str, str], tmp_path: Path) -> None:
    """One of them does not answer."""
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

    class Popen(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)  # before the caller knows of the process

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(SystemExit), termination_raises(), host_check._start_ssh("elsewhere", ["sleep", "60"]):
        pytest.fail("it goes on")
    assert [process.returncode for process in started] == [-signal.SIGKILL]


@pytest.mark.parametrize(("text", "code"), [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)])
def test_exit_code_of_the_job_is_passed_on(base_env: Mapping[str, str], tmp_path: Path, text: str, code: int) -> None:
    (tmp_path / "x.py").write_text(text)
    assert dualdist_run(base_env, tmp_path, "--launcher", "python", "--", "x.py").returncode == code
