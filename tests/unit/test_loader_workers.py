"""A loader's workers outlive the signals that tell their rank to stop after the step, but not their rank."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import os, signal, subprocess, sys, threading, time
import dualdist as dd

COUNT = 40
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()  # as libraries do when they are imported


class Data:
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index


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
        worker_init_fn=print,
    )
    batches = iter(loader)
    workers = batches._batches._workers
    pids = [worker.pid for worker in workers]
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
    print("PID", pids[1], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def run(folder: Path, env: Mapping[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    argv = [sys.executable, str(path), *args]
    return subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_outlive_a_notice_and_end_by_their_parent_and_with_it(
    tmp_path: Path, base_env: Mapping[str, str], start: str
) -> None:
    """From their first moment on, whether or not the program has asked yet whether it is to stop."""
    done = run(tmp_path, base_env, start, "no")
    *called, word, pid = done.stdout.split() or [""] * 2
    assert (done.returncode, word) == (-signal.SIGKILL, "PID"), done.stdout + done.stderr
    assert sorted(called) == ["0", "1"], "the program's own worker_init_fn is called, too"
    left = [psutil.Process(int(pid))] if psutil.pid_exists(int(pid)) else []
    assert not psutil.wait_procs(left, timeout=15)[1]


def test_where_the_program_has_a_handler_workers_are_as_torch_has_them(
    tmp_path: Path, base_env: Mapping[str, str]
) -> None:
    done = run(tmp_path, base_env, "fork", "yes")
    assert done.returncode
    assert "killed by signal: Terminated" in done.stderr
