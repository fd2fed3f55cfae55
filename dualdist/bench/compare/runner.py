"""Run a comparison: contenders, the job and launch of each, and the order of launches within a time budget."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from statistics import median

from dualdist.backends import registry
from dualdist.bench.compare.launches import Launch, RankRecord, foreign_cores_beside, read_launch
from dualdist.bench.jobs import (
    BASELINES,
    DUALDIST,
    FOREIGN,
    MeasurementSettings,
    PlannedJob,
    RunConfig,
    TrainOptions,
    program_command,
    run_job,
    worker_command,
)
from dualdist.bench.report import write_atomically
from dualdist.errors import LaunchError
from dualdist.session import RECORD, RECORD_STEPS, RECORD_WARMUP

LAUNCHES = "launches"  # folder of one file per launch
RUNNING = "running"  # folder in which the ranks of a launch leave their records
NO_STEPS = "no rank stepped a wrapped optimizer; does the script call dd.wrap_optimizer?\n"
FIRST_GUESS_S = 8.0  # duration of a launch before one has been measured
NOT_AVERAGED = ("none", "one")  # no averaging over ranks: their losses and parameters differ from the others'


@dataclass(frozen=True)
class Contender:
    """A method, DUALDIST or one of BASELINES, on a configuration, launched as a job of its own.

    `slowdown` stretches its steps; `copy` distinguishes the repetitions of --self-check.
    """

    method: str
    config: RunConfig
    slowdown: float = 1.0
    copy: int = 0

    @property
    def is_baseline(self) -> bool:
        return self.method != DUALDIST

    @property
    def is_candidate(self) -> bool:
        """Return True if it may win: neither a baseline nor a self-check."""
        return not self.is_baseline and not self.copy

    @property
    def label(self) -> str:
        """Return the name used in tables and sentences."""
        if self.method in NOT_AVERAGED:
            return BASELINES[self.method]
        again = ", again" if self.copy else ""
        remark = f", slowed by {100 * (self.slowdown - 1):.3g}%" if self.slowdown > 1 else again
        return replace(self.config, backend=BASELINES.get(self.method, self.config.backend)).describe(remark)

    @property
    def key(self) -> str:
        """Return the name used in file names."""
        config = self.config
        words = [self.method, config.backend, config.transport or "own", config.launcher]
        return "-".join([*words, *([f"copy{self.copy}"] if self.copy else [])])


@dataclass(frozen=True)
class RefusedContender:
    """A contender that cannot run here, and the reason."""

    contender: Contender
    reason: str


def baseline_contenders(
    names: Sequence[str], candidates: Sequence[Contender], *, uses_gpus: bool
) -> Iterator[Contender | RefusedContender]:
    """Yield the baselines for these candidates; `names` are keys of BASELINES."""
    for name in names:
        if name == "one":
            yield Contender(name, RunConfig("auto", None, "python"))
        elif name == "hvd":
            configs = (each.config for each in candidates)
            found = [config for config in configs if registry.uses_library(config.backend, registry.HOROVOD_LIBRARY)]
            if found:
                yield Contender(name, found[0])
            else:
                contender = Contender(name, RunConfig("horovod", None, "torchrun"))
                yield RefusedContender(contender, "it needs a candidate of the backend horovod that can run")
        else:
            yield Contender(name, RunConfig("native", None if uses_gpus else "gloo", "torchrun"))


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
    folder: Path

    def ranks(self, contender: Contender) -> int:
        return 1 if contender.method == "one" else self.settings.ranks

    def plan_job(self, contender: Contender, number: int) -> PlannedJob:
        """Return the job of a contender in a round."""
        ranks, own = self.ranks(contender), self.folder / RUNNING / f"{number}-{contender.key}"
        settings = replace(self.settings, ranks=ranks)
        reports = [own / f"rank-{rank}.json" for rank in range(ranks)]
        if isinstance(self.work, UserScript):
            record = {RECORD: str(own), RECORD_WARMUP: str(self.work.warmup), RECORD_STEPS: str(self.work.steps)}
            settings = replace(settings, env={**record, **settings.env})
            command = program_command(contender.config, self.work.argv, settings)
        else:
            report, options = own / "allreduce.json", self._train_options(contender, self.work)
            command = worker_command(contender.config, "train", options, report, settings)
            reports += [report] if options.sizes else []
        tags = {"contender": contender, "folder": own}
        return PlannedJob(f"round {number + 1}, {contender.label}", command, tuple(reports), tags)

    def _train_options(self, contender: Contender, work: TrainOptions) -> TrainOptions:
        """Return the options of one contender; allreduces are timed by candidates only."""
        return replace(
            work,
            method=DUALDIST if contender.method == "one" else contender.method,
            batch=work.batch * self.ranks(contender) // self.settings.ranks,
            slowdown=contender.slowdown,
            sizes=work.sizes if contender.is_candidate else (),
        )

    def launch(self, contender: Contender, number: int) -> Launch:
        """Run the job of a contender in a round and write its file; a failed launch holds the error."""
        planned, began, start = self.plan_job(contender, number), time.time(), time.monotonic()
        shutil.rmtree(planned.tags["folder"], ignore_errors=True)  # of an interrupted launch
        batch = None if isinstance(self.work, UserScript) else self._train_options(contender, self.work).batch
        result = Launch(
            contender=contender.key,
            label=contender.label,
            round=number,
            began=began,
            seconds=0,
            command=planned.command_line,
            batch=batch,
        )
        try:
            reports = run_job(planned, self.settings.timeout_s)
            ranks = [RankRecord.model_validate(report) for report in reports[: self.ranks(contender)]]
            allreduce = reports[-1] if len(reports) > len(ranks) else None
            foreign = foreign_cores_beside(ranks) if contender.config.launcher == "srun" else reports[0][FOREIGN]
            error = record_error(contender, ranks)
            update = {"ranks": ranks, "allreduce": allreduce, "error": error, "foreign_cores": foreign}
            result = result.model_copy(update=update)
        except LaunchError as error:
            hint = NO_STEPS if isinstance(self.work, UserScript) and "it left no report" in str(error) else ""
            result = result.model_copy(update={"error": hint + str(error)})
        finally:
            shutil.rmtree(planned.tags["folder"], ignore_errors=True)
        result = result.model_copy(update={"seconds": time.monotonic() - start})
        write_atomically(self.folder / LAUNCHES / f"{number:03}-{contender.key}.json", result.model_dump_json())
        return result

    def load_launches(self, contenders: Sequence[Contender]) -> list[Launch]:
        """Read the launches of an interrupted run; failed ones are repeated."""
        keys = {contender.key for contender in contenders}
        launches = map(read_launch, sorted((self.folder / LAUNCHES).glob("*.json")))
        return [launch for launch in launches if launch.contender in keys and launch.error is None]


def record_error(contender: Contender, ranks: Sequence[RankRecord]) -> str | None:
    """Return why these records are not valid for the contender, None if they are."""
    first, config = ranks[0], contender.config
    if config.backend not in ("auto", first.backend) or config.transport not in (None, first.transport):
        actual, expected = f"{first.backend} over {first.transport}", f"{config.backend} over {config.transport}"
        return f"it ran on {actual}, not on {expected}: does the script name a backend itself? Let it call dd.init()"
    if min(len(rank.steps) for rank in ranks) < 1:
        return f"it took {len(first.ends)} steps, and the first {first.warmup} are not timed: train longer"
    return None


def draw_order(contenders: Sequence[Contender], number: int, seed: int) -> list[Contender]:
    """Return the contenders in the random order of a round; the first round ends with the baselines.

    A budget that ends within the first round is thus spent on what the verdict is about.
    """
    drawn = random.Random(f"{seed}/{number}").sample(list(contenders), len(contenders))
    return sorted(drawn, key=lambda contender: contender.is_baseline) if number == 0 else drawn


@dataclass
class LaunchSchedule:
    """Iterator over the launches, round by round, until `rounds` are complete or `budget_s` is used up.

    `ended` says why it stopped. No round but the first starts that would exceed the budget. A resumed run continues in
    the last round of `done`: rounds from an earlier run are not comparable.
    """

    contenders: Sequence[Contender]
    launch: Callable[[Contender, int], Launch]
    done: Sequence[Launch] = ()
    _: KW_ONLY
    rounds: int
    budget_s: float
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    ended: str = "interrupted"
    failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._done = {(each.contender, each.round) for each in self.done}
        self._first_round = max((each.round for each in self.done), default=0)
        self._seconds: dict[str, list[float]] = {}
        for each in self.done:
            self._seconds.setdefault(each.contender, []).append(each.seconds)
        self._start = self.clock()

    def __iter__(self) -> Iterator[Launch]:
        is_first = True  # with work left: every resumed run must make progress
        for number in range(self.rounds):
            remaining = self.remaining_in(number)
            if not is_first and remaining and self.elapsed_s + self._estimate(remaining) > self.budget_s:
                self.ended = self._budget_used("")
                return
            for contender in remaining:
                if is_first and self.elapsed_s > self.budget_s:
                    self.ended = self._budget_used(" in the first round")
                    return
                result = self.launch(contender, number)
                self._seconds.setdefault(contender.key, []).append(result.seconds)
                self._done.add((contender.key, number))
                if result.error is not None:
                    self.failed.add(contender.key)
                yield result
            is_first = is_first and not remaining
        self.ended = "complete"

    def _budget_used(self, where: str) -> str:
        round_s = self._estimate([contender for contender in self.contenders if contender.key not in self.failed])
        more = ", more than the budget" if round_s > self.budget_s else ""
        return f"the budget of {self.budget_s:g} s was used up{where}; a round takes about {round_s:.0f} s{more}"

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self._start

    def remaining_in(self, number: int) -> list[Contender]:
        """Return the contenders to launch in a round; contenders that failed are not launched again."""
        if number < self._first_round:
            return []
        drawn = draw_order(self.contenders, number, self.seed)
        return [each for each in drawn if (each.key, number) not in self._done and each.key not in self.failed]

    @property
    def remaining(self) -> list[Contender]:
        """Return all launches that are left without regard to the budget; a contender once per round."""
        return [contender for number in range(self.rounds) for contender in self.remaining_in(number)]

    def remaining_s(self) -> float:
        """Estimate how long the rest takes."""
        return max(0.0, min(self._estimate(self.remaining), self.budget_s - self.elapsed_s))

    def _estimate(self, contenders: Sequence[Contender]) -> float:
        known = [seconds for each in self._seconds.values() for seconds in each]
        guess = median(known) if known else FIRST_GUESS_S
        return sum(median(self._seconds.get(contender.key, [guess])) for contender in contenders)


def print_progress(label: str, done: int, total: int, left_s: float) -> None:
    """Print how many launches are done, of how many, and the time left."""
    print(f"[{done}/{total}] {label} (about {format_duration(left_s)} left)", file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Return 45 s, 12 min or 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
