"""Launches of a comparison: the records of their ranks, and what follows from one launch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from dualdist.bench.statistics import max_foreign_cores
from dualdist.utils.machine import CpuUse

MIN_WINDOW_S = 1.0  # the system counts CPU time in ticks of 10 ms
# Figures that are one for all ranks: peak memory; and in a step: bytes that a rank sends over TCP, bytes of gradients
# that it gives to the reduction, and CPU seconds.
OVER_RANKS: dict[str, Callable[[list[Any]], Any]] = {
    "peak_bytes": max,
    "device_peak_bytes": max,
    "tcp_bytes": fmean,
    "sent_bytes": fmean,
    "cpu_s": math.fsum,
}


@dataclass(frozen=True)
class RankRecord:
    """Record of one rank, written by bench/recording.py.

    Durations are in seconds; `began`, `ready` and `first_step` are Unix times. A loss may be NaN; None is no loss.
    """

    rank: int
    ranks: int
    node_rank: int
    num_nodes: int
    backend: str
    transport: str
    launcher: str
    mpi: bool
    device: str
    device_versions: Mapping[str, str]
    threads: int
    began: float
    ready: float
    first_step: float
    warmup: int
    ends: list[float]
    losses: list[float | None]
    digest: str
    start: list[float]  # a sample of the parameters before the first step, `sample` after the last
    sample: list[float]
    rounding: float
    peak_bytes: int | None
    device_peak_bytes: int | None
    tcp_bytes: float | None
    cpu_s: float | None
    window_s: float | None
    machine_s: float | None
    own_s: float | None
    processor: str = ""  # of its host, as `cores`
    cores: int = 0
    reduction: str | None = None  # what the program asked for itself
    sent_bytes: float | None = None

    @property
    def steps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.ends[max(0, self.warmup - 1) :])]


@dataclass(frozen=True)
class Launch:
    """One launch of a contender; `seconds` is the job's duration. A failed launch has an `error` and no ranks."""

    contender: str  # the contender's key
    label: str
    round: int
    began: float
    seconds: float
    command: str
    batch: int | None = None  # global batch size, if known
    foreign_cores: float | None = None
    ranks: list[RankRecord] = field(default_factory=list)
    allreduce: dict[str, Any] | None = None
    error: str | None = None

    @cached_property
    def steps(self) -> list[float]:
        """Return the seconds of each timed step on its slowest rank."""
        return [max(each) for each in zip(*(rank.steps for rank in self.ranks), strict=False)]

    @cached_property
    def step_s(self) -> float:
        return median(self.steps)

    @cached_property
    def losses(self) -> list[float | None]:
        """Return the mean loss over ranks of every step, warm-up included; None for a step without a loss."""
        return [
            None if None in each else sum(loss for loss in each if loss is not None) / len(each)
            for each in zip(*(rank.losses for rank in self.ranks), strict=False)
        ]

    @property
    def first(self) -> RankRecord:
        return self.ranks[0]

    @property
    def startup_s(self) -> float:
        """Return the time from the launch to the end of the first training step, on the slowest rank."""
        return max(rank.first_step for rank in self.ranks) - self.began

    @property
    def init_s(self) -> float:
        """Return the time from the launch to the end of init() on the slowest rank."""
        return max(rank.ready for rank in self.ranks) - self.began

    def over_ranks(self, name: str) -> Any:
        """Return one of OVER_RANKS, None if it is unknown."""
        known = [value for rank in self.ranks if (value := getattr(rank, name)) is not None]
        return OVER_RANKS[name](known) if known else None


def foreign_cores_beside(ranks: Sequence[RankRecord]) -> float | None:
    """Return the CPU use of other processes during the timed steps on the most loaded node; None if unknown.

    From the ranks' readings, as slurmstepd starts the ranks of srun: their CPU time is not that of our children.
    """
    uses = [
        (rank.node_rank, CpuUse(rank.window_s, rank.machine_s, rank.own_s))
        for rank in ranks
        if rank.window_s is not None and rank.window_s >= MIN_WINDOW_S and rank.own_s is not None
    ]
    return max_foreign_cores(uses) if len(uses) == len(ranks) else None


def group_by_contender(launches: Sequence[Launch]) -> Mapping[str, list[Launch]]:
    """Group the successful launches by contender, in the order of rounds."""
    found: dict[str, list[Launch]] = {}
    for launch in sorted(launches, key=lambda each: each.round):
        if launch.error is None:
            found.setdefault(launch.contender, []).append(launch)
    return found
