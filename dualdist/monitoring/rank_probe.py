"""Where every rank is: asked when an operation fails, answered by a thread of every rank, and heard by all of them.

Note [one question]: many ranks give up at the same moment. The first to ask reads the answers and passes them on to the
others who ask; whoever asks prints what came out, and so does every other rank, before any of them raises an error:
launchers kill all as soon as the first one ends.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dualdist.backends.base import Store
from dualdist.errors import RendezvousError
from dualdist.monitoring.process_state import OUR_THREADS, Line, ProcessIdentity, program_thread, thread_stack
from dualdist.utils.deadline import Deadline

# Seconds between two looks whether somebody asks, and while an answer is to be heard.
LOOK_S, LOOK_SOON_S = 1.0, 0.1
# Seconds in which every rank that can has answered, and in which all have heard what came out.
ANSWER_S = 2.5
HEARD_S = 1.5
IN_PROGRAM = "in the program, outside of any operation"


@dataclass(frozen=True)
class RankPosition:
    """Ranks that are at one place of the program, with the seconds for which each has been there."""

    location: str
    stack: tuple[Line, ...]
    seconds: dict[int, float]


@dataclass(frozen=True)
class ProbeResult:
    """What came of a question: where those are that have answered."""

    number: int
    positions: tuple[RankPosition, ...]

    def answered(self) -> set[int]:
        return {rank for where in self.positions for rank in where.seconds}


class RankProbe:
    """Answers, in a thread, where this rank is; asks, when told to, where the others are.

    `processes` are those of all ranks, None of the ranks on other hosts. Where others have given up on this rank, its
    process ends when it has stayed away for `timeout_s` more: by then nobody waits for it in any new session either.
    """

    def __init__(
        self, store: Store, rank: int, key: str, processes: Sequence[ProcessIdentity | None], timeout_s: float
    ) -> None:
        self.rank = rank
        self.processes = processes
        self._store = store
        self._key = key
        self._timeout_s = timeout_s
        self._places: dict[int, tuple[object, float]] = {}  # by thread; the last one entered is told
        self._back_since = time.monotonic()
        self._last_thread: int | None = None
        self._answered = 0  # questions
        self._asked: set[int] = set()
        self._unheard: dict[int, Deadline] = {}
        self._given_up: tuple[float, Deadline] | None = None  # when this rank had come back last, and when it ends
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, name=f"{OUR_THREADS}rank-probe", daemon=True)
        self._thread.start()
        # A thread that the interpreter ends inside the store's C++ code aborts the process, so it must be out before.
        atexit.register(self._close_at_exit)

    def enter(self, operation: object) -> tuple[object, float] | None:
        """This thread waits in an operation from now on; returns where it was, for leave()."""
        thread = threading.get_ident()
        before = self._places.get(thread)
        self._places[thread] = operation, time.monotonic()
        return before

    def leave(self, before: tuple[object, float] | None) -> None:
        """This thread is where it was before: in another operation, or in the program."""
        thread = threading.get_ident()
        if before is not None:
            self._places[thread] = before
            return
        self._places.pop(thread, None)
        self._last_thread = thread
        self._back_since = time.monotonic()

    def query(self) -> ProbeResult:
        """Where the ranks are that answer; RendezvousError where the store is gone."""
        number = self._answered + 1  # all ranks count alike, but for a question that one has not seen yet
        self._asked.add(number)
        is_first = self._store.add(self._name("claim", number), 1) == 1
        self._store.set(self._name("question", number), "")
        answers = self._name("answers", number)
        # A store does one thing at a time: one that waits for a key would keep this rank's thread from answering.
        deadline = Deadline(0 if is_first else ANSWER_S + 0.5)
        while not deadline.passed():
            if self._store.has(answers):
                return _loads(number, self._store.get(answers, 1.0))
            deadline.sleep(LOOK_SOON_S)
        said = self._collected(number, Deadline(ANSWER_S if is_first else 0.1))  # whoever was first has ended since
        self._store.set(answers, json.dumps([[where.location, where.stack, where.seconds] for where in said]))
        return ProbeResult(number, said)

    def _collected(self, number: int, deadline: Deadline) -> tuple[RankPosition, ...]:
        size, count = len(self.processes), self._name("replies", number)
        while self._store.add(count, 0) < size and not deadline.passed():
            deadline.sleep(LOOK_SOON_S)
        found: dict[tuple[str, tuple[Line, ...]], dict[int, float]] = {}
        for rank in range(size):
            reply = self._name(f"reply/{rank}", number)
            if self._store.has(reply):
                place, seconds, stack = json.loads(self._store.get(reply, 1.0))
                found.setdefault((place, _as_lines(stack)), {})[rank] = seconds
        return tuple(RankPosition(place, stack, seconds) for (place, stack), seconds in found.items())

    def broadcast(self, result: ProbeResult, text: str, late: Sequence[int]) -> None:
        """All ranks that can print the text; returns when they have. `late` are those that are waited for."""
        number, heard = result.number, self._name("heard", result.number)
        _print(self.rank, text)
        if self._store.add(self._name("tells", number), 1) == 1:
            self._store.set(self._name("text", number), json.dumps([self.rank, text, list(late)]))
        self._store.add(heard, 1)
        deadline = Deadline(HEARD_S)
        while self._store.add(heard, 0) < len(result.answered()) and not deadline.passed():
            deadline.sleep(LOOK_SOON_S / 2)

    def close(self) -> None:
        """Answer no more. Where the store is slow, the thread still hears its last answer afterwards."""
        self._stop.set()
        self._thread.join(ANSWER_S)
        if not self._thread.is_alive():
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        self.close()
        if self._thread.is_alive():
            self._store.disconnect()
            self._thread.join(ANSWER_S)

    def _answer(self) -> None:
        try:
            while not self._stop.wait(LOOK_SOON_S if self._unheard else LOOK_S):
                while self._store.has(self._name("question", self._answered + 1)):
                    self._reply(self._answered + 1)
                for number in list(self._unheard):
                    self._hear(number)
                self._end_where_nobody_waits()
        except (RendezvousError, TimeoutError):
            # The process that served the store has ended; whoever waits learns it from the operation.
            while self._given_up is not None and not self._stop.wait(LOOK_S):
                self._end_where_nobody_waits()

    def _reply(self, number: int) -> None:
        entered = list(self._places.items())
        if entered:
            thread, (operation, since) = entered[-1]
            place = f"in {operation}"
        else:
            thread, since, place = self._last_thread or 0, self._back_since, IN_PROGRAM
        stack = thread_stack(program_thread(thread), is_in_operation=bool(entered))
        said = json.dumps([place, time.monotonic() - since, stack])
        self._store.set(self._name(f"reply/{self.rank}", number), said)
        self._unheard[number] = Deadline(2 * ANSWER_S + HEARD_S)
        self._answered = number
        self._store.add(self._name("replies", number), 1)

    def _hear(self, number: int) -> None:
        """Print what came of a question, unless this rank's program has asked it, too, and does so itself."""
        is_there = self._store.has(self._name("text", number))
        if is_there:
            asker, text, late = json.loads(self._store.get(self._name("text", number), 1.0))
            if number not in self._asked:
                _print(asker, text)
                self._store.add(self._name("heard", number), 1)
            if self.rank in late and not self._places:
                self._given_up = self._back_since, Deadline(self._timeout_s)
        if is_there or self._unheard[number].passed():
            del self._unheard[number]

    def _end_where_nobody_waits(self) -> None:
        """End this process where its program never comes back, and no launcher has ended it."""
        if self._given_up is None:
            return
        since, deadline = self._given_up
        if self._places or since != self._back_since:
            self._given_up = None
        elif deadline.passed():
            print(
                f"dualdist: rank {self.rank} has not come back for another {self._timeout_s:g} s, and nobody waits for "
                "it any more: this process ends",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def _name(self, what: str, number: int) -> str:
        return f"{self._key}/{what}/{number}"


def _print(asker: int, text: str) -> None:
    sys.stderr.write(f"dualdist: rank {asker} gives up: {text}\n")  # in one piece
    sys.stderr.flush()


def _as_lines(stack: Sequence[Sequence[object]]) -> tuple[Line, ...]:
    return tuple((str(file), int(str(number)), str(name)) for file, number, name in stack)


def _loads(number: int, text: str) -> ProbeResult:
    positions = json.loads(text)
    return ProbeResult(
        number,
        tuple(
            RankPosition(place, _as_lines(stack), {int(rank): float(s) for rank, s in seconds.items()})
            for place, stack, seconds in positions
        ),
    )
