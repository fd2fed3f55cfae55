"""Run a comparison: contenders, the job and launch of each, and the order of launches within a time budget."""

import math
import random
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from dualdist.backends import registry
from dualdist.bench.compare.launches import Launch, RankRecord, foreign_cores_beside
from dualdist.bench.jobs import (
    BASELINES,
    COMPRESSED,
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
from dualdist.bench.placement import Placement
from dualdist.bench.statistics import MIN_LAUNCHES
from dualdist.errors import LaunchError
from dualdist.launch.launchers import DEFAULT_LAUNCHER
from dualdist.launch.launchers.srun import SRUN
from dualdist.session import OBSERVERS, REDUCTION
from dualdist.utils.variables import RECORD, RECORD_STEPS, RECORD_WARMUP

NO_STEPS = "no rank stepped a wrapped optimizer; does the script call dd.wrap_optimizer?\n"
COMPLETE = "complete"
FIRST_GUESS_S = 8.0  # duration of a launch before one has been measured
ORDERED_STEPS = 5  # steps of a launch with ordered sums, where only the bits of the parameters count
NOT_AVERAGED = ("none", "one")  # no averaging over ranks: their losses and parameters differ from the others'


@dataclass(frozen=True)
class Contender:
    """A method, DUALDIST, one of BASELINES or a compression, on a configuration, launched as a separate job.

    `slowdown` stretches its steps; `copy` distinguishes the repetitions of --self-check. If `is_ordered`, it is the
    check of a candidate: a short launch with reduction="ordered", which is not timed.
    """

    method: str
    config: RunConfig
    slowdown: float = 1.0
    copy: int = 0
    is_ordered: bool = False

    @property
    def is_baseline(self) -> bool:
        return self.method != DUALDIST

    @property
    def is_candidate(self) -> bool:
        """Return True if it may win: neither a baseline nor a check."""
        return not self.is_baseline and not self.copy and not self.is_ordered

    @property
    def trains_alike(self) -> bool:
        """Return True if it must train the same model as the others."""
        return self.method not in NOT_AVERAGED and COMPRESSED.fullmatch(self.method) is None

    @property
    def label(self) -> str:
        if self.method in NOT_AVERAGED:
            return BASELINES[self.method]
        again = ", ordered sums" if self.is_ordered else ", again" if self.copy else ""
        again = f", {self.method}" if COMPRESSED.fullmatch(self.method) else again
        remark = f", slowed by {100 * (self.slowdown - 1):.3g}%" if self.slowdown > 1 else again
        return replace(self.config, backend=BASELINES.get(self.method, self.config.backend)).describe(remark)

    @property
    def key(self) -> str:
        config = self.config
        words = [self.method, config.backend, config.transport or "own", config.launcher]
        marks = [f"copy{self.copy}"] if self.copy else ["ordered"] if self.is_ordered else []
        return "-".join([*words, *marks])


@dataclass(frozen=True)
class RefusedContender:
    contender: Contender
    reason: str


def baseline_contenders(
    names: Sequence[str], candidates: Sequence[Contender], placement: Placement, *, uses_gpus: bool
) -> Iterator[Contender | RefusedContender]:
    """Yield the baselines for these candidates; `names` are keys of BASELINES."""
    launcher = SRUN.name if placement.is_slurm else DEFAULT_LAUNCHER
    for name in names:
        if name == "one":
            yield Contender(name, RunConfig("auto", None, launcher if placement.hosts else "python"))
        elif name == "hvd":
            configs = (each.config for each in candidates)
            found = [config for config in configs if registry.uses_library(config.backend, registry.HOROVOD_LIBRARY)]
            if found:
                yield Contender(name, found[0])
            else:
                contender = Contender(name, RunConfig("horovod", None, launcher))
                yield RefusedContender(contender, "it needs a candidate of the backend horovod that can run")
        else:
            yield Contender(name, RunConfig("native", None if uses_gpus else "gloo", launcher))


def ordered_checks(contenders: Sequence[Contender], ranks: int, *, uses_gpus: bool) -> list[Contender]:
    """Return the checks of the candidates; none of two ranks, whose sums have one order, or of a model on GPUs."""
    candidates = [each for each in contenders if each.is_candidate]
    is_useful = ranks > 2 and not uses_gpus and len(candidates) > 1
    return [replace(each, is_ordered=True) for each in candidates] if is_useful else []


@dataclass(frozen=True)
class UserScript:
    """The user's program (`argv` follows `python`) and how many of its steps to time."""

    argv: tuple[str, ...]
    warmup: int
    steps: int


@dataclass(frozen=True)
class Comparison:
    """Common part of all launches: the model or script to train, settings, and the folder for their ranks' records."""

    work: TrainOptions | UserScript
    settings: MeasurementSettings
    folder: Path

    def ranks(self, contender: Contender) -> int:
        return 1 if contender.method == "one" else self.settings.ranks

    def plan_job(self, contender: Contender, number: int) -> PlannedJob:
        ranks, own = self.ranks(contender), self.folder / f"{number}-{contender.key}"
        settings, work = replace(self.settings, ranks=ranks), self.work
        if contender.is_ordered:
            settings = replace(settings, env={**settings.env, REDUCTION: "ordered"})
            work = replace(work, steps=min(work.steps, ORDERED_STEPS))
        reports = [own / f"rank-{rank}.json" for rank in range(ranks)]
        if isinstance(work, UserScript):
            record = {RECORD: str(own), RECORD_WARMUP: str(work.warmup), RECORD_STEPS: str(work.steps)}
            record[OBSERVERS] = "dualdist.bench.recording:RECORDING"
            settings = replace(settings, env={**record, **settings.env})
            command = program_command(contender.config, work.argv, settings)
        else:
            report, options = own / "allreduce.json", self._train_options(contender, work)
            command = worker_command(contender.config, "train", options, report, settings)
            reports += [report] if options.sizes else []
        return PlannedJob(f"round {number + 1}, {contender.label}", command, tuple(reports), {"folder": own})

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
        """Run the job of a contender in a round; a failed launch holds the error."""
        planned, began, start = self.plan_job(contender, number), time.time(), time.monotonic()
        found: dict[str, Any] = {}
        try:
            reports = run_job(planned, self.settings.timeout_s)
            ranks = [_rank_record(report) for report in reports[: self.ranks(contender)]]
            found["ranks"] = ranks
            found["allreduce"] = reports[-1] if len(reports) > len(ranks) else None
            hosts = self.settings.placement.hosts
            found["error"] = record_error(contender, ranks, len(hosts) if len(ranks) > 1 else 0)
            is_elsewhere = hosts or contender.config.launcher == SRUN.name
            found["foreign_cores"] = foreign_cores_beside(ranks) if is_elsewhere else reports[0][FOREIGN]
        except LaunchError as error:
            hint = NO_STEPS if isinstance(self.work, UserScript) and "it left no report" in str(error) else ""
            found["error"] = hint + str(error)
        finally:
            shutil.rmtree(planned.tags["folder"], ignore_errors=True)
        return Launch(
            contender=contender.key,
            label=contender.label,
            round=number,
            began=began,
            seconds=time.monotonic() - start,
            command=planned.command_line,
            batch=None if isinstance(self.work, UserScript) else self._train_options(contender, self.work).batch,
            **found,
        )


def _rank_record(report: dict[str, Any]) -> RankRecord:
    return RankRecord(**{name: value for name, value in report.items() if name != FOREIGN})


def record_error(contender: Contender, ranks: Sequence[RankRecord], hosts: int = 0) -> str | None:
    """Return why these records are not valid for the contender, None if they are; `hosts` is their number, if known."""
    first, config = ranks[0], contender.config
    if config.backend not in ("auto", first.backend) or config.transport not in (None, first.transport):
        actual, expected = f"{first.backend} over {first.transport}", f"{config.backend} over {config.transport}"
        return f"it ran on {actual}, not on {expected}: does the script name a backend itself? Let it call dd.init()"
    if hosts and first.num_nodes != hosts:
        return f"its ranks were on {first.num_nodes} hosts, not on {hosts}"
    if min(len(rank.steps) for rank in ranks) < 1:
        return f"it took {len(first.ends)} steps, and the first {first.warmup} are not timed: train longer"
    return None


def draw_order(contenders: Sequence[Contender], number: int, seed: int) -> list[Contender]:
    """Return the contenders in the random order of a round; the first one begins with the most important.

    A budget that is too small for all is thus spent on what the verdict is about.
    """
    drawn = random.Random(f"{seed}/{number}").sample(list(contenders), len(contenders))
    return by_importance(drawn, contenders) if number == 0 else drawn


def by_importance(some: Sequence[Contender], contenders: Sequence[Contender]) -> list[Contender]:
    """Sort some of the contenders: the first candidate of each backend, other candidates, baselines."""
    first: dict[tuple[str, int], Contender] = {}
    for each in contenders:
        if not each.is_baseline:
            first.setdefault((each.config.backend, each.copy), each)
    return sorted(some, key=lambda each: (each.is_baseline, each not in first.values()))


@dataclass
class LaunchSchedule:
    """Iterator over the launches, round by round, until `rounds` are complete or `budget_s` is spent.

    `checks`, those of `contenders` with ordered sums, follow the rounds, which leave them the time for one launch each.
    `ended` says why it stopped. No round but the first starts that would exceed the budget. If the budget is too small
    for a verdict on all contenders, `left_out` are those that are not launched any more.
    """

    contenders: Sequence[Contender]
    launch: Callable[[Contender, int], Launch]
    _: KW_ONLY
    rounds: int
    budget_s: float
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    ended: str = "interrupted"
    failed: set[str] = field(default_factory=set)
    left_out: list[Contender] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checks = [each for each in self.contenders if each.is_ordered]
        self.contenders = [each for each in self.contenders if not each.is_ordered]
        self._launches: dict[str, list[Launch]] = {}
        self._start = self.clock()

    def __iter__(self) -> Iterator[Launch]:
        ended = yield from self._rounds()
        for check in self.remaining_checks(self._able()):
            if self.elapsed_s > self.budget_s:
                ended = self._budget_used(" before the checks with ordered sums") if ended == COMPLETE else ended
                break
            yield self._launch(check, max(each.round for found in self._launches.values() for each in found))
        self.ended = ended

    def _rounds(self) -> Generator[Launch, None, str]:
        """Yield the launches of all rounds; return why they ended."""
        for number in range(self.rounds):
            remaining = self.remaining_in(number)
            needed = self._estimate([*remaining, *self.remaining_checks(self._able())])
            if number > 0 and remaining and self.elapsed_s + needed > self.budget_s:
                return self._budget_used("")
            while remaining := self.remaining_in(number):
                if number == 0 and self.elapsed_s > self.budget_s:
                    return self._budget_used(" in the first round")
                yield self._launch(remaining[0], number)
                if number == 0:
                    self._leave_out()
        return COMPLETE

    def _launch(self, contender: Contender, number: int) -> Launch:
        result = self.launch(contender, number)
        self._launches.setdefault(contender.key, []).append(result)
        if result.error is not None:
            self.failed.add(contender.key)
        return result

    def _leave_out(self) -> None:
        """Leave out the least important contenders, until a verdict on the others fits into the budget; two remain."""
        kept = by_importance(self._able(), self.contenders)
        while len(kept) > 2 and not self._fits(kept):
            self.left_out.append(kept.pop())

    def _fits(self, kept: Sequence[Contender]) -> bool:
        """Return True if the budget allows a verdict on these contenders."""
        wanted = min(self.rounds, MIN_LAUNCHES)
        missing = {each: max(0, wanted - len(self._launches.get(each.key, ()))) for each in kept}
        rest_s = sum(count * self._estimate([each]) for each, count in missing.items())
        return self.elapsed_s + rest_s + self._estimate(self.remaining_checks(kept)) <= self.budget_s

    def _able(self) -> list[Contender]:
        return [each for each in self.contenders if each.key not in self.failed and each not in self.left_out]

    def _budget_used(self, where: str) -> str:
        round_s = self._estimate(self._able())
        more = ", more than the budget" if round_s > self.budget_s else ""
        return f"the budget of {self.budget_s:g} s is spent{where}; a round takes about {round_s:.0f} s{more}"

    @property
    def enough(self) -> str:
        """Return the options with which all contenders get enough launches for a verdict."""
        contenders = [each for each in self.contenders if each.key not in self.failed]
        minutes = math.ceil(1.1 * (MIN_LAUNCHES * self._estimate(contenders) + self._estimate(self.checks)) / 60)
        return f"--budget {minutes}m" + (f" --rounds {MIN_LAUNCHES}" if self.rounds < MIN_LAUNCHES else "")

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self._start

    def remaining_in(self, number: int) -> list[Contender]:
        """Return the contenders to launch in a round, without those that failed or are left out."""
        done = {key for key, found in self._launches.items() if any(each.round == number for each in found)}
        drawn, able = draw_order(self.contenders, number, self.seed), self._able()
        return [each for each in drawn if each in able and each.key not in done]

    def remaining_checks(self, contenders: Sequence[Contender]) -> list[Contender]:
        left = [each for each in self.checks if each.key not in self._launches]
        return [each for each in left if replace(each, is_ordered=False) in contenders]

    @property
    def remaining(self) -> list[tuple[Contender, int]]:
        """Return all launches that are left, with their rounds, without regard to the budget."""
        rounds = [(contender, number) for number in range(self.rounds) for contender in self.remaining_in(number)]
        return rounds + [(check, self.rounds - 1) for check in self.remaining_checks(self._able())]

    def remaining_s(self) -> float:
        needed = self._estimate([contender for contender, _ in self.remaining])
        return max(0.0, min(needed, self.budget_s - self.elapsed_s))

    def _estimate(self, contenders: Sequence[Contender]) -> float:
        known = {key: median(each.seconds for each in found) for key, found in self._launches.items()}
        guess = median(known.values()) if known else FIRST_GUESS_S
        return sum(known.get(contender.key, guess) for contender in contenders)


def format_duration(seconds: float) -> str:
    """Return 45 s, 12 min or 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
