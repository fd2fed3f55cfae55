"""A loader's workers ignore preemption signals and end with their rank; processes that they start do not."""

import signal
import sys

import pytest
from harness.jobs import Job, Launch

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


def notify(pids):
    \"\"\"Send the signals from another process, as a scheduler does.\"\"\"
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
    notify(pids)
    seen = []
    for batch in batches:
        seen += batch.tolist()
        must_stop = dd.elastic.should_stop()
        if len(seen) < 20:
            notify(pids)
        elif not must_stop:
            notify([os.getpid(), *pids])
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


@pytest.mark.smoke("fork")
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_ignore_preemption_signals_and_end_with_their_rank(launch: Launch, start: str) -> None:
    """From their start, whether or not the program has called should_stop() before."""
    argv = [sys.executable, launch.write("program.py", PROGRAM), start, "no"]
    with Job(argv, env=launch.env, cwd=launch.directory, grace_s=15) as job:
        outcome = job.wait(100)
    assert (outcome.rc, outcome.left) == (-signal.SIGKILL, ()), str(outcome)
    assert sorted(path.name for path in launch.directory.glob("began.*")) == ["began.0", "began.1"]  # by worker_init_fn


@pytest.mark.full
def test_workers_keep_the_programs_signal_handler(launch: Launch) -> None:
    outcome = launch([sys.executable, launch.write("program.py", PROGRAM), "fork", "yes"], check=False)
    assert outcome.rc
    assert "killed by signal: Terminated" in outcome.stderr


def test_processes_that_a_worker_starts_end_by_a_signal(launch: Launch) -> None:
    """Blocked signals are inherited by programs that a process starts or forks."""
    assert launch([sys.executable, launch.write("program.py", STARTS)]).stdout == "[[True], [True]]\n"
