"""Ranks that are stopped, killed, delayed or cut off at random moments of every public call that waits.

A fault that lasts is an error on every other rank, in time, that names who is missing; a short one changes nothing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import chaos_rank
from faults.chaos_rank import CALLS, DELAY_S, TIMEOUT_S, Chaos, draw
from faults.starts import LOOPBACK, PYTHON
from harness.effort import Effort
from harness.hosts import ADDRESSES, Hosts
from harness.jobs import Launch, Outcome
from harness.mpi import OpenMPI

GRACE_S = 5.0
"""After the time limit, by which a rank raises its error."""
END_S = 5.0
"""Of an interpreter, on a busy machine."""
START_S = 60.0
SHORT = 1
BRIEF = ("delay", "short cut")  # faults after which all goes on
RANKS_A_HOST = 2


@dataclass(frozen=True)
class Cell:
    """How the ranks start, on which backend, and what happens to them."""

    start: str  # "by hand", "mpirun" or "hosts"
    backend: str
    transport: str
    faults: Sequence[str] = ("stop", "kill", "delay")
    size: int = 3

    def __str__(self) -> str:
        return f"{self.start}-{self.backend}-{self.transport}"

    def fault(self, seed: int) -> str:
        """Return the fault of a seed; seeds in a row bring each together with each call."""
        return self.faults[seed % len(self.faults)]

    def draw(self, seed: int) -> Chaos:
        first = RANKS_A_HOST if self.start == "hosts" else 0
        return draw(seed, range(first, self.size))

    def is_far(self, rank: int, other: int) -> bool:
        """Return True if the ranks are on two hosts."""
        return self.start == "hosts" and rank // RANKS_A_HOST != other // RANKS_A_HOST

    def commands(self, words: Sequence[str], port: int, hosts: Hosts | None) -> list[tuple[list[str], dict[str, str]]]:
        """Return the commands that are run at the same time, with their variables."""
        argv = [*PYTHON, chaos_rank.__file__, self.backend, *words]
        env = {} if self.transport == "default" else {"DUALDIST_TRANSPORT": self.transport}
        if self.start == "mpirun":
            return [([*OpenMPI("mpirun").run(self.size), *argv], env)]
        return [(self._on_host(rank, argv, hosts), env | self._env(rank, port, hosts)) for rank in range(self.size)]

    def _on_host(self, rank: int, argv: Sequence[str], hosts: Hosts | None) -> list[str]:
        return hosts.on(rank // RANKS_A_HOST, *argv) if hosts else [*argv]

    def _env(self, rank: int, port: int, hosts: Hosts | None) -> dict[str, str]:
        """Return what a hand-written job script exports."""
        local = RANKS_A_HOST if hosts else self.size
        numbers = {"RANK": rank, "SIZE": self.size, "LOCAL_RANK": rank % local, "LOCAL_SIZE": local}
        numbers |= {"NODE_RANK": rank // local, "NUM_NODES": self.size // local, "PORT": port}
        address, interface = (ADDRESSES[0], "eth0") if hosts else (LOOPBACK, "lo")
        named = {f"DUALDIST_{name}": str(value) for name, value in numbers.items()}
        return {**named, "DUALDIST_ADDRESS": address, "GLOO_SOCKET_IFNAME": interface}


CELLS = [
    Cell("by hand", "native", "shm"),
    Cell("by hand", "native", "gloo"),
    Cell("by hand", "horovod", "gloo"),
    Cell("mpirun", "mpi", "mpi"),
]
HOSTS = Cell("hosts", "native", "default", faults=("cut", "short cut", "stop"), size=2 * RANKS_A_HOST)


@dataclass(frozen=True)
class Seen:
    """What one rank wrote, line by line."""

    lines: Sequence[Mapping[str, Any]]

    @staticmethod
    def read(path: Path) -> Seen:
        lines = path.read_text().splitlines() if path.exists() else []
        return Seen([json.loads(line) for line in lines])

    @property
    def last(self) -> Mapping[str, Any]:
        return self.lines[-1] if self.lines else {"what": "nothing", "at": 0.0}

    def find(self, what: str) -> Mapping[str, Any] | None:
        return next((line for line in self.lines if line["what"] == what), None)


def judge(cell: Cell, chaos: Chaos, fault: str, seen: Sequence[Seen], outcomes: Sequence[Outcome]) -> list[str]:
    """Return what is wrong."""
    problems = [
        f"rank {rank}, {line['what']}: {line['wrong']}"
        for rank, each in enumerate(seen)
        for line in each.lines
        if line.get("wrong")
    ]
    begun = seen[chaos.rank].find("fault")
    if begun is None:
        return [*problems, "the fault was not reached"]
    has_ended_first = all(each.find("shutdown") for rank, each in enumerate(seen) if rank != chaos.rank)
    if fault in BRIEF or has_ended_first:
        whole = [each for rank, each in enumerate(seen) if fault in BRIEF or rank != chaos.rank]
        return [*problems, *judge_whole(whole, outcomes)]
    others = [rank for rank in range(cell.size) if fault == "cut" or rank != chaos.rank]
    raised = [rank for rank in others if "error" in seen[rank].last]
    for rank in raised:
        problems += judge_error(cell, chaos, fault, rank, seen[rank].last, begun["at"] + chaos.at_s)
    # mpirun ends all ranks when one is killed, or has ended with an error.
    if raised != others and not (cell.start == "mpirun" and (raised or fault == "kill")):
        problems.append(f"ranks {others} should have raised, but ranks {raised} did")
    places = {len(seen[rank].lines) for rank in raised if rank != chaos.rank}
    if places and max(places) - min(places) > 1:
        problems.append(f"the ranks raised in calls far apart: {[seen[rank].last['what'] for rank in raised]}")
    return problems


def judge_whole(seen: Sequence[Seen], outcomes: Sequence[Outcome]) -> list[str]:
    """Return what is wrong with ranks that all come to their end."""
    problems = [
        f"rank {rank} ended in {each.last}" for rank, each in enumerate(seen) if each.last["what"] != "shutdown"
    ]
    problems += [f"exit code {outcome.rc}" for outcome in outcomes if outcome.rc]
    states = {str(line["values"]) for each in seen if (line := each.find("parameters"))}
    return problems if len(states) <= 1 else [*problems, f"the ranks have drifted: {states}"]


def judge_error(cell: Cell, chaos: Chaos, fault: str, rank: int, last: Mapping[str, Any], at: float) -> list[str]:
    """Return what is wrong with the last line of a rank, where a fault came at this time and lasts."""
    where = f"rank {rank}, {last['what']}: "
    missing = [
        other for other in range(cell.size) if (cell.is_far(rank, other) if fault == "cut" else other == chaos.rank)
    ]
    problems = [] if last["is_ours"] else [f"{where}an error of others: {last['error']}"]
    if not any(re.search(rf"(\branks?|missing:) [\d,and \[]*\b{other}\b", last["error"]) for other in missing):
        problems.append(f"{where}does not name one of {missing}: {last['error']}")
    if (took := last["at"] - at) > TIMEOUT_S + GRACE_S:
        problems.append(f"{where}{took:.1f} s after the fault: {last['error']}")
    return problems


def try_seed(launch: Launch, cell: Cell, seed: int, port: int, hosts: Hosts | None = None) -> list[str]:
    """Run the program of a seed; return what is wrong, and how to repeat it."""
    chaos, fault = cell.draw(seed), cell.fault(seed)
    folder = launch.directory / f"{seed}"
    folder.mkdir()
    words = [str(seed), fault, str(folder), str(cell.size), str(RANKS_A_HOST if hosts else 0)]
    commands = cell.commands(words, port, hosts)
    with ExitStack() as stack:
        if hosts:
            stack.callback(hosts.connect, 0)
            stack.callback(hosts.connect, 1)
        jobs = [stack.enter_context(launch.start(argv, env=env)) for argv, env in commands]
        lasting = [job for rank, job in enumerate(jobs) if fault in BRIEF or rank != chaos.rank or len(jobs) == 1]
        outcomes = [job.wait(START_S + TIMEOUT_S + GRACE_S) for job in lasting]
        ended = time.monotonic()
    seen = [Seen.read(folder / f"rank-{rank}.jsonl") for rank in range(cell.size)]
    problems = judge(cell, chaos, fault, seen, outcomes)
    if any(outcome.timed_out or outcome.left for outcome in outcomes):
        problems.append("a process did not end")
    begun = seen[chaos.rank].find("fault")
    if begun and ended - begun["at"] > TIMEOUT_S + GRACE_S + END_S + (DELAY_S if fault in BRIEF else 0):
        problems.append(f"all ended {ended - begun['at']:.1f} s after the fault")
    if not problems:
        return []
    texts = [f"{line}" for each in seen for line in each.lines[-2:]]
    return [f"seed {seed}: {fault}, {chaos}", *(f"  {each}" for each in problems), *texts, *map(str, outcomes)]


def try_seeds(launch: Launch, cell: Cell, port: int, effort: Effort, hosts: Hosts | None = None) -> None:
    seeds = range(effort(SHORT, len(CALLS) * len(cell.faults)))
    first = CELLS.index(cell) * SHORT if cell in CELLS and not effort.is_long else 0  # each cell others, in CI
    problems = [line for seed in seeds for line in try_seed(launch, cell, first + seed, port, hosts)]
    if problems:
        pytest.fail("\n".join(problems))
    effort.count(f"faults in public calls, {cell}", len(seeds))


@pytest.mark.timeout(3 * len(CALLS) * (START_S + TIMEOUT_S + GRACE_S))
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_fault_at_any_moment_is_an_error_on_every_rank_or_changes_nothing(
    launch: Launch, free_port: int, cell: Cell, effort: Effort
) -> None:
    try_seeds(launch, cell, free_port, effort)


@pytest.mark.timeout(3 * len(CALLS) * (START_S + TIMEOUT_S + GRACE_S))
def test_a_cut_between_hosts_at_any_moment_is_an_error_on_every_rank_or_changes_nothing(
    launch: Launch, free_port: int, two_hosts: Hosts, effort: Effort
) -> None:
    try_seeds(launch, HOSTS, free_port, effort, two_hosts)
