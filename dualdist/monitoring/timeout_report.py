"""Timeout reports: the ranks that an operation waits for and their positions, in one format for all backends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualdist.errors import RendezvousError
from dualdist.monitoring.process_state import ENDED, NOT_RUNNING, Line, ProcessIdentity, format_stack, trim_stack
from dualdist.monitoring.rank_probe import ANSWER_S, ProbeResult, RankPosition, RankProbe
from dualdist.utils.deadline import call_within
from dualdist.utils.suggest import SHOWN, format_ranks

STORE_GONE = "the store of the job, which rank 0 or its launcher serves, does not answer"
UNKNOWN_STATE = "exited, stopped, or in C code that holds the GIL"
# Ranks that arrive within so many seconds count as having arrived together.
TOGETHER_S = 1.0
# Seconds in which all ranks must have printed the report.
PRINT_ALL_S = 3.0


@dataclass(frozen=True)
class SilentRank:
    """A rank that does not answer: state and stack of its process, if it is on this host."""

    rank: int
    state: str = ""
    stack: tuple[Line, ...] = ()
    pid: int = 0


def inspect_silent(ranks: Sequence[int], processes: Sequence[ProcessIdentity | None]) -> list[SilentRank]:
    """Inspect the processes of ranks that do not answer."""
    found = []
    for number, rank in enumerate(ranks):
        process = processes[rank]
        if process is None or number >= SHOWN:
            found.append(SilentRank(rank))
            continue
        stack = tuple(trim_stack(process.stack(), is_in_operation=False))
        found.append(SilentRank(rank, process.state(), stack, process.pid))
    return found


def report_timeout(probe: RankProbe, ranks: Sequence[int], what: str, reason: str) -> str:
    """Return the error message of an operation of these ranks, once every rank of the job has printed it."""
    try:
        result = call_within(2 * ANSWER_S, probe.query, lambda: RendezvousError("no answer"))
    except (RendezvousError, TimeoutError):
        processes = {rank: probe.processes[rank] for rank in ranks}
        stopped = [rank for rank, each in processes.items() if each is not None and each.state() in NOT_RUNNING]
        return format_report(what, reason, [], inspect_silent(stopped, probe.processes), is_store_there=False)
    missing = [rank for rank in ranks if rank not in result.answered()]
    positions = _positions_of(result, ranks)
    text = format_report(what, reason, positions, inspect_silent(missing, probe.processes))
    late = [*missing, *(rank for position in _elsewhere(what, positions) for rank in position.seconds)]
    with contextlib.suppress(RendezvousError, TimeoutError):  # the store has gone since
        call_within(PRINT_ALL_S, lambda: probe.broadcast(result, text, late), lambda: RendezvousError("no answer"))
    return text


def find_lost_ranks(probe: RankProbe, ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose processes have exited, or else those that do not answer."""
    processes = {rank: probe.processes[rank] for rank in ranks}
    exited = [rank for rank, process in processes.items() if process is not None and process.state() == ENDED]
    with contextlib.suppress(RendezvousError, TimeoutError):
        return exited or find_silent_ranks(probe, ranks)
    return []


def find_silent_ranks(probe: RankProbe, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that do not answer; raise RendezvousError if the store is gone."""
    result = call_within(2 * ANSWER_S, probe.query, lambda: RendezvousError(STORE_GONE))
    return [rank for rank in ranks if rank not in result.answered()]


def format_report(
    what: str,
    reason: str,
    positions: Sequence[RankPosition],
    silent: Sequence[SilentRank],
    *,
    is_store_there: bool = True,
) -> str:
    """Return one line with the missing ranks, their positions and since when, followed by their stacks."""
    elsewhere = _elsewhere(what, positions)
    clauses = [f"{what}: {reason}", *([] if is_store_there else [STORE_GONE]), *_silent_clauses(silent)]
    for location in dict.fromkeys(position.location for position in elsewhere):
        clauses.append(_late_clause(location, [each for each in elsewhere if each.location == location]))
    if not silent and not elsewhere:
        clauses.append(_arrival_order(positions) if is_store_there else "see rank 0's last output")
    stacks = [(sorted(each.seconds), each.stack) for each in elsewhere]
    stacks += [([each.rank], each.stack) for each in silent]
    blocks = [f"\n  Stack of {format_ranks(who)}:{format_stack(stack)}" for who, stack in stacks[:SHOWN] if stack]
    return "; ".join(clauses) + "".join(blocks)


def _elsewhere(what: str, positions: Sequence[RankPosition]) -> list[RankPosition]:
    return [position for position in positions if position.location != f"in {what}"]


def _silent_clauses(silent: Sequence[SilentRank]) -> list[str]:
    unknown = [one.rank for one in silent if not one.state]
    clauses = [f"no answer from rank {one.rank}: its process {one.pid} {one.state}" for one in silent if one.state]
    return [*clauses, *([f"no answer from {format_ranks(unknown)}: {UNKNOWN_STATE}"] if unknown else [])]


def _late_clause(location: str, positions: Sequence[RankPosition]) -> str:
    """Return e.g. "rank 3 did not arrive: in the program, outside any operation, for 7 s, at train.py:41"."""
    seconds = {rank: s for position in positions for rank, s in position.seconds.items()}
    lines = dict.fromkeys(f"{file}:{number}" for each in positions for file, number, _ in each.stack[-1:])
    at = f", at {' and '.join(list(lines)[:2])}" if lines else ""
    return f"{format_ranks(sorted(seconds))} did not arrive: {location}, for {_format_span(seconds.values())}{at}"


def _arrival_order(positions: Sequence[RankPosition]) -> str:
    """Return which ranks arrived last, where all did."""
    seconds = {rank: s for position in positions for rank, s in position.seconds.items()}
    if not seconds:
        return "no rank reported its position"
    most, least = max(seconds.values()), min(seconds.values())
    if most - least < TOGETHER_S:
        return "all ranks are in this operation"
    late = sorted(rank for rank, s in seconds.items() if s < least + TOGETHER_S)
    return f"{format_ranks(late)} arrived {most - least:.0f} s after the first"


def _format_span(seconds: Iterable[float]) -> str:
    rounded = sorted({round(s) for s in seconds})
    return f"{rounded[0]} s" if len(rounded) == 1 else f"{rounded[0]} to {rounded[-1]} s"


def _positions_of(result: ProbeResult, ranks: Sequence[int]) -> list[RankPosition]:
    """Return the positions of `ranks` alone."""
    found = []
    for position in result.positions:
        seconds = {rank: position.seconds[rank] for rank in ranks if rank in position.seconds}
        if seconds:
            found.append(RankPosition(position.location, position.stack, seconds))
    return found
