"""Who is missing: when an operation times out, the ranks say where they are, and the error names those that do not.

Every rank's thread looks once a second whether somebody asks; operations that succeed send nothing.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dualdist.backends.base import Backend, Buffer, Described, ReduceOp, Settling, Store, Work
from dualdist.deadline import Deadline, call_within
from dualdist.errors import CollectiveError, CollectiveTimeoutError, RendezvousError, UnsupportedError

if TYPE_CHECKING:
    import torch

LOOK_S = 1.0
ANSWER_S = 2.5
STORE_GONE = "the store of the job, which rank 0 or its launcher serves, is gone too; see what rank 0 printed last"
IN_PROGRAM = "in the program, outside of any operation"


class RollCall:
    """Answers, in a thread, where this rank is; asks, when told to, where other ranks are."""

    def __init__(self, store: Store, rank: int, key: str) -> None:
        self.rank = rank
        self._store = store
        self._key = key
        self._places: dict[int, tuple[object, float]] = {}  # by thread; the last one entered is told
        self._back_since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="dualdist-roll-call", daemon=True)
        self._thread.start()
        # A thread that the interpreter ends inside the store's C++ code aborts the process, so it must be out before.
        atexit.register(self.close)

    def enter(self, operation: object) -> None:
        """This thread waits in an operation from now on."""
        self._places[threading.get_ident()] = operation, time.monotonic()

    def leave(self) -> None:
        """This thread is back in the program."""
        self._places.pop(threading.get_ident(), None)
        self._back_since = time.monotonic()

    def ask(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where each of the ranks says it is, without the silent ones; RendezvousError where the store is gone."""
        number = self._store.add(f"{self._key}/questions", 1)
        self._store.set(self._question(number), "")
        deadline = Deadline(ANSWER_S)
        answers: dict[int, str] = {}
        while len(answers) < len(ranks) and not deadline.passed():
            for rank in set(ranks) - set(answers):
                if self._store.has(self._reply(number, rank)):
                    answers[rank] = self._store.get(self._reply(number, rank), 1.0)
            deadline.sleep(0.1)
        return dict(sorted(answers.items()))

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
                    operation, since = next(reversed(self._places.values()), (None, self._back_since))
                    place = IN_PROGRAM if operation is None else f"in {operation}"
                    self._store.set(self._reply(number, self.rank), f"{place}, for {time.monotonic() - since:.0f} s")
                    number += 1
            except (RendezvousError, TimeoutError):
                return  # the process that served the store has ended; whoever waits learns it from the operation

    def _question(self, number: int) -> str:
        return f"{self._key}/question/{number}"

    def _reply(self, number: int, rank: int) -> str:
        return f"{self._key}/reply/{number}/{rank}"


class Watch:
    """Lets the errors of operations between these ranks say which operation failed, and who was missing."""

    def __init__(self, roll: RollCall | None, ranks: Sequence[int]) -> None:
        self.roll = roll  # None in a job of one rank
        self.ranks = ranks
        # Is told "begun" or "done", the kind and the name of what a watched backend moves.
        self.observer: Callable[[str, str, str], None] | None = None

    def begun(self, kind: str, name: str) -> Callable[[], None]:
        """The observer knows that a move has begun; calling the result tells it, once, that the move is over."""
        observer = self.observer
        if observer is None:
            return _nothing
        observer("begun", kind, name)
        unheard = [observer]
        return lambda: unheard.pop()("done", kind, name) if unheard else None

    def over(self, what: object) -> _Over:
        """A block in which this rank is in the operation `what`."""
        return _Over(self, what)


class _Over:
    """Says where this rank is while it lasts, and which operation it was when it fails."""

    def __init__(self, watch: Watch, what: object) -> None:
        self._watch = watch
        self._what = what

    def __enter__(self) -> None:
        if self._watch.roll is not None:
            self._watch.roll.enter(self._what)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        roll, what = self._watch.roll, self._what
        try:
            if isinstance(error, CollectiveTimeoutError):
                where = "" if roll is None else f". {whereabouts(roll, self._watch.ranks, str(what))}"
                raise CollectiveTimeoutError(f"{what}: {error}{where}") from error.__cause__
            if isinstance(error, (CollectiveError, UnsupportedError)):
                raise type(error)(f"{what}: {error}") from error.__cause__
        finally:
            if roll is not None:
                roll.leave()


def _nothing() -> None:
    """There is nobody to tell."""


def require_answers(watch: Watch, what: str) -> None:
    """CollectiveTimeoutError unless all ranks still say where they are, wherever that may be."""
    if watch.roll is None:
        return
    roll = watch.roll
    try:
        answers = call_within(2 * ANSWER_S, lambda: roll.ask(watch.ranks), lambda: RendezvousError("no answer"))
    except (RendezvousError, TimeoutError) as error:
        raise CollectiveTimeoutError(f"{what}: {STORE_GONE}") from error
    silent = [rank for rank in watch.ranks if rank not in answers]
    if silent:
        raise CollectiveTimeoutError(f"{what}: no answer from rank {', '.join(map(str, silent))}: ended or stopped")


def whereabouts(roll: RollCall, ranks: Sequence[int], what: str) -> str:
    """Where the other ranks are, in words, for the error of an operation on this one."""
    try:
        answers = call_within(2 * ANSWER_S, lambda: roll.ask(ranks), lambda: RendezvousError("no answer"))
    except (RendezvousError, TimeoutError):
        return f"{STORE_GONE[0].upper()}{STORE_GONE[1:]}"
    silent = [rank for rank in ranks if rank not in answers]
    elsewhere = [f"rank {rank} is {place}" for rank, place in answers.items() if not place.startswith(f"in {what}")]
    missing = f"No answer from rank {', '.join(map(str, silent))}: ended or stopped" if silent else ""
    return "; ".join(filter(None, [missing, *elsewhere])) or "All ranks say that they are in this operation"


class WatchedWork:
    """Work whose errors say which operation it is, and which tells when it was first found to be over."""

    def __init__(self, work: Work, what: object, watch: Watch, ended: Callable[[], None]) -> None:
        self._work = work
        self._what = what
        self._watch = watch
        self._ended = ended

    def done(self) -> bool:
        is_done = self._work.done()
        if is_done:
            self._ended()
        return is_done

    def wait(self) -> torch.Tensor:
        try:
            with self._watch.over(self._what):
                return self._work.wait()
        finally:
            self._ended()


class _WatchedBuffer:
    """A buffer whose reductions are watched."""

    def __init__(self, backend: WatchedBackend, buffer: Buffer) -> None:
        self.values = buffer.values
        self.settles = buffer.settles
        self.rows = buffer.rows
        self.uses_without_rows = buffer.uses_without_rows
        self._backend = backend
        self._buffer = buffer

    def allreduce(self, op: ReduceOp, name: str, settling: Settling) -> WatchedWork:
        return self._backend._watched(
            "allreduce", name, self.values, lambda: self._buffer.allreduce(op, name, settling)
        )


class WatchedBackend:
    """A backend whose failing operations say which they are, and name the ranks that are missing."""

    def __init__(self, backend: Backend, watch: Watch) -> None:
        self._backend = backend
        self._watch = watch
        self.name = backend.name
        self.transport = backend.transport
        self.ranks = backend.ranks
        self.rank = backend.rank
        self.size = backend.size
        self.reducible = backend.reducible
        self.traceable = backend.traceable

    @property
    def timeout_s(self) -> float:
        return self._backend.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._backend.timeout_s = value

    @property
    def is_open(self) -> bool:
        return self._backend.is_open

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> WatchedWork:
        return self._watched("allreduce", name, buffer, lambda: self._backend.allreduce_(buffer, op, name))

    def allgather(self, tensor: torch.Tensor, name: str) -> WatchedWork:
        return self._watched("allgather", name, tensor, lambda: self._backend.allgather(tensor, name))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> WatchedWork:
        return self._watched("broadcast", name, buffer, lambda: self._backend.broadcast_(buffer, root, name))

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> WatchedWork:
        return self._watched("alltoall", name, tensor, lambda: self._backend.alltoall(tensor, sent, received, name))

    def reserve(self, nbytes: int, device: torch.device) -> int:
        with self._watch.over(f"reservation of {nbytes} bytes"):
            return self._backend.reserve(nbytes, device)

    def buffer(self, place: int, number: int, count: int, dtype: torch.dtype, device: torch.device) -> Buffer | None:
        buffer = self._backend.buffer(place, number, count, dtype, device)
        return None if buffer is None else _WatchedBuffer(self, buffer)

    def drop(self, place: int) -> None:
        self._backend.drop(place)

    def channel(self, key: str) -> Backend:
        return WatchedBackend(self._backend.channel(key), self._watch)

    def subgroup(self, ranks: Sequence[int], key: str) -> Backend:
        return WatchedBackend(self._backend.subgroup(ranks, key), Watch(self._watch.roll, ranks))

    def built_with(self) -> dict[str, int]:
        return self._backend.built_with()

    def close(self) -> None:
        self._backend.close()

    def _watched(self, kind: str, name: str, tensor: torch.Tensor, start: Callable[[], Work]) -> WatchedWork:
        what = Described(kind, name, tensor)
        ended = self._watch.begun(kind, name)
        try:
            with self._watch.over(what):
                return WatchedWork(start(), what, self._watch, ended)
        except BaseException:
            ended()
            raise
