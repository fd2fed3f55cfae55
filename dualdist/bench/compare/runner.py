"""Run a comparison: the job of each cell, its launch, and the order of launches within a time budget."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from dualdist.bench.compare.launches import Launch, RankRecord, foreign_cores_beside, read_launch, write_launch
from dualdist.bench.compare.matrix import DUALDIST, Cell
from dualdist.bench.jobs import FOREIGN, MeasurementSettings, PlannedJob, program_command, run_job, worker_command
from dualdist.bench.options import TrainOptions, to_arguments
from dualdist.errors import LaunchError
from dualdist.launch.job import Site
from dualdist.session import RECORD, RECORD_STEPS, RECORD_WARMUP

LAUNCHES = "launches"  # folder of one file per launch
RUNNING = "running"  # folder in which the ranks of a launch leave their records
NO_STEPS = "no rank stepped a wrapped optimizer; does the script call dd.wrap_optimizer?\n"
FIRST_GUESS_S = 8.0  # duration of a launch before one has been measured


@dataclass(frozen=True)
class UserScript:
    """The user's program (`argv` follows `python`) and how many of its steps to time."""

    argv: tuple[str, ...]
    warmup: int
    steps: int


@dataclass(frozen=True)
class Comparison:
    """Common part of all launches: the model or script to train, settings, and the folder for their files."""

    work: TrainOptions | UserScript
    settings: MeasurementSettings
    site: Site
    folder: Path

    def ranks(self, cell: Cell) -> int:
        return 1 if cell.kind == "one" else self.settings.ranks

    def plan_job(self, cell: Cell, number: int) -> PlannedJob:
        """Return the job of a cell in a round."""
        ranks, own = self.ranks(cell), self.folder / RUNNING / f"{number}-{cell.key}"
        settings = replace(self.settings, ranks=ranks)
        reports = [own / f"rank-{rank}.json" for rank in range(ranks)]
        if isinstance(self.work, UserScript):
            record = {RECORD: str(own), RECORD_WARMUP: str(self.work.warmup), RECORD_STEPS: str(self.work.steps)}
            settings = replace(settings, env={**record, **settings.env})
            command = program_command(cell.config, self.work.argv, settings, self.site)
        else:
            command = worker_command(cell.config, self._train_arguments(cell, self.work, own), settings, self.site)
            if self._times_allreduces(cell, self.work):
                reports.append(own / "allreduce.json")
        return PlannedJob(f"round {number + 1}, {cell.label}", command, tuple(reports), {"cell": cell, "folder": own})

    def _batch(self, cell: Cell) -> int | None:
        """Return the global batch size; a single rank trains with one rank's share."""
        return None if isinstance(self.work, UserScript) else self.work.batch * self.ranks(cell) // self.settings.ranks

    def _train_arguments(self, cell: Cell, options: TrainOptions, own: Path) -> list[str]:
        options = replace(
            options,
            contender=DUALDIST if cell.kind == "one" else cell.kind,
            batch=self._batch(cell) or 0,
            slowdown=cell.slowdown,
            sizes=options.sizes if self._times_allreduces(cell, options) else (),
        )
        return ["train", *to_arguments(options), f"--folder={own}", f"--report={own / 'allreduce.json'}"]

    def _times_allreduces(self, cell: Cell, options: TrainOptions) -> bool:
        return bool(options.sizes) and cell.is_contender and self.ranks(cell) > 1

    def launch(self, cell: Cell, number: int) -> Launch:
        """Run the job of a cell in a round and write its file; a failed launch holds the error."""
        planned, began, start = self.plan_job(cell, number), time.time(), time.monotonic()
        shutil.rmtree(planned.tags["folder"], ignore_errors=True)  # of an interrupted launch
        result = Launch(
            cell=cell.key, round=number, began=began, seconds=0, command=planned.command_line, batch=self._batch(cell)
        )
        try:
            reports = run_job(planned, self.settings.timeout_s)
            ranks = [RankRecord.model_validate(report) for report in reports[: self.ranks(cell)]]
            allreduce = reports[-1] if len(reports) > len(ranks) else None
            foreign = foreign_cores_beside(ranks) if cell.config.launcher == "srun" else reports[0][FOREIGN]
            error = record_error(cell, ranks)
            update = {"ranks": ranks, "allreduce": allreduce, "error": error, "foreign_cores": foreign}
            result = result.model_copy(update=update)
        except LaunchError as error:
            hint = NO_STEPS if isinstance(self.work, UserScript) and "it left no report" in str(error) else ""
            result = result.model_copy(update={"error": hint + str(error)})
        finally:
            shutil.rmtree(planned.tags["folder"], ignore_errors=True)
        result = result.model_copy(update={"seconds": time.monotonic() - start})
        write_launch(result, self.folder / LAUNCHES / f"{number:03}-{cell.key}.json")
        return result

    def load_launches(self, cells: Sequence[Cell]) -> list[Launch]:
        """Read the launches of an interrupted run; failed ones are repeated."""
        keys = {cell.key for cell in cells}
        launches = map(read_launch, sorted((self.folder / LAUNCHES).glob("*.json")))
        return [launch for launch in launches if launch.cell in keys and launch.error is None]


def record_error(cell: Cell, ranks: Sequence[RankRecord]) -> str | None:
    """Return why these records are not valid for the cell, None if they are."""
    first, config = ranks[0], cell.config
    if config.backend not in ("auto", first.backend) or config.transport not in (None, first.transport):
        actual, expected = f"{first.backend} over {first.transport}", f"{config.backend} over {config.transport}"
        return f"it ran on {actual}, not on {expected}: does the script name a backend itself? Let it call dd.init()"
    if min(len(rank.steps) for rank in ranks) < 1:
        return f"it took {len(first.ends)} steps, and the first {first.warmup} are not timed: train longer"
    return None


def draw_order(cells: Sequence[Cell], number: int, seed: int) -> list[Cell]:
    """Return the cells in the random order of a round; the first round starts with the contenders.

    A budget that ends within the first round is thus spent on the cells that the verdict is about.
    """
    drawn = random.Random(f"{seed}/{number}").sample(list(cells), len(cells))
    return sorted(drawn, key=lambda cell: cell.is_baseline) if number == 0 else drawn


class LaunchSchedule:
    """Iterator over the launches, round by round, until `rounds` are complete or `budget_s` is used up.

    `ended` says why it stopped. No round but the first starts that would exceed the budget. A resumed run continues in
    the last round of `done`: rounds from an earlier run are not comparable.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        launch: Callable[[Cell, int], Launch],
        done: Sequence[Launch] = (),
        *,
        rounds: int,
        budget_s: float,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ended = "interrupted"
        self.failed: set[str] = set()
        self._cells = list(cells)
        self._launch = launch
        self._done = {(each.cell, each.round) for each in done}
        self._first_round = max((each.round for each in done), default=0)
        self._seconds: dict[str, list[float]] = {}
        for each in done:
            self._seconds.setdefault(each.cell, []).append(each.seconds)
        self._rounds = rounds
        self._budget_s = budget_s
        self._seed = seed
        self._clock = clock
        self._start = clock()

    def __iter__(self) -> Iterator[Launch]:
        is_first = True  # with work left: every resumed run must make progress
        for number in range(self._rounds):
            remaining = self.remaining_in(number)
            if not is_first and remaining and self.elapsed_s + self._estimate(remaining) > self._budget_s:
                self.ended = self._budget_used("")
                return
            for cell in remaining:
                if is_first and self.elapsed_s > self._budget_s:
                    self.ended = self._budget_used(" in the first round")
                    return
                result = self._launch(cell, number)
                self._seconds.setdefault(cell.key, []).append(result.seconds)
                self._done.add((cell.key, number))
                if result.error is not None:
                    self.failed.add(cell.key)
                yield result
            is_first = is_first and not remaining
        self.ended = "complete"

    def _budget_used(self, where: str) -> str:
        round_s = self._estimate([cell for cell in self._cells if cell.key not in self.failed])
        more = ", more than the budget" if round_s > self._budget_s else ""
        return f"the budget of {self._budget_s:g} s was used up{where}; a round takes about {round_s:.0f} s{more}"

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start

    def remaining_in(self, number: int) -> list[Cell]:
        """Return the cells to launch in a round; cells that failed are not launched again."""
        if number < self._first_round:
            return []
        cells = draw_order(self._cells, number, self._seed)
        return [cell for cell in cells if (cell.key, number) not in self._done and cell.key not in self.failed]

    @property
    def remaining(self) -> list[Cell]:
        """Return all launches that are left without regard to the budget; a cell once per round."""
        return [cell for number in range(self._rounds) for cell in self.remaining_in(number)]

    def remaining_s(self) -> float:
        """Estimate how long the rest takes."""
        return max(0.0, min(self._estimate(self.remaining), self._budget_s - self.elapsed_s))

    def _estimate(self, cells: Sequence[Cell]) -> float:
        known = [seconds for each in self._seconds.values() for seconds in each]
        guess = median(known) if known else FIRST_GUESS_S
        return sum(median(self._seconds.get(cell.key, [guess])) for cell in cells)


OnLaunch = Callable[[str, int, int, float], None]  # label, launches done, launches in total, seconds left


@contextmanager
def show_progress() -> Iterator[OnLaunch]:
    """Show a progress bar on a terminal, else print a line per launch."""
    if not sys.stderr.isatty():
        yield lambda label, done, total, left_s: print(
            f"[{done}/{total}] {label} (about {format_duration(left_s)} left)", file=sys.stderr, flush=True
        )
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda label, done, total, left_s: bar.update(
            task, completed=done, total=total, description=f"about {format_duration(left_s)} left; {label}"
        )


def format_duration(seconds: float) -> str:
    """Return 45 s, 12 min or 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
