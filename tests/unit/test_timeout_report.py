"""Timeout reports, and stacks of threads and from faulthandler's dumps."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import dualdist
from dualdist.monitoring.process_state import (
    BUSY,
    SHOWN,
    STATES,
    format_stack,
    parse_dump,
    program_thread,
    thread_stack,
    trim_stack,
)
from dualdist.monitoring.rank_probe import IN_PROGRAM, RankPosition
from dualdist.monitoring.timeout_report import SilentRank, format_report

OURS = str(Path(dualdist.__file__).with_name("operations.py"))
WHAT, REASON = "allreduce 'x' of float32(3,)", "not all ranks arrived within 6 s"
HERE = ("<program>", 7, "train")


def at(location: str, seconds: dict[int, float], *stack: tuple[str, int, str]) -> RankPosition:
    return RankPosition(location, stack, seconds)


ARRIVED = at(f"in {WHAT}", {0: 6.0, 2: 5.5})


@pytest.mark.parametrize(
    ("positions", "silent", "expected"),
    [
        pytest.param(
            [ARRIVED, at(IN_PROGRAM, {1: 6.6})],
            [],
            f"rank 1 did not arrive: {IN_PROGRAM}, for 7 s",
            id="in the program",
        ),
        pytest.param(
            [at("in barrier 'b'", {1: 5.0}), at("in barrier 'b'", {3: 7.1}, HERE)],
            [],
            "ranks 1, 3 did not arrive: in barrier 'b', for 5 to 7 s, at <program>:7",
            id="one location, several stacks",
        ),
        pytest.param(
            [ARRIVED],
            [SilentRank(1, STATES["T"], (), 4711)],
            "no answer from rank 1: its process 4711 is stopped by a signal, so its stack is unavailable",
            id="stopped",
        ),
        pytest.param(
            [ARRIVED],
            [SilentRank(1), SilentRank(3)],
            "no answer from ranks 1, 3: exited, stopped, or in C code that holds the GIL",
            id="on another host",
        ),
        pytest.param([ARRIVED], [], "all ranks are in this operation", id="together"),
        pytest.param([at(f"in {WHAT}", {0: 6.0, 1: 0.3, 2: 5.9})], [], "rank 1 arrived 6 s after the first", id="late"),
        pytest.param([], [], "no rank reported its position", id="no answers"),
    ],
)
def test_the_first_line_names_the_missing_ranks(
    positions: list[RankPosition], silent: list[SilentRank], expected: str
) -> None:
    found = format_report(WHAT, REASON, positions, silent).splitlines()[0]
    assert found == f"{WHAT}: {REASON}; {expected}"


def test_an_operation_with_the_same_prefix_is_another_operation() -> None:
    found = format_report(
        "barrier 'b.1'", REASON, [at("in barrier 'b.1'", {0: 1.0}), at("in barrier 'b.10'", {1: 1.0})], []
    )
    assert "rank 1 did not arrive: in barrier 'b.10'" in found


def test_stacks_follow_once_per_position() -> None:
    missing = [at(IN_PROGRAM, {1: 6.0, 3: 6.0}, HERE), at(IN_PROGRAM, {2: 6.0}, ("<program>", 9, "load"))]
    found = format_report(WHAT, REASON, missing, [SilentRank(4, BUSY, (HERE,), 4711)]).splitlines()
    assert found[1:] == [
        "  Stack of ranks 1, 3:",
        '    File "<program>", line 7, in train',
        "  Stack of rank 2:",
        '    File "<program>", line 9, in load',
        "  Stack of rank 4:",
        '    File "<program>", line 7, in train',
    ]


def test_without_a_store_the_report_names_its_server() -> None:
    found = format_report(WHAT, REASON, [], [], is_store_there=False)
    assert (
        "the store of the job, which rank 0 or its launcher serves, does not answer; see rank 0's last output" in found
    )
    found = format_report(WHAT, REASON, [], [SilentRank(0, STATES["T"], (), 5)], is_store_there=False)
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
    entered.wait()
    assert thread.ident is not None
    found = thread_stack(program_thread(thread.ident), is_in_operation=False)
    text = format_stack([line for line in found if line[0] == __file__])
    leave.set()
    thread.join()
    assert text.endswith("in waits_in_here\n      leave.wait()")
    assert program_thread(thread.ident) == threading.main_thread().ident, "the thread has ended"


def test_dualdists_threads_are_not_the_programs() -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="dualdist-test")
    thread.start()
    assert program_thread(thread.ident) == threading.main_thread().ident
    leave.set()
    thread.join()


DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "other.py", line 3 in wait

Current thread 0x00007f0000000002 [main] (most recent call first):
  Garbage-collecting
  File "train.py", line 12 in inner
  File "train.py", line 40 in <module>

Current thread 0x00007f0000000002 [main] (most recent call first):
  File "later.py", line 1 in later
"""


def test_a_threads_stack_is_parsed_from_a_dump() -> None:
    assert parse_dump(DUMP, 0x7F0000000002) == [("train.py", 40, "<module>"), ("train.py", 12, "inner")]
    assert parse_dump(DUMP, 0x7F0000000003) == []
