"""A loader's workers outlive the signals that tell their rank to stop after the step, but not their rank; what they
start themselves ends by such a signal.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.smoke
PROGRAM = """
import os, signal, subprocess, sys, threading, time
from multiprocessing import get_context
from pathlib import Path
import dualdist as dd

COUNT = 40
BEGAN = Path(__file__).with_name("began")
if "forkserver" not in sys.argv:  # where signals reach a thread that begins before the worker does
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()  # as libraries do when they are imported


class Data:
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index


def begin(number):
    BEGAN.with_suffix(f".{number}").touch()


def tell(pids):
    \"\"\"As a scheduler, which is no relative.\"\"\"
    for name in ("TERM", "USR1"):
        subprocess.run(["kill", "-" + name, *map(str, pids)], check=True)


def main(start, handles):
    dd.init()
    if handles == "yes":
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    sampler = dd.Sampler(Data(), remainder="drop", shuffle=False)
    loader = dd.loader(
        Data(), 1, sampler=sampler, num_workers=2, prefetch_factor=1, multiprocessing_context=start,
    )
    loader.worker_init_fn = begin
    batches = iter(loader)
    assert loader.worker_init_fn is begin
    workers = batches._batches._workers
    pids = [worker.pid for worker in workers]
    deadline = time.monotonic() + 60
    while start == "forkserver" and not all(BEGAN.with_suffix(f".{number}").exists() for number in range(2)):
        assert time.monotonic() < deadline  # the server is the program's, too, and its processes end by a signal
        time.sleep(0.01)
    tell(pids)
    seen = []
    for batch in batches:
        seen += batch.tolist()
        must_stop = dd.elastic.should_stop()
        if len(seen) < 20:
            tell(pids)
        elif not must_stop:
            tell([os.getpid(), *pids])
        if len(seen) == COUNT - 10:
            break
    assert seen == list(range(COUNT - 10)), seen
    assert must_stop
    workers[0].terminate()
    workers[0].join(10)
    assert workers[0].exitcode == 0, workers[0].exitcode
    if start == "forkserver":
        other = get_context(start).Process(target=time.sleep, args=(3600,))
        other.start()
        other.terminate()
        other.join(20)
        assert other.exitcode == -signal.SIGTERM, other.exitcode
    print("PID", pids[1], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


STARTS = """
import multiprocessing, signal, subprocess, time
import dualdist as dd


class Data:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index:
            child = subprocess.Popen(["sleep", "3600"])
            child.terminate()
            return child.wait(20) == -signal.SIGTERM
        multiprocessing.current_process()._config["daemon"] = False  # so that it may have children
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
        child.start()
        child.terminate()
        child.join(20)
        return not child.is_alive()


dd.init()
sampler = dd.Sampler(Data(), remainder="drop", shuffle=False)
print([batch.tolist() for batch in dd.loader(Data(), 1, sampler=sampler, num_workers=1)])
"""


def run(folder: Path, env: Mapping[str, str], *args: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(program)
    argv = [sys.executable, str(path), *args]
    return subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.smoke("fork")
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_outlive_a_notice_and_end_by_their_parent_and_with_it(
    tmp_path: Path, base_env: Mapping[str, str], start: str
) -> None:
    """From their first moment on, whether or not the program has asked yet whether it is to stop."""
    done = run(tmp_path, base_env, start, "no")
    word, pid = done.stdout.split() or [""] * 2
    assert (done.returncode, word) == (-signal.SIGKILL, "PID"), done.stdout + done.stderr
    assert sorted(tmp_path.glob("began.*")) == [tmp_path / "began.0", tmp_path / "began.1"], (
        "the program's own is called"
    )
    left = [psutil.Process(int(pid))] if psutil.pid_exists(int(pid)) else []
    assert not psutil.wait_procs(left, timeout=15)[1]


@pytest.mark.full
def test_where_the_program_has_a_handler_workers_are_as_torch_has_them(
    tmp_path: Path, base_env: Mapping[str, str]
) -> None:
    done = run(tmp_path, base_env, "fork", "yes")
    assert done.returncode
    assert "killed by signal: Terminated" in done.stderr


def test_what_a_worker_starts_ends_by_a_signal(tmp_path: Path, base_env: Mapping[str, str]) -> None:
    """What blocks a signal is inherited by the programs that a process starts, as by those that it forks."""
    done = run(tmp_path, base_env, program=STARTS)
    assert done.stdout == "[[True], [True]]\n", done.stdout + done.stderr
