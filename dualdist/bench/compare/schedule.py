"""Which contender is launched when: round after round in orders that are drawn, until the budget of time is used up."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from dualdist.bench.compare.launches import Launch
from dualdist.bench.compare.matrix import Cell

FIRST_GUESS_S = 8.0  # what a launch takes, before one has been seen


def order_of(cells: Sequence[Cell], number: int, seed: int) -> list[Cell]:
    """The cells in the order of this round, drawn anew for each; in the first one contenders go before references.

    So a budget that ends within it has been spent on what the verdict is about.
    """
    drawn = random.Random(f"{seed}/{number}").sample(list(cells), len(cells))
    return sorted(drawn, key=lambda cell: cell.is_reference) if number == 0 else drawn


@dataclass(frozen=True)
class ScheduleLimits:
    """When to stop: after so many rounds, or before a round that would not end within the budget."""

    rounds: int
    budget_s: float


class LaunchSchedule:
    """The launches that are left to do, in turn; `ended` says afterwards why there are no more."""

    def __init__(
        self,
        cells: Sequence[Cell],
        limits: ScheduleLimits,
        launch: Callable[[Cell, int], Launch],
        done: Sequence[Launch] = (),
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ended = "interrupted"
        self._cells = list(cells)
        self._limits = limits
        self._launch = launch
        self._done = {(each.cell, each.round) for each in done}
        # The others' launches of the rounds before are of another day: beside them a cell would be in other weather.
        self._first = max((each.round for each in done), default=0)
        self._seconds: dict[str, list[float]] = {}
        for each in done:
            self._seconds.setdefault(each.cell, []).append(each.seconds)
        self._seed = seed
        self._clock = clock
        self._began = clock()
        self.failed: set[str] = set()

    def __iter__(self) -> Iterator[Launch]:
        budget_s, is_first = self._limits.budget_s, True  # a run that is gone on with shall come further each time
        for number in range(self._limits.rounds):
            left = self.left_in(number)
            if not is_first and left and self.spent_s + self._cost(left) > budget_s:
                self.ended = self._used_up("")
                return
            for cell in left:
                if is_first and self.spent_s > budget_s:
                    self.ended = self._used_up(" in the first round")
                    return
                found = self._launch(cell, number)
                self._seconds.setdefault(cell.key, []).append(found.seconds)
                self._done.add((cell.key, number))
                if found.error is not None:
                    self.failed.add(cell.key)
                yield found
            is_first = is_first and not left
        self.ended = "complete"

    def _used_up(self, where: str) -> str:
        round_s = self._cost([cell for cell in self._cells if cell.key not in self.failed])
        more = ", more than the budget" if round_s > self._limits.budget_s else ""
        return (
            f"the budget of {self._limits.budget_s:g} s was used up{where}; a round takes about {round_s:.0f} s{more}"
        )

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    def left_in(self, number: int) -> list[Cell]:
        """What this round has still to launch: no cell that has failed, and nothing before the last round begun."""
        if number < self._first:
            return []
        cells = order_of(self._cells, number, self._seed)
        return [cell for cell in cells if (cell.key, number) not in self._done and cell.key not in self.failed]

    @property
    def left(self) -> list[Cell]:
        """All that would be launched, had it no budget; a cell once for every round."""
        return [cell for number in range(self._limits.rounds) for cell in self.left_in(number)]

    def left_s(self) -> float:
        """About how long the rest will take."""
        return max(0.0, min(self._cost(self.left), self._limits.budget_s - self.spent_s))

    def _cost(self, cells: Sequence[Cell]) -> float:
        known = [seconds for each in self._seconds.values() for seconds in each]
        guess = median(known) if known else FIRST_GUESS_S
        return sum(median(self._seconds.get(cell.key, [guess])) for cell in cells)


class OnLaunch(Protocol):
    """Called after every launch: what was launched, how many of how many are done, and seconds left."""

    def __call__(self, what: str, done: int, total: int, left_s: float) -> None: ...


@contextmanager
def progress() -> Iterator[OnLaunch]:
    """A bar where somebody looks, else a line for every launch."""
    if not sys.stderr.isatty():
        yield _line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, total: int, left_s: float) -> None:
            bar.update(task, completed=done, total=total, description=f"about {duration(left_s)} left; {what}")

        yield tell


def _line(what: str, done: int, total: int, left_s: float) -> None:
    print(f"[{done}/{total}] {what} (about {duration(left_s)} left)", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
