"""Who is missing: when an operation times out, the ranks say where they are, and the error names those that do not.

Every rank's thread looks once a second whether somebody asks; operations that succeed send nothing.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dualdist.backends.base import Backend, ReduceOp, Store, Work, describe
from dualdist.deadline import Deadline, call_within
from dualdist.errors import CollectiveTimeoutError, RendezvousError

if TYPE_CHECKING:
    import torch

LOOK_S = 1.0
ANSWER_S = 2.5
IN_PROGRAM = "in the program, outside of any operation"


class RollCall:
    """Answers, in a thread, where this rank is; asks, when told to, where all ranks are."""

    def __init__(self, store: Store, rank: int, size: int, key: str) -> None:
        self.rank = rank
        self.size = size
        self.place = IN_PROGRAM
        self.since = time.monotonic()
        self._store = store
        self._key = key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="dualdist-roll-call", daemon=True)
        self._thread.start()
        # A thread that the interpreter ends inside the store's C++ code aborts the process, so it must be out before.
        atexit.register(self.close)

    def enter(self, place: str) -> None:
        """This rank waits in an operation from now on."""
        self.place, self.since = place, time.monotonic()

    def leave(self) -> None:
        """This rank is back in the program."""
        self.place, self.since = IN_PROGRAM, time.monotonic()

    def ask(self) -> dict[int, str]:
        """Where each rank says it is, without the silent ones; RendezvousError where the store is gone."""
        number = self._store.add(f"{self._key}/questions", 1)
        self._store.set(self._question(number), "")
        deadline = Deadline(ANSWER_S)
        answers: dict[int, str] = {}
        while len(answers) < self.size and not deadline.passed():
            for rank in set(range(self.size)) - set(answers):
                if self._store.has(self._reply(number, rank)):
                    answers[rank] = self._store.get(self._reply(number, rank), 1.0)
            deadline.sleep(0.1)
        return answers

    def close(self) -> None:
        """Answer no more."""
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join(ANSWER_S)

    def _answer(self) -> None:
        number = 1
        while not self._stop.wait(LOOK_S):
            try:
                while self._store.has(self._question(number)):
                    self._store.set(
                        self._reply(number, self.rank), f"{self.place}, for {time.monotonic() - self.since:.0f} s"
                    )
                    number += 1
            except (RendezvousError, TimeoutError):
                return  # the process that served the store has ended; whoever waits learns it from the operation

    def _question(self, number: int) -> str:
        return f"{self._key}/question/{number}"

    def _reply(self, number: int, rank: int) -> str:
        return f"{self._key}/reply/{number}/{rank}"


class WatchedWork:
    """Work whose timeout names the ranks that are missing."""

    def __init__(self, work: Work, what: str, roll: RollCall) -> None:
        self._work = work
        self._what = what
        self._roll = roll

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> torch.Tensor:
        self._roll.enter(self._what)
        try:
            return self._work.wait()
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(f"{error}. {whereabouts(self._roll)}") from error.__cause__
        finally:
            self._roll.leave()


def whereabouts(roll: RollCall) -> str:
    """Where the other ranks are, in words, for an error on this one."""
    try:
        answers = call_within(2 * ANSWER_S, roll.ask, lambda: RendezvousError("no answer"))
    except (RendezvousError, TimeoutError):
        return "The store of the job, which rank 0 or its launcher serves, is gone too; see what rank 0 printed last"
    silent = [rank for rank in range(roll.size) if rank not in answers]
    elsewhere = [f"rank {rank} is {place}" for rank, place in answers.items() if not place.startswith(roll.place)]
    missing = f"No answer from rank {', '.join(map(str, silent))}: ended or stopped" if silent else ""
    return "; ".join(filter(None, [missing, *elsewhere])) or "All ranks say that they are in this operation"


class WatchedBackend:
    """A backend whose late operations name the ranks that are missing."""

    def __init__(self, backend: Backend, roll: RollCall) -> None:
        self._backend = backend
        self._roll = roll
        self.name = backend.name
        self.transport = backend.transport
        self.rank = backend.rank
        self.size = backend.size
        self.names = backend.names
        self.reducers = backend.reducers
        self.is_open = True

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> WatchedWork:
        return self._watch(describe("allreduce", name, buffer), lambda: self._backend.allreduce_(buffer, op, name))

    def allgather(self, tensor: torch.Tensor, name: str) -> WatchedWork:
        return self._watch(describe("allgather", name, tensor), lambda: self._backend.allgather(tensor, name))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> WatchedWork:
        return self._watch(describe("broadcast", name, buffer), lambda: self._backend.broadcast_(buffer, root, name))

    def close(self) -> None:
        self.is_open = False
        self._roll.close()
        self._backend.close()

    def _watch(self, what: str, start: Callable[[], Work]) -> WatchedWork:
        return WatchedWork(start(), what, self._roll)
