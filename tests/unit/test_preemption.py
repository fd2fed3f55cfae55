"""Preemption: the last step of ranks in threads over a real store; signals and notice files."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dualdist as dd
from dualdist.backends.native.store import TcpStore
from dualdist.elastic import training_state
from dualdist.elastic.preemption import CHANGE, STOP, LastStep, PreemptionNotice, parse_notice_file
from dualdist.errors import CollectiveTimeoutError, RankLostError, RendezvousError, UsageError

POLL_S = 0.02
STEPS = 400


def ranks_of(size: int) -> list[LastStep]:
    store = TcpStore(dist.HashStore(), "", "the test's store")
    lasts = [LastStep(PreemptionNotice(), store, "key", range(size), rank, poll_s=POLL_S) for rank in range(size)]
    for last in lasts:
        last.start()
    return lasts


def steps_of(last: LastStep, pace_s: float, requested_at: int | None = None, kind: str = STOP) -> tuple[int, str, str]:
    """Run steps until the rank stops; return their number, the request's kind and its reason."""
    for step in range(1, STEPS + 1):
        if step == requested_at:
            last.notice.request(kind, f"word {step}")
        time.sleep(random.uniform(0, pace_s))
        found = last.after_step()
        if found[0]:
            assert last.after_step() == found, "what has begun to hold goes on to hold"
            return step, *found
    return STEPS, "", ""


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_stop_after_the_same_step(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randrange(1, 6)
    told = {rank: draw.randrange(1, 60) for rank in draw.sample(range(size), draw.randrange(1, size + 1))}
    lasts = ranks_of(size)
    paces = [draw.choice([0.0005, 0.002, 0.004]) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        ran = [
            pool.submit(steps_of, lasts[rank], paces[rank], told.get(rank), draw.choice([STOP, CHANGE]))
            for rank in range(size)
        ]
        found = {each.result(20) for each in ran}
    for last in lasts:
        last.close()
    ((steps, kind, words),) = found
    assert min(told.values()) <= steps < STEPS
    assert kind in (STOP, CHANGE)
    assert words.startswith("word ")


def test_other_ranks_block_nobody_if_finished_and_are_named_if_silent() -> None:
    """Its last step is before the one after which the others would stop, so they finish too."""
    done, other = ranks_of(2)
    for _ in range(9):
        assert done.after_step() == ("", "")
    done.close()
    assert steps_of(other, 0, requested_at=3) == (10, STOP, "word 3 on rank 1")
    other.close()
    store = TcpStore(dist.HashStore(), "", "the test's store")
    here = LastStep(PreemptionNotice(), store, "key", range(2), 0, poll_s=POLL_S, answer_s=0.3)
    here.start()
    assert steps_of(here, 0) == (STEPS, "", "")
    here.notice.request(STOP, "SIGTERM")
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 did not report a step count within 0\.3 s"):
        here.after_step()
    here.close()


class Gone:
    """A store that answers `calls` calls, and then raises `error`."""

    def __init__(self, calls: int, error: Exception) -> None:
        self._store = TcpStore(dist.HashStore(), "", "the test's store")
        self._calls = calls
        self._error = error

    def __getattr__(self, name: str) -> Any:
        self._calls -= 1
        if self._calls < 0:
            raise self._error
        return getattr(self._store, name)


@pytest.mark.parametrize("error", [RendezvousError("the store is gone"), TimeoutError("the store is late")], ids=repr)
@pytest.mark.parametrize("calls", range(10))
def test_a_lost_store_is_an_error_that_elastic_training_handles(calls: int, error: Exception) -> None:
    last = LastStep(PreemptionNotice(), Gone(calls, error), "key", range(1), 0, poll_s=60, answer_s=1)
    last.notice.request(STOP, "SIGTERM")
    kind = RankLostError if isinstance(error, RendezvousError) else CollectiveTimeoutError
    with pytest.raises(kind, match=r"are to stop together, but the store is (gone|late)"):
        last.after_step()


def test_threads_share_one_last_step() -> None:
    """Else a request to one of them would be lost."""
    for _ in range(10):
        dd.init()
        with ThreadPoolExecutor(8, initializer=threading.Barrier(8).wait) as pool:
            found = [pool.submit(training_state.last_step) for _ in range(8)]
        assert len({each.result() for each in found}) == 1
        assert [thread.name for thread in threading.enumerate()].count("dualdist-last-step") == 1
        dd.elastic.request_stop()
        assert dd.elastic.should_stop()
        dd.shutdown()


def test_a_loop_of_its_own_answers_the_notice_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the job script does not queue the job again."""
    path = tmp_path / "stop"
    monkeypatch.setenv("DUALDIST_NOTICE", str(path))
    dd.init()
    try:
        assert not dd.elastic.should_stop()
        path.touch()
        notice = training_state.last_step().notice
        notice.poll()
        assert (notice.kind, notice.reason) == (STOP, f"the file {path}")
        assert not (tmp_path / "stop.done").exists()
        assert dd.elastic.should_stop()
        assert (tmp_path / "stop.done").exists()
    finally:
        dd.shutdown()


@pytest.fixture
def notice() -> Iterator[PreemptionNotice]:
    found = PreemptionNotice()
    yield found
    found.close()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_recorded_and_not_fatal(notice: PreemptionNotice, number: signal.Signals) -> None:
    notice.install_handlers()
    notice.install_handlers()
    for each in (number, signal.SIGTERM):
        os.kill(os.getpid(), each)
    assert (notice.kind, notice.reason) == (STOP, number.name)


def test_the_programs_signal_handlers_are_kept(notice: PreemptionNotice) -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(notice.install_handlers).result()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "a thread installs none"
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        notice.install_handlers()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (heard, notice.kind) == ([signal.SIGTERM], "")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_notice_file_has_an_absolute_path() -> None:
    assert parse_notice_file("") is parse_notice_file(None) is None
    assert parse_notice_file("/a/b") == Path("/a/b")
    with pytest.raises(UsageError, match="DUALDIST_NOTICE='a': expected the absolute path"):
        parse_notice_file("a")
