"""Contenders take turns: A B C, C B A, ... round after round in one process, so that all suffer the same weather."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualdist.utils.machine import CpuUse, foreign_cores, read_cpu


@dataclass(frozen=True)
class TimedContender:
    """One contender: lead() is not timed, and makes caches and connections its own again; once() is timed."""

    name: str
    lead: Callable[[], object]
    once: Callable[[], object]


@dataclass(frozen=True)
class RankTimings:
    """What one rank saw: seconds and CPU seconds of one call, by contender and round, and the load of each round."""

    node_rank: int
    seconds: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    rounds: list[CpuUse] = field(default_factory=list)


def order_of(names: Sequence[str], number: int) -> list[str]:
    """Each contender begins as often as the others, and every second round goes backwards: neighbours change too."""
    shift = number // 2 % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if number % 2 else turned


def interleave(
    turns: Sequence[TimedContender],
    repeats: int,
    rounds: int,
    *,
    meet: Callable[[], object],
    synchronize: Callable[[], object],
    node_rank: int,
) -> RankTimings:
    """Time every contender `rounds` times, `repeats` calls at a time. Every rank calls this.

    `meet` returns when all ranks have called it; `synchronize` when the device has done all it was given.
    """
    by_name = {turn.name: turn for turn in turns}
    seen = RankTimings(node_rank, {name: [] for name in by_name}, {name: [] for name in by_name})
    for number in range(rounds):
        before = read_cpu()
        for name in order_of(list(by_name), number):
            seconds, cpu_s = timed(by_name[name], repeats, meet=meet, synchronize=synchronize)
            seen.seconds[name].append(seconds)
            seen.cpu_s[name].append(cpu_s)
        seen.rounds.append(CpuUse.between(before, read_cpu()))
    return seen


def timed(
    turn: TimedContender, repeats: int, *, meet: Callable[[], object], synchronize: Callable[[], object]
) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, that one call takes, of `repeats` in a row."""
    turn.lead()
    synchronize()
    meet()
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        turn.once()
    synchronize()
    ended = time.perf_counter()
    return (ended - began) / repeats, (time.process_time() - cpu) / repeats


def repeats_to_fill(block_s: float, seconds: float, least: int, most: int) -> int:
    """How many calls of `seconds` each fill a block."""
    return max(least, min(most, round(block_s / max(seconds, 1e-9))))


def together(sights: Sequence[RankTimings]) -> dict[str, Any]:
    """All ranks' sights as one: a call takes as long as on its slowest rank, and the CPU time of all of them."""
    names = list(sights[0].seconds)
    rounds = range(len(sights[0].rounds))
    return {
        "seconds": {name: [max(sight.seconds[name][i] for sight in sights) for i in rounds] for name in names},
        "cpu_s": {name: [sum(sight.cpu_s[name][i] for sight in sights) for i in rounds] for name in names},
        "foreign_cores": [worst([(sight.node_rank, sight.rounds[i]) for sight in sights]) for i in rounds],
    }


def worst(uses: Sequence[tuple[int, CpuUse]]) -> float | None:
    """The foreign load of the host that had most of it."""
    nodes = {node for node, _ in uses}
    found = [foreign_cores([use for node, use in uses if node == chosen]) for chosen in nodes]
    known = [cores for cores in found if cores is not None]
    return max(known) if known else None
