"""Rank probe: when an operation fails or times out, ask every rank for its position, and name those that are missing.

Note [one question]: many ranks time out at the same moment. The first one collects the answers and shares them with
the others. Every rank prints the report before any rank raises, since launchers kill all once the first one exits.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from dualdist.backends.base import Store
from dualdist.errors import CollectiveError, RendezvousError
from dualdist.liveness.process_state import (
    ENDED,
    NOT_RUNNING,
    OUR_THREADS,
    Line,
    ProcessIdentity,
    format_stack,
    is_main_thread_asleep,
    program_thread,
    thread_stack,
)
from dualdist.utils.deadline import Deadline, call_within
from dualdist.utils.suggest import SHOWN, format_ranks

T = TypeVar("T")
OnFailure = Callable[[CollectiveError], None]
# Seconds between two polls for a question, and between two polls for a report that is expected.
POLL_S, POLL_SOON_S = 1.0, 0.1
# Seconds in which every responsive rank answers, and in which all have printed the report.
ANSWER_S = 2.5
PRINT_S = 1.5
# Seconds that a question to all ranks may take, and that a request may take to a store that was late before.
QUERY_S, LATE_S = ANSWER_S + 0.7, 0.1
IN_PROGRAM = "in the program, outside any operation"
STORE_GONE = "the store of the job, which rank 0 or its launcher serves, does not answer"
UNKNOWN_STATE = "exited, stopped, or in C code that holds the GIL"
# Ranks that arrive within so many seconds count as having arrived together.
TOGETHER_S = 1.0
# Seconds in which all ranks must have printed the report.
PRINT_ALL_S = 3.0
# The scope of messages that ask all ranks for a report.
REPORT = "report"


@dataclass(frozen=True)
class RankPosition:
    """Ranks at one location of the program, with the seconds for which each has been there."""

    location: str
    stack: Sequence[Line]
    seconds: dict[int, float]


@dataclass(frozen=True)
class ProbeResult:
    """The positions of the ranks that answered a question."""

    number: int
    positions: tuple[RankPosition, ...]

    def answered(self) -> set[int]:
        return {rank for position in self.positions for rank in position.seconds}


class HasOperations(Protocol):
    """A channel, whose operations another thread may wait for than the one that began them."""

    def under_way(self) -> object | None: ...


class RankProbe:
    """Answers other ranks' questions about this rank's position in a thread, and asks for theirs.

    `processes` are those of all ranks, None for ranks on other hosts. If other ranks timed out waiting for this rank,
    its process exits when it has not called an operation for another `timeout_s`.
    """

    def __init__(
        self, store: Store, rank: int, key: str, processes: Sequence[ProcessIdentity | None], timeout_s: float
    ) -> None:
        self.rank = rank
        self.processes = processes
        self._store = store
        self._key = key
        self._timeout_s = timeout_s
        self.channels: list[weakref.ref[HasOperations]] = []
        self._operations: dict[int, tuple[object, float]] = {}  # by thread; the last one entered is reported
        self._returned_at = time.monotonic()
        self._last_thread: int | None = None
        self._answered = 0  # questions
        self._asked: set[int] = set()
        self._unprinted: dict[int, Deadline] = {}
        self._abandoned: tuple[float, Deadline] | None = None  # when it had last returned, and when it exits
        self._failures: dict[str, str] = {}  # reported by other ranks, by scope
        self._num_failures = 0  # failures that have been read
        self._failure_lock = threading.Lock()
        self._is_store_late = False
        self._on_failure: dict[str, weakref.WeakMethod[OnFailure]] = {}
        # Called with the seconds to report about, and the function that takes the report, when another rank asks.
        self.on_report_wanted: Callable[[float, Callable[[str], None]], None] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{OUR_THREADS}rank-probe", daemon=True)
        self._thread.start()
        # A thread that the interpreter ends inside the store's C++ code aborts the process, so stop it before.
        atexit.register(self.close)

    def enter(self, operation: object) -> tuple[object, float] | None:
        """Record that this thread is in `operation`; return its previous position for leave()."""
        thread = threading.get_ident()
        previous = self._operations.get(thread)
        self._operations[thread] = operation, time.monotonic()
        return previous

    def leave(self, previous: tuple[object, float] | None) -> None:
        """Return this thread to its previous position: an outer operation, or the program."""
        thread = threading.get_ident()
        if previous is not None:
            self._operations[thread] = previous
            return
        self._operations.pop(thread, None)
        self._last_thread = thread
        self._returned_at = time.monotonic()

    def awaited(self) -> str:
        """Return the operation that the program waits for, or "".

        DDP waits in C++ for futures of operations that the progress thread ends: then the main thread sleeps meanwhile.
        """
        entered = list(self._operations.values())
        if entered:
            return str(entered[-1][0])
        channels = [channel for each in self.channels if (channel := each()) is not None]
        under_way = [what for channel in channels if (what := channel.under_way()) is not None]
        return str(under_way[0]) if under_way and is_main_thread_asleep() else ""

    def add_channel(self, channel: HasOperations) -> None:
        """Know the operations of a channel while it exists."""
        self.channels = [*(each for each in self.channels if each() is not None), weakref.ref(channel)]

    def position(self) -> tuple[str, float, list[Line]]:
        """Return the operation that a thread entered last, or "", since when this rank is there, and the stack."""
        entered = list(self._operations.items())
        if not entered:
            stack = thread_stack(program_thread(self._last_thread), is_in_operation=False)
            return "", self._returned_at, stack
        thread, (operation, since) = entered[-1]
        return str(operation), since, thread_stack(program_thread(thread), is_in_operation=True)

    def report_failure(self, scope: str, cause: str) -> None:
        """Let the other ranks know that this one takes part in no further operation of a scope, and why."""
        with contextlib.suppress(RendezvousError, TimeoutError):
            self.ask_store(ANSWER_S, lambda: self._send_to_all(scope, cause))

    def _send_to_all(self, scope: str, text: str) -> int:
        """Send a message that all ranks read within POLL_S, and return its number."""
        number = self._store.add(f"{self._key}/failures", 1)
        self._store.set(self._name("failure", number), json.dumps([self.rank, scope, text]))
        return number

    def collect_reports(self, seconds: float, ranks: Sequence[int], stop: threading.Event) -> dict[int, str]:
        """Return what these ranks' on_report_wanted() reports about the next seconds, without those that are late."""
        found: dict[int, str] = {}
        number, deadline = self._send_to_all(REPORT, str(seconds)), Deadline(POLL_S + seconds + ANSWER_S)
        while len(found) < len(ranks) and not deadline.passed() and not stop.wait(POLL_SOON_S):
            for rank in ranks:
                if rank not in found and self._store.has(self._name(REPORT, rank)):
                    answered, _, text = self._store.get(self._name(REPORT, rank), 1.0).partition(" ")
                    if int(answered) >= number:
                        found[rank] = text
        return found

    def ask_store(self, seconds: float, ask: Callable[[], T]) -> T:
        """Return ask(), which uses the store; raise RendezvousError if it takes longer.

        The store may be a stopped rank's: once it was late, only a moment is waited for it.
        """
        try:
            limit_s = LATE_S if self._is_store_late else seconds
            return call_within(limit_s, ask, lambda: RendezvousError(STORE_GONE))
        except RendezvousError:
            self._is_store_late = True
            raise

    def watch_failures(self, scope: str, on_failure: OnFailure) -> None:
        """Call a method with the failure of another rank in a scope; it is not kept alive for that."""
        self._on_failure[scope] = weakref.WeakMethod(on_failure)
        if scope in self._failures:  # it was reported before this call
            self._pass_on(scope)

    def find_failure(self, scope: str) -> str | None:
        """Return the failure that another rank has reported in a scope, or None; asks the store."""
        with contextlib.suppress(RendezvousError, TimeoutError):
            self.ask_store(ANSWER_S, self._read_failures)
        return self._failures.get(scope)

    def _read_failures(self) -> None:
        wanted: tuple[int, float] | None = None  # of several requests, as after SIGCONT, the last is answered
        with self._failure_lock:
            while self._store.has(self._name("failure", self._num_failures + 1)):
                self._num_failures += 1
                rank, scope, cause = json.loads(self._store.get(self._name("failure", self._num_failures), 1.0))
                if rank == self.rank:
                    continue
                if scope == REPORT:
                    wanted = self._num_failures, float(cause)
                    continue
                self._failures.setdefault(scope, f"rank {rank} gave up: {cause}")
                self._pass_on(scope)
        if wanted is not None and self.on_report_wanted is not None:
            number, seconds = wanted
            key = self._name(REPORT, self.rank)  # one for all numbers, so that the store does not grow
            self.on_report_wanted(seconds, lambda text: self._store.set(key, f"{number} {text}"))

    def _pass_on(self, scope: str) -> None:
        """Call the method that waits for a failure of the scope, if there is one."""
        method = self._on_failure.get(scope)
        if method is not None and (on_failure := method()) is not None:
            error = CollectiveError(self._failures[scope])
            error.names_operation = True
            on_failure(error)

    def query(self) -> ProbeResult:
        """Return the positions of all ranks that answer; raise RendezvousError if the store is gone."""
        number = self._answered + 1  # the same on all ranks, except for a question that one has not seen yet
        self._asked.add(number)
        is_first = self._store.add(self._name("claim", number), 1) == 1
        self._store.set(self._name("question", number), "")
        answers = self._name("answers", number)
        # Polled: a store handles one request at a time; a blocking get would keep this rank's thread from answering.
        deadline = Deadline(0 if is_first else ANSWER_S + 0.5)
        while not deadline.passed():
            if self._store.has(answers):
                return _parse_result(number, self._store.get(answers, 1.0))
            deadline.sleep(POLL_SOON_S)
        text = self._collect(number, Deadline(ANSWER_S if is_first else 0.1))  # the first one has exited since
        self._store.set(answers, text)
        return _parse_result(number, text)

    def _collect(self, number: int, deadline: Deadline) -> str:
        """Return each position that ranks replied, with its ranks and their seconds, as _parse_result() takes it."""
        size, count = len(self.processes), self._name("replies", number)
        while self._store.add(count, 0) < size and not deadline.passed():
            deadline.sleep(POLL_SOON_S)
        found = defaultdict[str, dict[int, float]](dict)
        for rank in range(size):
            reply = self._name(f"reply/{rank}", number)
            if self._store.has(reply):
                seconds, _, position = self._store.get(reply, 1.0).partition(" ")
                found[position][rank] = float(seconds)
        return json.dumps(found)

    def broadcast(self, result: ProbeResult, text: str, late: Sequence[int]) -> None:
        """Print the text on all ranks that answered, and return when they have; `late` are the ranks waited for."""
        number, printed = result.number, self._name("printed", result.number)
        _print(self.rank, text)
        if self._store.add(self._name("reports", number), 1) == 1:
            self._store.set(self._name("text", number), json.dumps([self.rank, text, list(late)]))
        self._store.add(printed, 1)
        deadline = Deadline(PRINT_S)
        while self._store.add(printed, 0) < len(result.answered()) and not deadline.passed():
            deadline.sleep(POLL_SOON_S / 2)

    def close(self) -> None:
        """Stop answering. If the store is slow, the thread ends after its current request."""
        self._stop.set()
        self._thread.join(LATE_S if self._is_store_late else ANSWER_S)
        if not self._thread.is_alive():
            atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while not self._stop.wait(POLL_SOON_S if self._unprinted else POLL_S):
                while self._store.has(self._name("question", self._answered + 1)):
                    self._reply(self._answered + 1)
                self._read_failures()
                for number in list(self._unprinted):
                    self._print_report(number)
                self._exit_if_abandoned()
        except (RendezvousError, TimeoutError):
            # The process that served the store has exited; ranks that wait get that error from their operation.
            while self._abandoned is not None and not self._stop.wait(POLL_S):
                self._exit_if_abandoned()

    def _reply(self, number: int) -> None:
        operation, since, stack = self.position()
        location = f"in {operation}" if operation else IN_PROGRAM
        reply = f"{time.monotonic() - since} {json.dumps([location, stack])}"
        self._store.set(self._name(f"reply/{self.rank}", number), reply)
        self._unprinted[number] = Deadline(2 * ANSWER_S + PRINT_S)
        self._answered = number
        self._store.add(self._name("replies", number), 1)

    def _print_report(self, number: int) -> None:
        """Print a question's report, unless this rank asked it too and prints the report itself."""
        is_there = self._store.has(self._name("text", number))
        if is_there:
            asker, text, late = json.loads(self._store.get(self._name("text", number), 1.0))
            if number not in self._asked:
                _print(asker, text)
                self._store.add(self._name("printed", number), 1)
            if self.rank in late and not self._operations:
                self._abandoned = self._returned_at, Deadline(self._timeout_s)
        if is_there or self._unprinted[number].passed():
            del self._unprinted[number]

    def _exit_if_abandoned(self) -> None:
        """Exit if the program has not called an operation, and no launcher has killed it, since its peers timed out."""
        if self._abandoned is None:
            return
        returned_at, deadline = self._abandoned
        if self._operations or returned_at != self._returned_at:
            self._abandoned = None
        elif deadline.passed():
            print(
                f"dualdist: rank {self.rank} is unresponsive {self._timeout_s:g} s after its peers gave up; exiting",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def _name(self, what: str, number: int) -> str:
        return f"{self._key}/{what}/{number}"


def _print(asker: int, text: str) -> None:
    sys.stderr.write(f"dualdist: rank {asker} gives up: {text}\n")  # in one write
    sys.stderr.flush()


def _parse_result(number: int, text: str) -> ProbeResult:
    positions = []
    for position, seconds in json.loads(text).items():
        location, stack = json.loads(position)
        positions.append(RankPosition(location, stack, {int(rank): s for rank, s in seconds.items()}))
    return ProbeResult(number, tuple(positions))


def inspect_silent(ranks: Sequence[int], processes: Sequence[ProcessIdentity | None]) -> dict[int, str]:
    """Return what the process of each rank that does not answer is doing, "" if it is not on this host."""
    found = dict.fromkeys(ranks, "")
    for rank in ranks[:SHOWN]:
        process = processes[rank]
        if process is not None and (state := process.state()):
            found[rank] = f"its process {process.pid} {state}"
    return found


def describe_ended(processes: Sequence[ProcessIdentity | None]) -> str:
    """Return which ranks of this host do not run, and what happened to their processes, or ""."""
    states = [(rank, process, process.state()) for rank, process in enumerate(processes) if process is not None]
    return "; ".join(
        f"rank {rank}: its process {process.pid} {state}" for rank, process, state in states if state in NOT_RUNNING
    )


def report_timeout(probe: RankProbe, ranks: Sequence[int], what: str, reason: str) -> str:
    """Return the error message of an operation of these ranks, once every rank of the job has printed it."""
    try:
        result = probe.ask_store(QUERY_S, probe.query)
    except (RendezvousError, TimeoutError):
        stopped = _ranks_in(NOT_RUNNING, probe, ranks)
        return format_report(what, reason, [], inspect_silent(stopped, probe.processes), is_store_there=False)
    missing = [rank for rank in ranks if rank not in result.answered()]
    positions = [
        replace(each, seconds={rank: s for rank, s in each.seconds.items() if rank in ranks})
        for each in result.positions
        if not each.seconds.keys().isdisjoint(ranks)
    ]
    text = format_report(what, reason, positions, inspect_silent(missing, probe.processes))
    late = [*missing, *(rank for position in _elsewhere(what, positions) for rank in position.seconds)]
    with contextlib.suppress(RendezvousError, TimeoutError):  # the store has gone since
        probe.ask_store(PRINT_ALL_S, lambda: probe.broadcast(result, text, late))
    return text


def find_lost_ranks(probe: RankProbe, ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose processes have exited, or else those that do not answer."""
    try:
        return _ranks_in([ENDED], probe, ranks) or find_silent_ranks(probe, ranks)
    except (RendezvousError, TimeoutError):  # the store, too, which may be one of theirs
        return _ranks_in(NOT_RUNNING, probe, ranks)


def _ranks_in(states: Container[str], probe: RankProbe, ranks: Sequence[int]) -> list[int]:
    """Return the ranks of this host whose processes are in one of these states."""
    processes = {rank: probe.processes[rank] for rank in ranks}
    return [rank for rank, process in processes.items() if process is not None and process.state() in states]


def find_silent_ranks(probe: RankProbe, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that do not answer; raise RendezvousError if the store is gone."""
    result = probe.ask_store(QUERY_S, probe.query)
    return [rank for rank in ranks if rank not in result.answered()]


def format_report(
    what: str,
    reason: str,
    positions: Sequence[RankPosition],
    silent: Mapping[int, str],
    *,
    is_store_there: bool = True,
) -> str:
    """Return one line with the missing ranks, their positions and since when, followed by their stacks.

    `silent` says of ranks that do not answer what their processes are doing, "" where that is unknown.
    """
    elsewhere = _elsewhere(what, positions)
    clauses = [f"{what}: {reason}"]
    if not is_store_there:
        clauses.append(STORE_GONE)
    clauses += _silent_clauses(silent)
    for location in dict.fromkeys(position.location for position in elsewhere):
        clauses.append(_late_clause(location, [each for each in elsewhere if each.location == location]))
    if not silent and not elsewhere:
        clauses.append(_arrival_order(positions) if is_store_there else "see rank 0's last output")
    stacks = [(sorted(each.seconds), each.stack) for each in elsewhere]
    blocks = [f"\n  Stack of {format_ranks(who)}:{format_stack(stack)}" for who, stack in stacks[:SHOWN] if stack]
    return "; ".join(clauses) + "".join(blocks)


def _elsewhere(what: str, positions: Sequence[RankPosition]) -> list[RankPosition]:
    return [position for position in positions if position.location != f"in {what}"]


def _silent_clauses(silent: Mapping[int, str]) -> list[str]:
    unknown = [rank for rank, state in silent.items() if not state]
    clauses = [f"no answer from rank {rank}: {state}" for rank, state in silent.items() if state]
    if unknown:
        clauses.append(f"no answer from {format_ranks(unknown)}: {UNKNOWN_STATE}")
    return clauses


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
