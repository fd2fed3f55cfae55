"""Which ranks an operation waits for, in the words of its error: one format, whatever the backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualdist.errors import RendezvousError
from dualdist.monitoring import process_state as stacks
from dualdist.monitoring.process_state import ENDED, NOT_RUNNING, Line, ProcessIdentity
from dualdist.monitoring.rank_probe import ANSWER_S, ProbeResult, RankPosition, RankProbe
from dualdist.utils.deadline import call_within
from dualdist.utils.suggest import SHOWN, format_ranks

STORE_GONE = "the store of the job, which rank 0 or its launcher serves, does not answer"
UNSEEN = "ended, stopped, or in C code that keeps Python's lock"
# Seconds by which ranks that are all there have come one after the other, at most, to be told to have come together.
TOGETHER_S = 1.0
# Seconds in which all must have printed what came out.
TELL_S = 3.0


@dataclass(frozen=True)
class SilentRank:
    """A rank that does not answer: what its process does, and where, as far as its host shows it to this rank."""

    rank: int
    state: str = ""
    stack: tuple[Line, ...] = ()
    pid: int = 0


def inspect_silent(ranks: Sequence[int], processes: Sequence[ProcessIdentity | None]) -> list[SilentRank]:
    """What can be seen from here of ranks that do not answer."""
    found = []
    for number, rank in enumerate(ranks):
        process = processes[rank]
        if process is None or number >= SHOWN:
            found.append(SilentRank(rank))
            continue
        stack = process.stack()
        found.append(
            SilentRank(rank, process.state(), tuple(stacks.trim_stack(stack, is_in_operation=False)), process.pid)
        )
    return found


def find_exited(ranks: Sequence[int], processes: Sequence[ProcessIdentity | None]) -> list[int]:
    """Those whose processes have ended, as far as it can be seen from here."""
    found = []
    for rank in ranks:
        process = processes[rank]
        if process is not None and process.state() == ENDED:
            found.append(rank)
    return found


def report_timeout(probe: RankProbe, ranks: Sequence[int], what: str, reason: str) -> str:
    """The whole error of an operation of these ranks; every rank of the job has printed it on return."""
    try:
        called = call_within(2 * ANSWER_S, probe.query, lambda: RendezvousError("no answer"))
    except (RendezvousError, TimeoutError):
        return format_report(what, reason, [], _seen_amiss(probe, ranks), is_store_there=False)
    missing = [rank for rank in ranks if rank not in called.answered()]
    text = format_report(what, reason, _of(called, ranks), inspect_silent(missing, probe.processes))
    late = [*missing, *(rank for where in _elsewhere(what, _of(called, ranks)) for rank in where.seconds)]
    with contextlib.suppress(RendezvousError, TimeoutError):  # where the store has gone meanwhile
        call_within(TELL_S, lambda: probe.broadcast(called, text, late), lambda: RendezvousError("no answer"))
    return text


def find_lost_ranks(probe: RankProbe, ranks: Sequence[int]) -> list[int]:
    """The ranks whose processes have ended or do not answer."""
    found = find_exited(ranks, probe.processes)
    with contextlib.suppress(RendezvousError, TimeoutError):
        return found or find_silent_ranks(probe, ranks)
    return []


def find_silent_ranks(probe: RankProbe, ranks: Sequence[int]) -> list[int]:
    """Those that do not say where they are, wherever that may be; RendezvousError where nobody can be asked."""
    called = call_within(2 * ANSWER_S, probe.query, lambda: RendezvousError(STORE_GONE))
    return [rank for rank in ranks if rank not in called.answered()]


def format_report(
    what: str,
    reason: str,
    positions: Sequence[RankPosition],
    silent: Sequence[SilentRank],
    *,
    is_store_there: bool = True,
) -> str:
    """Who is missing and for how long, in one line, and below it where in the program they are."""
    elsewhere = _elsewhere(what, positions)
    clauses = [f"{what}: {reason}", *([] if is_store_there else [STORE_GONE]), *_of_silent(silent)]
    for place in dict.fromkeys(where.location for where in elsewhere):
        seconds = {rank: s for where in elsewhere if where.location == place for rank, s in where.seconds.items()}
        be = "is" if len(seconds) == 1 else "are"
        clauses.append(f"{format_ranks(sorted(seconds))} {be} {place}, for {_span(seconds.values())}")
    if not silent and not elsewhere:
        clauses.append(_order_of(positions) if is_store_there else "see what rank 0 printed last")
    shown = [*((where.seconds, where.stack) for where in elsewhere), *(([one.rank], one.stack) for one in silent)]
    blocks = [
        f"\n  Stack of {format_ranks(sorted(ranks))}:{stacks.format_stack(stack)}"
        for ranks, stack in shown[:SHOWN]
        if stack
    ]
    return "; ".join(clauses) + "".join(blocks)


def _elsewhere(what: str, positions: Sequence[RankPosition]) -> list[RankPosition]:
    return [where for where in positions if where.location != f"in {what}"]


def _of_silent(silent: Sequence[SilentRank]) -> list[str]:
    unseen = [one.rank for one in silent if not one.state]
    clauses = [f"no answer from rank {one.rank}: its process {one.pid} {one.state}" for one in silent if one.state]
    return [*clauses, *([f"no answer from {format_ranks(unseen)}: {UNSEEN}"] if unseen else [])]


def _order_of(positions: Sequence[RankPosition]) -> str:
    """Who of those that are all there has come last."""
    seconds = {rank: s for where in positions for rank, s in where.seconds.items()}
    if not seconds:
        return "no rank says where it is"
    most, least = max(seconds.values()), min(seconds.values())
    if most - least < TOGETHER_S:
        return "all ranks say that they are in this operation"
    late = sorted(rank for rank, s in seconds.items() if s < least + TOGETHER_S)
    return f"{format_ranks(late)} came {most - least:.0f} s after the first"


def _span(seconds: Iterable[float]) -> str:
    rounded = sorted({round(s) for s in seconds})
    return f"{rounded[0]} s" if len(rounded) == 1 else f"{rounded[0]} to {rounded[-1]} s"


def _seen_amiss(probe: RankProbe, ranks: Sequence[int]) -> list[SilentRank]:
    """Of ranks that cannot be asked, those of this host whose processes have ended, or are stopped."""
    silent = [
        rank for rank in ranks if (process := probe.processes[rank]) is not None and process.state() in NOT_RUNNING
    ]
    return inspect_silent(silent, probe.processes)


def _of(called: ProbeResult, ranks: Sequence[int]) -> list[RankPosition]:
    """Where these ranks are, those that share a place together."""
    found = []
    for where in called.positions:
        seconds = {rank: where.seconds[rank] for rank in ranks if rank in where.seconds}
        if seconds:
            found.append(RankPosition(where.location, where.stack, seconds))
    return found
