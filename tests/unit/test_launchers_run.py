"""Running a command: how it ends, what is reported, and that nothing outlives it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dualdist.errors import LaunchError
from dualdist.launch import processes
from dualdist.launch.execute import find_site, run_command
from dualdist.launch.job import Command
from dualdist.launch.processes import signals_deferred

# Starts a child in a session of its own, as launchers start ranks, writes its pid to argv[1], and ends or stays.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
print("child started", flush=True)
time.sleep(float(sys.argv[2]))
"""


def python(program: str, *arguments: str) -> Command:
    return Command((sys.executable, "-c", program, *arguments))


def has_ended(pid: int) -> bool:
    """Return True if the process has ended, or ends now: while it exits, the variables that mark it are gone."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_code_and_output_are_captured_and_variables_come_on_top_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also outside the main thread."""
    monkeypatch.setenv("OURS", "1")
    program = "import os, sys; print(os.environ['OURS'], os.environ['ITS'], flush=True); sys.exit('err')"
    command = replace(python(program), env={"ITS": "2"})
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: run_command(command, timeout_s=60, what="a job")).result()
    assert result == (1, "1 2\nerr\n")
    with pytest.raises(LaunchError, match=r"a job could not be started .*/nowhere/mpirun -np 2"):
        run_command(Command(("/nowhere/mpirun", "-np", "2")), timeout_s=1, what="a job")
    assert find_site().python == sys.executable
    assert Path(find_site().tools["torchrun"]).parent == Path(sys.executable).parent


def test_processes_of_a_job_that_times_out_or_outlives_its_launcher_are_ended_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a launcher that ignores SIGTERM."""
    monkeypatch.setattr("dualdist.launch.execute.GRACE_S", 0.5)
    file, ignore = tmp_path / "pid", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with pytest.raises(LaunchError) as caught:
        run_command(python(ignore + PARENT, str(file), "600"), timeout_s=2, what="the training")
    message, pid = str(caught.value), int(file.read_text())
    assert message.startswith("the training was not done after 2 s and was ended; still running: ")
    assert f"{pid} (" in message
    assert "child started" in message
    assert has_ended(pid)
    with pytest.raises(LaunchError, match=r"the training ended, but left processes behind"):
        run_command(python(PARENT, str(file), "0"), timeout_s=60, what="the training")
    assert has_ended(int(file.read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ending_the_runner_ends_the_job(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "pid"
    program = (
        "import sys; from dualdist.launch.job import Command; from dualdist.launch.execute import run_command\n"
        "run_command(Command(tuple(sys.argv[1:])), timeout_s=None, what='a job')"
    )
    job = python(PARENT, str(file), "600").argv
    with subprocess.Popen([sys.executable, "-c", program, *job], stderr=subprocess.DEVNULL) as runner:
        while not (file.exists() and file.read_text()):
            assert runner.poll() is None
            time.sleep(0.01)
        os.kill(runner.pid, number)
        runner.wait(60)
    assert runner.returncode != 0
    assert has_ended(int(file.read_text()))


def test_a_process_that_cannot_be_killed_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A zombie stands for a process in uninterruptible sleep."""
    monkeypatch.setattr("dualdist.launch.processes.KILL_TIMEOUT_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        assert processes.wait_or_kill(list, 0, lambda: [ended.pid]) == []
    assert f"SIGKILL did not end every process within 0.2 s; still running: {ended.pid} (" in capfd.readouterr().err


def test_a_process_that_is_no_longer_ours_is_passed_over() -> None:
    program = """
import os, signal
from dualdist.launch import processes
if os.geteuid() == 0:
    os.setuid(65534)
processes.send_signal([1, os.getpid()], signal.SIGURG)
"""
    assert run_command(python(program), timeout_s=60, what="a job")[0] == 0


def test_a_deferred_signal_is_raised_at_the_end_of_the_block_even_if_it_fails() -> None:
    """test_cli_run.py has one of a block that starts a process."""

    def start() -> None:
        with signals_deferred():
            signal.raise_signal(signal.SIGINT)
            raise OSError("no such program")

    with pytest.raises(KeyboardInterrupt):
        start()
