"""A rank that is interrupted in an operation, at any line or in a wait: right numbers, or an error on every rank.

What is wrong is listed by the seed of its placement; interrupted_rank.py repeats one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faults import interrupted_rank
from faults.interrupted_rank import CLOSE_S, OPEN_S, plan
from faults.interrupts import Outcome, Placement, Report, draw, judge, names
from faults.starts import LOOPBACK, PYTHON, Cell
from harness.effort import Effort
from harness.installed import lack
from harness.jobs import REPORT_DIR, Launch
from harness.jobs import Outcome as Ended

PROGRAM = interrupted_rank.__file__
SHORT, FULL, LONG = 8, 10, 300
START_S = 60.0
# On the average, of a placement: two sessions, and a timeout in each second one.
PLACEMENT_S = 10.0
# Ranks that hang or are ended by an interrupt are started again for the next placements, so often.
STARTS = 4
HOSTS, RANKS_A_HOST = 2, 2
ON_HOST = 'hostname "$0" && exec "$@"'


@dataclass(frozen=True)
class Ranks:
    """How the ranks start, and by which face of dualdist they communicate; `cell` is None for ranks on two hosts."""

    cell: Cell | None
    face: str = "dd"

    @property
    def size(self) -> int:
        return 2 if self.cell else HOSTS * RANKS_A_HOST

    def __str__(self) -> str:
        return f"{self.cell or 'hosts-native-gloo'}{'' if self.face == 'dd' else f'-{self.face}'}"

    def run(self, launch: Launch, port: int, words: Sequence[str], reports: str, timeout_s: float) -> list[Ended]:
        """Run the program on all ranks to its end, or to the time limit."""
        with ExitStack() as stack:
            jobs = [
                stack.enter_context(launch.start(argv, env={REPORT_DIR: reports, **env}))
                for argv, env in self.commands(words, port)
            ]
            return [job.wait(timeout_s) for job in jobs]

    def commands(self, words: Sequence[str], port: int) -> list[tuple[list[str], Mapping[str, str]]]:
        """Return the commands that are run at the same time, with their variables."""
        words = [*words, "--face", self.face]
        if self.cell:
            return [(self.cell.argv(PROGRAM, *words), self.cell.env)]
        argv = [*PYTHON, PROGRAM, "native", *words]
        return [(on_host(rank, argv), host_env(rank, port)) for rank in range(self.size)]


def on_host(rank: int, argv: Sequence[str]) -> list[str]:
    return ["unshare", "--uts", "sh", "-c", ON_HOST, f"host{rank // RANKS_A_HOST}", *argv]


def host_env(rank: int, port: int) -> Mapping[str, str]:
    """Return the variables of a rank that a person starts."""
    numbers = {
        "RANK": rank,
        "SIZE": HOSTS * RANKS_A_HOST,
        "LOCAL_RANK": rank % RANKS_A_HOST,
        "LOCAL_SIZE": RANKS_A_HOST,
        "NODE_RANK": rank // RANKS_A_HOST,
        "NUM_NODES": HOSTS,
        "ADDRESS": LOOPBACK,
        "PORT": port,
    }
    return {"GLOO_SOCKET_IFNAME": "lo", **{f"DUALDIST_{name}": str(value) for name, value in numbers.items()}}


SHM = Cell("torchrun", "native", "shm")
CELLS = [
    Ranks(SHM),
    Ranks(Cell("torchrun", "native", "gloo")),
    Ranks(Cell("mpirun", "mpi", "mpi")),
    Ranks(Cell("torchrun", "horovod", "gloo")),
    Ranks(None),
    Ranks(SHM, "hvd"),
    Ranks(SHM, "torch"),
]


@dataclass
class Tried:
    """The placements that ended with a verdict, and what was wrong."""

    count: int = 0
    problems: list[str] = field(default_factory=list)


def try_all(launch: Launch, ranks: Ranks, port: int, seed: int, count: int, *, regressions: bool = False) -> Tried:
    """Run the placements of these seeds; start the ranks again after one in which they ended or hung."""
    if ranks.cell is None:
        require_hosts()
    placements = plan(seed, count, ranks.size, ranks.face, with_regressions=regressions)
    words = ["--seed", str(seed), "--count", str(count), *(["--regressions"] if regressions else [])]
    tried, done = Tried(), 0
    for _ in range(STARTS):
        with tempfile.TemporaryDirectory(prefix="reports-", dir=launch.directory) as folder:
            limit_s = START_S + PLACEMENT_S * (len(placements) - done) + OPEN_S + CLOSE_S
            ended = ranks.run(launch, port, [*words, "--skip", str(done)], folder, limit_s)
            files = sorted(Path(folder).glob("verdict-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
            found = [json.loads(path.read_text()) for path in files]
        output = "\n".join(map(str, ended))
        tried.count += len(found)
        tried.problems += [verdict["text"] for verdict in found if not verdict["is_right"]]
        assert not any(each.left for each in ended), output
        done += len(found)
        if done == len(placements):
            if not tried.problems:
                assert all(each.rc == 0 and not each.timed_out for each in ended), output
            return tried
        if not any(verdict["is_last"] for verdict in found):
            tried.problems.append(f"{placements[done]}\n  PROBLEM: the ranks ended or hung\n{output}")
            done += 1
        if done == len(placements):
            return tried
    tried.problems.append(f"{len(placements) - done} placements were not tried, after {STARTS} starts")
    return tried


def require_hosts() -> None:
    if shutil.which("unshare") is None:
        lack("unshare", "util-linux")
    if os.geteuid() != 0:
        pytest.skip("a host name of its own needs root")


def assert_right(tried: Tried, ranks: Ranks, effort: Effort) -> None:
    """Fail with all that was wrong, and how a placement is repeated."""
    again = [
        shlex.join(["env", "PYTHONPATH=.:tests", *(f"{name}={value}" for name, value in env.items()), *argv])
        for argv, env in ranks.commands(["--seed", "N", "--only"], port=23456)
    ]
    if tried.problems:
        pytest.fail("\n".join([*tried.problems, "again, in the repository:", " & ".join(again)]))
    effort.count(f"interrupts in operations, {ranks}", tried.count)


@pytest.mark.smoke
def test_an_interrupt_leaves_right_numbers_or_an_error_on_every_rank(
    launch: Launch, free_port: int, effort: Effort
) -> None:
    """The cases that failed once, and a few drawn ones; the others are in `make test-all`."""
    ranks = CELLS[0]
    assert_right(try_all(launch, ranks, free_port, 1000, SHORT, regressions=True), ranks, effort)


@pytest.mark.timeout(4 * LONG * PLACEMENT_S)
@pytest.mark.parametrize("ranks", CELLS, ids=str)
def test_interrupts_at_any_line_leave_right_numbers_or_an_error_on_every_rank(
    launch: Launch, free_port: int, ranks: Ranks, effort: Effort
) -> None:
    tried = try_all(launch, ranks, free_port, 0, effort(FULL, LONG), regressions=ranks.face == "dd")
    assert_right(tried, ranks, effort)


RIGHT = Outcome("op", "right", "", 0.1)
LATE = "CollectiveTimeoutError: allreduce 'op': not all ranks arrived within 8 s; rank 2 did not arrive"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ([("interrupted", ""), ("right", "")], []),
        ([("error", "CollectiveError: rank 0"), ("error", "CollectiveError: rank 0 left 'op'")], []),
        ([("error", "CollectiveError: rank 0"), ("error", LATE)], []),
        ([("error", "CollectiveError: rank 0"), ("right", "")], ["ranks [0] raised, ranks [1] did not"]),
        ([("error", "CollectiveError"), ("error", "CollectiveError")], ["does not name rank 0"]),
        ([("interrupted", ""), ("wrong", "1 of 2 differ")], ["rank 1, op: wrong: 1 of 2 differ"]),
        ([("interrupted", ""), ("other", "RuntimeError")], ["rank 1, op: other"]),
        ([("right", ""), ("interrupted", "")], ["rank 1, op: interrupted"]),
    ],
)
def test_a_placement_is_right_or_an_error_everywhere(outcomes: list[tuple[str, str]], words: list[str]) -> None:
    placement = Placement("seed 0", "barrier")
    reports = [Report([Outcome("op", *each, 0.1)], 0.1, position="line 1") for each in outcomes]  # type: ignore[arg-type]
    problems = judge(placement, reports)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


@pytest.mark.smoke
def test_other_parameters_late_ends_and_errors_without_an_interrupt_are_found() -> None:
    placement = Placement("seed 0", "training")
    good = Report([RIGHT], 0.1, position="line 1", state="a")
    other = Report([RIGHT], placement.limit_s + 1, position="line 1", closing="OSError", state="b", is_expected=False)
    found = judge(placement, [good, other])
    words = ("shutdown", "took 14.0 s", "different parameters", "not those of one process")
    assert [word in problem for word, problem in zip(words, found, strict=True)] == [True] * 4
    errors = Report([Outcome("op", "error", "rank 0", 0.1)], 0.1)
    assert judge(placement, [errors, errors]) == ["ranks [0, 1] raised, but nothing was interrupted"]
    assert not names("rank 10 left", 1)
    assert names("ranks 0, 2 and 1 left", 1)


@pytest.mark.smoke
def test_seeds_in_a_row_go_through_all_operations() -> None:
    for face, operations in interrupted_rank.OPERATIONS.items():
        assert {draw(seed, 2, face).operation for seed in range(len(operations))} == {*operations}
        assert draw(7, 4, face) == draw(7, 4, face)
