"""Ranks in this process ask each other where they are, over a real store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dualdist.backends import native_store
from dualdist.deadline import Deadline
from dualdist.meeting.network import LOOPBACK, listen
from dualdist.watching.lateness import give_up, silent_ranks
from dualdist.watching.roll_call import IN_PROGRAM, RollCall
from dualdist.watching.watch import Watch

Enroll = Callable[[int, int], list[RollCall]]


@pytest.fixture
def enroll() -> Iterator[Enroll]:
    """Makes so many ranks of a job of so many; the others never answer."""
    listener = listen(0, loopback_only=True)
    port = listener.getsockname()[1]
    kept = [native_store.connect(LOOPBACK, port, listener, Deadline(10))]
    made: list[RollCall] = []

    def make(count: int, size: int) -> list[RollCall]:
        for rank in range(count):
            kept.append(native_store.connect(LOOPBACK, port, None, Deadline(10)))
            made.append(RollCall(kept[-1], rank, "key", [None] * size, 60))
        return made

    yield make
    for roll in made:
        roll.close()


def test_all_who_give_up_at_once_ask_one_question_and_everybody_prints(
    enroll: Enroll, capsys: pytest.CaptureFixture[str]
) -> None:
    rolls = enroll(3, 4)
    what = "barrier 'b'"
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(waits, roll, what) for roll in rolls[:2]]
        texts = [one.result() for one in waiting]
    for text in texts:
        first = text.splitlines()[0]
        assert first.startswith("barrier 'b': late; no answer from rank 3: ")
        assert f"rank 2 is {IN_PROGRAM}" in first
        assert "rank 0" not in first
        assert "rank 1 " not in first
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dualdist: rank")]
    assert len(printed) == 3, "two by those who ask, one by the one who hears of it"
    assert rolls[2]._answered == 1
    assert silent_ranks(rolls[1], range(4)) == [3]


def waits(roll: RollCall, what: str) -> str:
    with Watch(roll, range(4)).over(what):
        return give_up(roll, range(4), what, "late")


def test_an_operation_within_another_is_left_for_that_one(enroll: Enroll) -> None:
    rolls = enroll(2, 2)
    watch = Watch(rolls[0], range(2))
    with watch.over("join"):
        with watch.over("allreduce"):
            pass
        places = {where.place for where in rolls[1].ask().wheres if 0 in where.seconds}
    assert places == {"in join"}
