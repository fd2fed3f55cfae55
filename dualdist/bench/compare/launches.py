"""What one launched job of a comparison left behind, as its file holds it, and what follows from it alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from dualdist.bench.ranks.interleaving import worst
from dualdist.errors import UsageError
from dualdist.utils.machine import CpuUse

LEAST_WINDOW_S = 1.0  # the system counts in ticks of 10 ms
CONFIG = ConfigDict(frozen=True, ser_json_inf_nan="constants")  # a loss may be NaN, which is not None


class RankRecord(BaseModel):
    """Record of one rank; see diagnostics/recording.py. Times are seconds, `began` and its kin times of day."""

    model_config = CONFIG

    rank: int
    ranks: int
    node_rank: int
    num_nodes: int
    backend: str
    transport: str
    launcher: str
    mpi: bool
    device: str
    cuda: str | None
    nccl: str | None
    threads: int
    began: float
    ready: float
    first_step: float
    warmup: int
    ends: list[float]
    losses: list[float | None]
    digest: str
    start: list[float]  # before the first step, as `sample` is after the last one
    sample: list[float]
    rounding: float
    peak_bytes: int | None
    device_peak_bytes: int | None
    tcp_bytes: float | None
    cpu_s: float | None
    window_s: float | None
    machine_s: float | None
    own_s: float | None

    @property
    def steps(self) -> list[float]:
        """Seconds of each timed step on this rank."""
        return [after - before for before, after in pairwise(self.ends[max(0, self.warmup - 1) :])]


class Launch(BaseModel):
    """One launch of a cell. `seconds` is the whole job's, `error` why it failed; then it has no ranks."""

    model_config = CONFIG

    cell: str
    round: int
    began: float
    seconds: float
    command: str
    batch: int | None = None  # samples of all ranks in a step, where they are known
    foreign_cores: float | None = None
    ranks: list[RankRecord] = []
    allreduce: dict[str, Any] | None = None
    error: str | None = None

    @cached_property
    def steps(self) -> list[float]:
        """Seconds of each timed step, on its slowest rank."""
        return [max(each) for each in zip(*(rank.steps for rank in self.ranks), strict=False)]

    @cached_property
    def step_s(self) -> float:
        """The median step."""
        return median(self.steps)

    @cached_property
    def losses(self) -> list[float | None]:
        """Of every step, warm-up included, the mean over ranks; None where a step had none."""
        return [
            None if None in each else _mean([loss for loss in each if loss is not None])
            for each in zip(*(rank.losses for rank in self.ranks), strict=False)
        ]

    @property
    def first(self) -> RankRecord:
        return self.ranks[0]

    @property
    def startup_s(self) -> float:
        """From the launch to the end of the first training step, on the slowest rank."""
        return max(rank.first_step for rank in self.ranks) - self.began

    @property
    def init_s(self) -> float:
        """From the launch until the ranks had found each other."""
        return max(rank.ready for rank in self.ranks) - self.began

    @property
    def peak_bytes(self) -> int | None:
        """Of the rank that needed most."""
        return max((rank.peak_bytes for rank in self.ranks if rank.peak_bytes is not None), default=None)

    @property
    def device_peak_bytes(self) -> int | None:
        return max((rank.device_peak_bytes for rank in self.ranks if rank.device_peak_bytes is not None), default=None)

    @property
    def tcp_bytes(self) -> float | None:
        """That a rank sent in a step, the mean over ranks."""
        known = [rank.tcp_bytes for rank in self.ranks if rank.tcp_bytes is not None]
        return math.fsum(known) / len(known) if known else None

    @property
    def cpu_s(self) -> float | None:
        """Of all ranks in a step."""
        known = [rank.cpu_s for rank in self.ranks if rank.cpu_s is not None]
        return math.fsum(known) if known else None


def _mean(losses: Sequence[float]) -> float:
    """NaN of two different infinities, where fsum raises."""
    total = math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
    return total / len(losses)


def read(path: Path) -> Launch:
    """The launch that a file holds; UsageError where it is damaged."""
    try:
        return Launch.model_validate_json(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: this is no launch of dualdist compare; delete it to have it run again") from error


def write(launch: Launch, path: Path) -> None:
    """The launch is in the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(launch.model_dump_json())
    draft.replace(path)


def foreign_of(ranks: Sequence[RankRecord]) -> float | None:
    """How many cores others used beside the timed steps, on the host that had most of that; None where it is unknown.

    By what the ranks saw themselves: slurmstepd starts those of srun, whose CPU time is no part of our children's.
    """
    uses = [
        (rank.node_rank, CpuUse(rank.window_s, rank.machine_s, rank.own_s))
        for rank in ranks
        if rank.window_s is not None and rank.window_s >= LEAST_WINDOW_S and rank.own_s is not None
    ]
    return worst(uses) if len(uses) == len(ranks) else None


def by_cell(launches: Sequence[Launch]) -> Mapping[str, list[Launch]]:
    """The launches that succeeded, round by round."""
    found: dict[str, list[Launch]] = {}
    for launch in sorted(launches, key=lambda each: each.round):
        if launch.error is None:
            found.setdefault(launch.cell, []).append(launch)
    return found
