"""RankProbe between ranks in this process, over a real store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dualdist.backends.native import store as native_store
from dualdist.monitoring.monitored import Monitor
from dualdist.monitoring.rank_probe import ANSWER_S, IN_PROGRAM, POLL_S, RankProbe
from dualdist.monitoring.timeout_report import find_silent_ranks, report_timeout
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import LOOPBACK, open_listener

Enroll = Callable[[int, int], list[RankProbe]]
# Seconds that the interpreter takes to exit.
TAKES_S = 3
STORE = """
import sys
from dualdist.backends.native import store as native_store
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import LOOPBACK, open_listener
listener = open_listener(0, loopback_only=True)
port = listener.getsockname()[1]
kept = native_store.connect(LOOPBACK, port, listener, Deadline(10))
print(port, flush=True)
sys.stdin.read()
"""
RANK = """
import sys
import time
from dualdist.backends.native import store as native_store
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import LOOPBACK
from dualdist.monitoring.rank_probe import RankProbe
RankProbe(native_store.connect(LOOPBACK, int(sys.argv[1]), None, Deadline(10)), 1, "key", [None] * 2, 60)
class TakesLongToEnd:
    seconds = float(sys.argv[2])
    def __del__(self):
        time.sleep(self.seconds)  # a thread that comes back meanwhile is ended by the interpreter
kept = TakesLongToEnd()
print("there", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def enroll() -> Iterator[Enroll]:
    """Return a function that makes `count` ranks of a job of `size`; the other ranks never answer."""
    listener = open_listener(0, loopback_only=True)
    port = listener.getsockname()[1]
    kept = [native_store.connect(LOOPBACK, port, listener, Deadline(10))]
    made: list[RankProbe] = []

    def make(count: int, size: int) -> list[RankProbe]:
        for rank in range(count):
            kept.append(native_store.connect(LOOPBACK, port, None, Deadline(10)))
            made.append(RankProbe(kept[-1], rank, "key", [None] * size, 60))
        return made

    yield make
    for probe in made:
        probe.close()


def test_concurrent_timeouts_ask_one_question_and_every_rank_prints(
    enroll: Enroll, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = enroll(3, 4)
    what = "barrier 'b'"
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(waits, probe, what) for probe in probes[:2]]
        texts = [one.result() for one in waiting]
    for text in texts:
        first = text.splitlines()[0]
        assert first.startswith("barrier 'b': late; no answer from rank 3: ")
        assert f"rank 2 did not arrive: {IN_PROGRAM}" in first
        assert "rank 0" not in first
        assert "rank 1 " not in first
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dualdist: rank")]
    assert len(printed) == 3, "two by the ranks that ask, one by the third"
    assert probes[2]._answered == 1
    assert find_silent_ranks(probes[1], range(4)) == [3]


def waits(probe: RankProbe, what: str) -> str:
    with Monitor(probe, range(4)).operation(what):
        return report_timeout(probe, range(4), what, "late")


def test_leaving_a_nested_operation_returns_to_the_outer_one(enroll: Enroll) -> None:
    probes = enroll(2, 2)
    monitor = Monitor(probes[0], range(2))
    with monitor.operation("join"):
        with monitor.operation("allreduce"):
            pass
        locations = {position.location for position in probes[1].query().positions if 0 in position.seconds}
    assert locations == {"in join"}


@pytest.mark.full
def test_a_rank_exits_cleanly_while_its_store_is_stopped() -> None:
    """Also if the store resumes during interpreter shutdown."""
    with _run_python(STORE) as store:
        port = _line(store)
        with _run_python(RANK, port, str(TAKES_S)) as rank:
            _line(rank)
            os.kill(store.pid, signal.SIGSTOP)
            try:
                time.sleep(POLL_S + 0.5)  # by now its thread waits for the store
                assert rank.stdin is not None
                print(file=rank.stdin, flush=True)
                time.sleep(2 * ANSWER_S + TAKES_S / 2)  # by now it has waited as long as it does
            finally:
                os.kill(store.pid, signal.SIGCONT)
            _, stderr = rank.communicate(timeout=20)
        assert rank.returncode == 0, stderr
        store.communicate(timeout=20)


def _run_python(code: str, *args: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *args], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
