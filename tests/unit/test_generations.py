"""Generations of an elastic job: who gets which rank, who is started again, and when the job is over."""

import random
from collections.abc import Iterator

import pytest

from dualdist.launch.generations import COOLDOWN_S, LATE_S, LEAVE, Generations, Order
from dualdist.utils.control_channel import Assignment, JobOver, ProgramReady, RanksChange
from dualdist.utils.variables import REQUEUE

READY = ProgramReady(timeout_s=30.0, timed_out=False)
LATE = ProgramReady(timeout_s=30.0, timed_out=True)
HAS_STATE = ProgramReady(timeout_s=30.0, timed_out=False, has_state=True)


def begun(places: int = 3, min_ranks: int = 2) -> Generations:
    """Return a job whose first generation has begun at time 0."""
    job = Generations(places, min_ranks, 60.0)
    assert job.start_due(0.0) == [*range(places)]
    for place in range(places):
        assert job.next_orders(0.0) == []
        job.set_ready(place, READY, 0.0)
    assert ranks(job.next_orders(0.0)) == {place: place for place in range(places)}
    return job


def ranks(orders: list[Order]) -> dict[int, int]:
    """Return the rank of each place, of orders that are all assignments of one generation."""
    messages = [message for _, message in orders]
    assert all(isinstance(message, Assignment) and message.size == len(orders) for message in messages)
    return {place: message.rank for place, message in orders if isinstance(message, Assignment)}


def test_those_that_are_left_get_the_low_ranks_and_a_new_program_joins_after_a_commit() -> None:
    job = begun()
    told = job.set_ended(0, None, 1.0)
    assert told == [(1, lost := RanksChange(1, "rank 0 was lost", is_lost=True)), (2, lost)]
    job.set_ready(1, READY, 1.0)
    assert job.next_orders(1.0) == [], "rank 2 still works"
    job.set_ready(2, READY, 1.0)
    assert ranks(job.next_orders(1.0)) == {1: 0, 2: 1}
    assert job.start_due(1.0) == []
    assert job.start_due(1.0 + COOLDOWN_S) == [0]
    job.set_ready(0, READY, 4.0)
    waiting = RanksChange(2, "more ranks are ready to join", is_lost=False)
    assert job.next_orders(4.0) == [(1, waiting), (2, waiting)]
    assert job.next_orders(4.0) == [], "told once"
    for place in (1, 2):
        job.set_ready(place, READY, 5.0)
    assert ranks(job.next_orders(5.0)) == {1: 0, 2: 1, 0: 2}


def test_a_program_that_has_left_is_no_loss_and_is_not_started_again() -> None:
    job = begun()
    job.set_ended(0, 0, 1.0)
    for place in (1, 2):
        job.set_ready(place, READY, 1.0)
    assert ranks(job.next_orders(1.0)) == {1: 0, 2: 1}
    assert job.start_due(1000.0) == []
    for place in (1, 2):
        job.set_ended(place, 0, 1.0)
    assert job.next_orders(1.0) == []
    assert (job.is_over, job.has_succeeded) == (True, True)


@pytest.mark.parametrize(("message", "limit_s"), [(READY, READY.timeout_s), (LATE, LATE_S)])
def test_a_program_for_which_the_others_wait_is_ended_after_their_time_limit(
    message: ProgramReady, limit_s: float
) -> None:
    job = begun()
    job.set_ended(0, -9, 1.0)
    job.set_ready(1, message, 2.0)
    assert job.find_overdue(2.0 + limit_s) == []
    assert job.find_overdue(2.1 + limit_s) == [2]
    job.set_ended(2, -15, 3.0 + limit_s)
    assert job.find_overdue(1000.0) == []


def test_too_few_wait_for_others_and_then_exit_to_be_queued_again() -> None:
    job = begun(places=2)
    job.set_ended(0, None, 1.0)
    job.set_ready(1, READY, 1.0)
    assert job.next_orders(1.0) == []
    assert job.start_due(3.0) == [0]
    job.set_ended(0, 1, 4.0)
    assert job.start_due(3.0 + COOLDOWN_S) == [], "the second loss at a place doubles its pause"
    assert job.next_orders(61.0) == []
    ((place, message),) = job.next_orders(62.0)
    assert (place, isinstance(message, JobOver) and message.code) == (1, REQUEUE)
    job.set_ended(1, REQUEUE, 62.0)
    job.next_orders(62.0)
    assert (job.is_over, job.has_succeeded) == (True, False)


@pytest.mark.parametrize("code", [0, 1])
def test_the_job_is_over_when_no_program_of_the_last_generation_is_left(code: int) -> None:
    job = begun(places=2, min_ranks=1)
    job.set_ended(0, code, 1.0)
    job.set_ended(1, 0, 1.0)
    assert job.start_due(100.0) == []
    job.next_orders(1.0)
    assert (job.is_over, job.has_succeeded) == (True, code == 0)


def test_a_program_lost_before_the_first_generation_does_not_hold_the_others_up() -> None:
    job = Generations(3, 2, 60.0)
    job.start_due(0.0)
    job.set_ready(0, READY, 1.0)
    assert job.set_ended(1, 1, 1.0) == []
    assert job.find_overdue(32.0) == [2]
    job.set_ready(2, READY, 32.0)
    assert ranks(job.next_orders(32.0)) == {0: 0, 2: 1}


def test_a_program_that_hangs_is_ended_for_one_that_joins_when_the_others_are_gone() -> None:
    job = begun(places=2, min_ranks=1)
    job.set_ended(0, -9, 1.0)
    assert job.start_due(3.0) == [0]
    job.set_ready(0, READY, 5.0)
    job.next_orders(5.0)
    assert job.find_overdue(5.0 + READY.timeout_s) == []
    assert job.find_overdue(5.1 + READY.timeout_s) == [1]


def test_the_state_is_never_that_of_programs_which_had_only_joined() -> None:
    job = begun(places=2, min_ranks=1)
    job.set_ended(0, -9, 1.0)
    job.set_ready(1, HAS_STATE, 1.0)
    assert ranks(job.next_orders(1.0)) == {1: 0}
    job.start_due(3.0)
    for place, message in ((0, READY), (1, HAS_STATE)):
        job.set_ready(place, message, 4.0)
    assert ranks(job.next_orders(4.0)) == {1: 0, 0: 1}
    job.set_ended(1, -9, 5.0)
    job.set_ready(0, READY, 5.0)
    assert job.next_orders(5.0) == []
    assert (job.is_over, job.has_succeeded) == (True, False)
    assert "no program is left that had the training's state" in job.problem


def test_a_job_that_has_given_up_starts_and_assigns_nothing_more() -> None:
    job = begun(places=3, min_ranks=3)
    job.set_ended(0, -9, 1.0)
    job.set_ready(1, READY, 1.0)
    job.set_ready(2, READY, 1.0)
    job.next_orders(1.0)
    job.start_due(3.0)
    assert [place for place, _ in job.next_orders(62.0)] == [1, 2]
    job.set_ready(0, READY, 62.0)
    assert [place for place, _ in job.next_orders(62.0)] == [0]
    job.set_ended(1, REQUEUE, 63.0)
    assert job.start_due(1000.0) == []


def test_programs_of_a_withdrawn_place_leave_when_the_others_have_committed() -> None:
    job = begun(places=2, min_ranks=1)
    job.withdraw(0)
    job.add_place()
    leaving = RanksChange(1, "a host is no longer offered", is_lost=False)
    assert job.next_orders(1.0) == [(0, leaving), (1, leaving)]
    assert job.start_due(1.0) == [2]
    for place in (0, 1):
        job.set_ready(place, HAS_STATE, 2.0)
    assert job.next_orders(2.0) == [(0, LEAVE), (1, Assignment(2, 0, 1))]
    assert job.set_ended(0, 0, 3.0) == []
    assert job.start_due(100.0) == []
    job.set_ready(2, READY, 4.0)
    assert [place for place, _ in job.next_orders(4.0)] == [1]
    job.set_ready(1, HAS_STATE, 5.0)
    assert ranks(job.next_orders(5.0)) == {1: 0, 2: 1}


def test_withdrawn_programs_hand_the_state_over_before_they_leave() -> None:
    """One host in place of another: the new programs have no state."""
    job = begun(places=1, min_ranks=1)
    job.withdraw(0)
    job.add_place()
    assert job.start_due(1.0) == [1]
    job.next_orders(1.0)
    job.set_ready(0, HAS_STATE, 2.0)
    assert job.next_orders(2.0) == [], "nobody has the state who stays"
    job.set_ready(1, READY, 3.0)
    assert ranks(job.next_orders(3.0)) == {0: 0, 1: 1}
    assert [place for place, _ in job.next_orders(3.0)] == [0, 1], "to leave after the next commit"
    for place in (0, 1):
        job.set_ready(place, HAS_STATE, 4.0)
    assert job.next_orders(4.0) == [(0, LEAVE), (1, Assignment(3, 0, 1))]


def test_a_withdrawn_program_that_only_waits_to_join_leaves_at_once() -> None:
    job = begun(places=1, min_ranks=1)
    job.add_place()
    job.start_due(1.0)
    job.withdraw(1)
    job.set_ready(1, READY, 2.0)
    assert job.next_orders(2.0) == [(1, LEAVE)]


def happenings(job: Generations, draw: random.Random, now: float) -> Iterator[list[Order]]:
    """Let something happen to a program that runs, and yield the orders that follow."""
    running = [number for number, place in enumerate(job.places) if place.runs]
    for number in draw.sample(running, min(len(running), draw.randrange(3))):
        if draw.random() < 0.3:
            yield job.set_ended(number, draw.choice([None, -9, 1, 0]), now)
        else:
            job.set_ready(number, draw.choice([READY, LATE]), now)
            yield []
    if draw.random() < 0.1:
        job.withdraw(draw.randrange(len(job.places)))
        job.add_place()


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_ranks_are_numbered_without_gaps_and_the_state_stays_on_rank_0(seed: int) -> None:
    draw = random.Random(seed)
    job = Generations(draw.randrange(1, 6), least := draw.randrange(1, 4), 60.0)
    now, held = 0.0, {*range(len(job.places))}  # the places of programs that may have the state
    for _ in range(300):
        now += draw.uniform(0, 3)
        job.start_due(now)
        for orders in happenings(job, draw, now):
            assert all(isinstance(message, RanksChange) for _, message in orders)
        held -= {number for number in held if not job.places[number].runs or job.places[number].is_withdrawn}
        orders = job.next_orders(now)
        assigned = {place: message.rank for place, message in orders if isinstance(message, Assignment)}
        if assigned:
            assert sorted(assigned.values()) == [*range(len(assigned))]
            assert len(assigned) >= least
            assert held <= assigned.keys() or job.number == 1
            assert job.number == 1 or {assigned[place] for place in held} == {*range(len(held))}
            held = {*assigned}
        for number in job.find_overdue(now):
            job.set_ended(number, -9, now)
            held.discard(number)
        if job.is_over:
            assert job.start_due(now + 1000) == []
            break
