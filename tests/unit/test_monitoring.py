"""Monitored operations: wait times, timeout reports, stacks of threads, and probes between ranks."""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dualdist
from dualdist.backends.native import store as native_store
from dualdist.backends.operation import Operation
from dualdist.backends.single import SingleBackend
from dualdist.engine.channel import Channel, Transfer
from dualdist.engine.monitor import Monitor
from dualdist.environments import detect
from dualdist.errors import CollectiveError, RankLostError
from dualdist.liveness import wait_times
from dualdist.liveness.process_state import (
    BUSY,
    SHOWN,
    STATES,
    format_stack,
    program_thread,
    thread_stack,
    trim_stack,
)
from dualdist.liveness.rank_probe import (
    IN_PROGRAM,
    RankPosition,
    RankProbe,
    find_silent_ranks,
    format_report,
    report_timeout,
)
from dualdist.liveness.rank_status import NO_ANSWER, RankStatus, StatusServer, find_jobs, look
from dualdist.liveness.wait_times import WaitRecord, WaitTimes, summarize_waits
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import LOOPBACK, open_listener

OURS = str(Path(dualdist.__file__).with_name("api.py"))
WHAT, REASON = "allreduce 'x' of float32(3,)", "not all ranks arrived within 6 s"
HERE = ("<program>", 7, "train")


def at(location: str, seconds: dict[int, float], *stack: tuple[str, int, str]) -> RankPosition:
    return RankPosition(location, stack, seconds)


ARRIVED = at(f"in {WHAT}", {0: 6.0, 2: 5.5})


@pytest.mark.parametrize(
    ("positions", "silent", "expected"),
    [
        ([at("in barrier 'b'", {1: 5.0}), at("in barrier 'b'", {3: 7.1}, HERE)], {},
         "ranks 1, 3 did not arrive: in barrier 'b', for 5 to 7 s, at <program>:7"),
        ([ARRIVED], {1: "", 3: ""},
         "no answer from ranks 1, 3: exited, stopped, or in C code that holds the GIL"),
        ([ARRIVED], {}, "all ranks are in this operation"),
        ([at(f"in {WHAT}", {0: 6.0, 1: 0.3, 2: 5.9})], {}, "rank 1 arrived 6 s after the first"),
        ([], {}, "no rank reported its position"),
    ],
    ids=["several stacks", "on another host", "together", "late", "no answers"],
)  # fmt: skip
def test_the_first_line_names_the_missing_ranks(
    positions: list[RankPosition], silent: dict[int, str], expected: str
) -> None:
    found = format_report(WHAT, REASON, positions, silent).splitlines()[0]
    assert found == f"{WHAT}: {REASON}; {expected}"
    b1, b10 = at("in barrier 'b.1'", {0: 1.0}), at("in barrier 'b.10'", {1: 1.0})
    assert "rank 1 did not arrive: in barrier 'b.10'" in format_report("barrier 'b.1'", REASON, [b1, b10], {})


def test_stacks_follow_once_per_position_and_a_missing_store_is_named() -> None:
    missing = [at(IN_PROGRAM, {1: 6.0, 3: 6.0}, HERE), at(IN_PROGRAM, {2: 6.0}, ("<program>", 9, "load"))]
    found = format_report(WHAT, REASON, missing, {4: f"its process 4711 {BUSY}"}).splitlines()
    assert found[1:] == [
        "  Stack of ranks 1, 3:",
        '    File "<program>", line 7, in train',
        "  Stack of rank 2:",
        '    File "<program>", line 9, in load',
    ]
    found = format_report(WHAT, REASON, [], {}, is_store_there=False)
    assert (
        "the store of the job, which rank 0 or its launcher serves, does not answer; see rank 0's last output" in found
    )
    found = format_report(WHAT, REASON, [], {0: f"its process 5 {STATES['T']}"}, is_store_there=False)
    assert "does not answer; no answer from rank 0: its process 5 is stopped by a signal" in found


MAIN, CALL = ("train.py", 40, "<module>"), ("train.py", 12, "train")
WITHIN = [(OURS, 90, "allreduce"), ("/usr/lib/python3/threading.py", 300, "wait")]


@pytest.mark.parametrize(
    ("lines", "is_in_operation", "expected"),
    [
        ([MAIN, CALL, *WITHIN], True, [MAIN, CALL]),
        ([MAIN, CALL, *WITHIN], False, [MAIN, CALL, *WITHIN]),
        ([("<frozen runpy>", 198, "_run"), (OURS, 1, "main"), MAIN, CALL], False, [MAIN, CALL]),
        (WITHIN[:1], True, []),
        ([("train.py", number, "recurses") for number in range(50)], False, None),
        ([], False, []),
    ],
    ids=["operation", "program", "launcher", "dualdist only", "deep", "none"],
)
def test_a_stack_is_trimmed_to_the_programs_lines(
    lines: list[tuple[str, int, str]], is_in_operation: bool, expected: list[tuple[str, int, str]] | None
) -> None:
    found = trim_stack(lines, is_in_operation=is_in_operation)
    assert found == (lines[-SHOWN:] if expected is None else expected)


def test_a_stack_ends_at_the_threads_current_line() -> None:
    entered, leave = threading.Event(), threading.Event()

    def waits_in_here() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=waits_in_here)
    thread.start()
    ours = threading.Thread(target=leave.wait, name="dualdist-test")
    ours.start()
    assert program_thread(ours.ident) == threading.main_thread().ident, "a thread of dualdist's is not the program's"
    entered.wait()
    found = thread_stack(program_thread(thread.ident), is_in_operation=False)
    text = format_stack([line for line in found if line[0] == __file__])
    leave.set()
    thread.join()
    ours.join()
    assert text.endswith("in waits_in_here\n      leave.wait()")
    assert program_thread(thread.ident) == threading.main_thread().ident, "the thread has ended"


def counted(operations: list[tuple[float, float]], rounds: list[tuple[float, float]], dropped: int = 0) -> bytes:
    found = WaitTimes()
    found.started_at -= 100.0
    found.operations.dropped = dropped
    for times, rows in ((found.operations, operations), (found.gradient_reductions, rounds)):
        for ready_s, waited_s in rows:
            times.add(ready_s, waited_s)
    return found.dumps()


def both(*rows: float) -> list[tuple[float, float]]:
    """Return rows of a rank that waits as soon as it is ready."""
    return [(row, row) for row in rows]


def test_each_rank_waits_for_the_last_to_arrive() -> None:
    found = summarize_waits([0, 1, 5], [counted([], both(3, 1)), counted([], both(1, 2)), counted([], both(2, 2.5))])
    assert (found.gradient_reductions, found.operations) == (2, 0)
    assert found.was_last == (1, 1, 0)
    assert found.waited_for_s == ((0, 2, 0), (1, 0, 0), (1.5, 1, 0))
    assert found.caused_s == (1.25, 1.5, 0)
    assert found.waited_s == (2, 1, 2.5)
    assert found.slowest == 1
    # Only a program's waits count: one rank waited for the last second only, another never.
    found = summarize_waits([0, 1, 2], [counted([(10, 1)], []), counted([(8, 0)], []), counted([(2, 2)], [])])
    assert found.was_last == (0, 0, 1)
    assert found.waited_for_s == ((0, 0, 1), (0, 0, 0), (0, 0, 0))


def test_joined_ranks_are_never_last_and_operations_without_times_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = (math.nan, 0.0)
    found = summarize_waits([0, 1], [counted([unknown, unknown, (3, 3)], []), counted([(2, 2), unknown, (1, 1)], [])])
    assert found.operations == 2
    assert found.was_last == (0, 2)
    assert found.waited_for_s == ((0, 2), (0, 0))
    found = summarize_waits([0, 1], [counted(both(1, 2, 3, 4), []), counted(both(1, 9, 1), [], dropped=1)])
    assert found.operations == 3
    assert found.waited_for_s == ((0, pytest.approx(1 + 3)), (pytest.approx(6), 0))
    monkeypatch.setattr(wait_times, "KEPT", 10)
    times = WaitRecord()
    for number in range(105):
        times.add(number, 0)
    assert times.dropped + len(times.ready) == 105
    assert 10 <= len(times.ready) < 20
    assert times.ready[-1] == 104


def test_the_table_starts_with_the_slowest_rank() -> None:
    found = summarize_waits([0, 1], [counted([], both(30, 1)), counted([], both(10, 2))])
    lines = str(found).splitlines()
    assert lines[0].endswith("(2 gradient reductions, 0 operations) the others waited most for rank 1")
    assert lines[1].split("  ")[0] == "rank"
    assert [line.split()[0] for line in lines[2:]] == ["1", "0"]
    assert "20.00 s, 20%" in lines[2]
    even = summarize_waits([0, 1], [counted([], both(1.1)), counted([], both(1))])
    assert even.slowest is None
    assert str(even).endswith("no rank made the others wait for more than 1% of the time")
    many = summarize_waits(range(20), [counted([], both(9 if rank else 1)) for rank in range(20)])
    assert str(many).endswith("and 12 more")
    for ranks in ([0], [0, 1]):
        nothing = summarize_waits(ranks, [counted([], [])] * len(ranks))
        assert (str(nothing), nothing.slowest) == ("no collectives have been counted yet", None)


Enroll = Callable[[int, int], list[RankProbe]]


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

    def waits(probe: RankProbe) -> str:
        with Monitor(probe, range(4)).operation(what):
            return report_timeout(probe, range(4), what, "late")

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(waits, probes[:2]))
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


def test_leaving_a_nested_operation_returns_to_the_outer_one(enroll: Enroll) -> None:
    probes = enroll(2, 2)
    monitor = Monitor(probes[0], range(2))
    with monitor.operation("join"):
        with monitor.operation("allreduce"):
            pass
        locations = {position.location for position in probes[1].query().positions if 0 in position.seconds}
    assert locations == {"in join"}


def test_a_rank_asks_the_ranks_of_other_hosts_what_they_do(enroll: Enroll) -> None:
    """Each host sees its own sockets: here all are of one host, and the numbers of the jobs differ by host."""
    probes, numbers = enroll(2, 3), [os.getpid(), os.getpid() + 1]
    places = [replace(detect({}), rank=rank, size=3, local_size=3) for rank in range(2)]
    with ExitStack() as servers:
        for place, number, probe in zip(places, numbers, probes, strict=True):
            servers.callback(StatusServer(place, number, probe, int).close)
        with Monitor(probes[1], range(3)).operation("barrier 'b'"):
            found = look(find_jobs()[numbers[0]], 0.2)
        near, far, silent = found.values()
        assert isinstance(near, RankStatus)
        assert isinstance(far, RankStatus)
        assert (near.operation, near.waited) == ("", 0.0)
        assert (far.rank, far.operation, far.waited) == (1, "barrier 'b'", 1.0)
        assert silent == NO_ANSWER


class Broken(Operation[None]):
    """An operation of a transport whose connection breaks."""

    def advance(self, wait_s: float) -> bool:
        raise RankLostError("a connection broke")


@pytest.mark.parametrize("polls", [True, False])
def test_an_error_of_an_operation_names_it(polls: bool) -> None:
    channel = Channel(SingleBackend(), Monitor(None, [0, 1]), 5.0)
    work = channel.start(Transfer("allreduce", "x", torch.ones(3)), lambda backend: Broken())
    assert work.done() or not polls
    with pytest.raises(CollectiveError, match=r"allreduce 'x' of float32\(3,\): a connection broke"):
        work.wait()
