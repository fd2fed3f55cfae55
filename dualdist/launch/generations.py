"""The generations of an elastic job: which of its programs train together, with which ranks. No processes, no sockets.

See Note [generations] in dualdist/rendezvous/elastic_agent.py. The next generation begins when all programs of the last
one that have not ended are ready; a late one is ended, as the others wait for it. If none of them is left, or none that
has the training's state, the job has succeeded or failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dualdist.utils.control_channel import Assignment, JobOver, ProgramReady, RanksChange
from dualdist.utils.variables import REQUEUE

# Seconds before a lost program is started again: at first, and at most, as it doubles with each loss at that place.
COOLDOWN_S, MAX_COOLDOWN_S = 2.0, 60.0
# After so many seconds the losses of a place are forgotten.
FORGIVEN_S = 300.0
# Seconds for a program to be ready after the others' operations have already waited for it by their time limit.
LATE_S = 5.0

# To a program whose host is no longer offered.
LEAVE = JobOver(0, "this host is no longer offered to the job: its program ends, and the others continue")

Order = tuple[int, Assignment | RanksChange | JobOver]


@dataclass
class Place:
    """A place of the job, at which one program runs at a time.

    Attributes:
        rank: in the current generation, None if the program is in none.
        ready: its message, if it waits for a rank.
        code: the exit code of the last program; None while it runs, or if it was lost.
        losses: programs that were lost here, one after the other.
        starts_at: when the next program may start.
        is_withdrawn: its host is no longer offered: the program leaves when the next generation begins.
    """

    runs: bool = False
    is_withdrawn: bool = False
    rank: int | None = None
    ready: ProgramReady | None = None
    code: int | None = None
    losses: int = 0
    started_at: float = 0.0
    starts_at: float = 0.0

    @property
    def is_member(self) -> bool:
        """Return True if the program is in the current generation."""
        return self.runs and self.rank is not None

    @property
    def has_state(self) -> bool:
        """Return True if the program is ready, and has the training's state."""
        return self.ready is not None and self.ready.has_state

    @property
    def has_left(self) -> bool:
        return not self.runs and self.code == 0


class Generations:
    """The places of a job, its current generation, and whether it is over.

    Args:
        places: how many programs run at most.
        min_ranks: the fewest that train together.
        timeout_s: seconds for which a job waits with fewer.
    """

    def __init__(self, places: int, min_ranks: int, timeout_s: float) -> None:
        self.places = [Place() for _ in range(places)]
        self.number = 0
        self.min_ranks = min_ranks
        self.timeout_s = timeout_s
        self.is_over = False
        self.has_succeeded = False
        self.problem = ""  # why the job is over, if no program has said that
        self._last = [*range(places)]  # those of the current generation
        self._were_told = False  # that programs wait to join
        self._is_broken = False  # a program of the current generation has ended
        self._had_state = False  # some program had the training's state
        self._over: JobOver | None = None  # told to programs that are ready, once too few have waited for long
        self._ready_at = self._short_at = math.inf

    def start_due(self, now: float) -> list[int]:
        """Return the places at which a program is to be started now, which counts as started."""
        has_members = any(place.is_member for place in self.places)
        if self.is_over or self._over is not None or (self.number > 0 and not has_members):
            return []
        vacant = [n for n, each in enumerate(self.places) if not (each.runs or each.has_left or each.is_withdrawn)]
        due = [n for n in vacant if self.places[n].starts_at <= now]
        for n in due:
            place = self.places[n]
            place.runs, place.rank, place.ready, place.code, place.started_at = True, None, None, None, now
        return due

    def add_place(self) -> None:
        """Add a place, at which a program is to be started."""
        self.places.append(Place())

    def withdraw(self, number: int) -> None:
        """Let the program at a place leave when its generation has committed, and start no other."""
        self.places[number].is_withdrawn = True

    def set_ready(self, number: int, message: ProgramReady, now: float) -> None:
        """Record that the program at a place waits for a rank."""
        if self.places[number].runs:
            self.places[number].ready = message
            self._had_state = self._had_state or message.has_state
            if self._is_awaited(self.places[number]) or self._is_broken:
                self._ready_at = min(self._ready_at, now)

    def set_ended(self, number: int, code: int | None, now: float) -> list[Order]:
        """Record the end of the program at a place, and return what to tell the others of its generation."""
        place = self.places[number]
        if not place.runs:
            return []
        place.runs, place.ready, place.code = False, None, code
        if code != 0:
            place.losses = 1 if now > place.started_at + FORGIVEN_S else place.losses + 1
            place.starts_at = now + min(MAX_COOLDOWN_S, COOLDOWN_S * 2 ** (place.losses - 1))
        if place.rank is None:
            return []
        self._is_broken = True
        reason = f"rank {place.rank} {'has left' if code == 0 else 'was lost'}"
        change = RanksChange(self.number, reason, is_lost=True)
        return [(n, change) for n, each in enumerate(self.places) if each.is_member]

    def next_orders(self, now: float) -> list[Order]:
        """Return what to tell programs now; begin the next generation if its programs are ready."""
        waiting = [each for each in self.places if each.ready is not None]
        ready = self._staying(waiting)
        if not any(map(self._is_awaited, self.places)):
            self.is_over = True
            self.has_succeeded = all(self.places[n].code == 0 for n in self._last)
            return []
        if self._over is not None:
            return [*self._tell_over(self._over)]
        if self._late_places() or not waiting:
            return [*self._dismiss_waiting(), *self._announce_change()]
        if ready and self._had_state and not any(each.has_state for each in ready):
            self.is_over = True
            self.problem = "no program is left that had the training's state: those that are had just joined"
            return []
        if len(ready) >= self.min_ranks:
            return [*self._begin_next()]
        self._short_at = min(self._short_at, now)
        if now <= self._short_at + self.timeout_s:
            return []
        reason = (
            f"{len(ready)} of at least {self.min_ranks} ranks (--min-ranks) were left for {self.timeout_s:g} s "
            "(--elastic-timeout): start the job again; if it saves checkpoints, it continues from the newest"
        )
        self._over = JobOver(REQUEUE, reason)
        return [*self._tell_over(self._over)]

    def _staying(self, ready: list[Place]) -> list[Place]:
        """Return those that are not withdrawn; all, while only withdrawn ones have the state, which others need."""
        staying = [each for each in ready if not each.is_withdrawn]
        has_state = any(each.has_state for each in staying) or not any(each.has_state for each in ready)
        return staying if has_state or not staying else ready

    def _dismiss_waiting(self) -> Iterator[Order]:
        """Tell withdrawn programs that only wait to join the current generation to leave."""
        for n, each in enumerate(self.places):
            if self.number > 0 and each.is_withdrawn and each.ready is not None and each.rank is None:
                each.ready = None
                yield n, LEAVE

    def _tell_over(self, message: JobOver, but: list[Place] | None = None) -> Iterator[Order]:
        """Tell each program that is ready once, but those at some places."""
        kept = [id(each) for each in but or ()]
        for n, each in enumerate(self.places):
            if each.ready is not None and id(each) not in kept:
                each.ready = None
                yield n, message

    def find_overdue(self, now: float) -> list[int]:
        """Return the places whose programs keep the others waiting for too long, and have to be ended."""
        waiting = [each for each in self.places if self._is_awaited(each) or self._is_broken]
        messages = [each.ready for each in waiting if each.ready is not None]
        if not messages:
            return []
        limit_s = LATE_S if any(each.timed_out for each in messages) else max(each.timeout_s for each in messages)
        late = self._late_places()
        return [n for n in late if now > max(self._ready_at, self.places[n].started_at) + limit_s]

    def _late_places(self) -> list[int]:
        """Return the places whose programs the next generation waits for, and which are not ready."""
        return [n for n, each in enumerate(self.places) if self._is_awaited(each) and each.ready is None]

    def _is_awaited(self, place: Place) -> bool:
        """Return True if the next generation does not begin without this program: any, at first."""
        return place.runs if self.number == 0 else place.is_member

    def _announce_change(self) -> Iterator[Order]:
        """Tell the current generation, once, that programs wait to join it, or that some of it are to leave."""
        if self.number == 0 or self._were_told:
            return
        if any(each.is_member and each.is_withdrawn for each in self.places):
            reason = "a host is no longer offered"
        elif any(each.ready is not None and each.rank is None and not each.is_withdrawn for each in self.places):
            reason = "more ranks are ready to join"
        else:
            return
        self._were_told = True
        change = RanksChange(self.number, reason, is_lost=False)
        yield from ((n, change) for n, each in enumerate(self.places) if each.is_member)

    def _begin_next(self) -> Iterator[Order]:
        """Assign ranks, the low ones to the programs with the training's state."""
        self.number += 1
        self._were_told = self._is_broken = False
        self._ready_at = self._short_at = math.inf
        yield from self._tell_over(LEAVE, but=self._staying([each for each in self.places if each.ready is not None]))
        ready = [n for n, each in enumerate(self.places) if each.ready is not None]
        self._last = sorted(ready, key=lambda n: (not self.places[n].has_state, self._rank_of(n), n))
        for rank, n in enumerate(self._last):
            self.places[n].rank, self.places[n].ready = rank, None
            yield n, Assignment(self.number, rank, len(self._last))
        for n in set(range(len(self.places))) - set(ready):
            self.places[n].rank = None

    def _rank_of(self, number: int) -> float:
        rank = self.places[number].rank
        return math.inf if rank is None else rank
