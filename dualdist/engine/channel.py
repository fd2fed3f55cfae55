"""A channel: the operations of one backend, in the order in which all ranks begin them.

Note [who advances]: an operation moves when somebody advances it: a program that waits, a hook of backward that does
not wait, or the channel's progress thread, one thread at a time. All of them advance the first operation of the queue.

What happens when one of them fails is in latch.py.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dualdist.backends.base import Backend, timeout_error
from dualdist.backends.operation import Operation, PerformedByCaller, Staged, Stages
from dualdist.backends.wait_budget import BYTES_PER_S
from dualdist.engine.latch import HARMLESS, Latch
from dualdist.engine.monitor import Monitor
from dualdist.errors import CLOSED, CollectiveError, DualdistError, NotInitializedError, RankLostError
from dualdist.liveness.process_state import OUR_THREADS
from dualdist.utils.deadline import Deadline, ProgressLimit

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
# The name of a bucket's allreduce: its optimizer, layout and index, and its elements without the flags.
BUCKET_NAME = re.compile(r"gradients\.\d+\.\d+\.(\d+)/(\d+)")
# The longest wait inside a transport; then the wait loop looks at signals, lost ranks and time limits.
SLICE_S = 0.2
# Seconds that close() waits for the progress thread.
DRAIN_S = 2.0
Observer = Callable[[str, Any], None]


class Transfer:
    """An operation on a tensor, as errors and observers name it."""

    def __init__(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        self.kind, self.name = kind, name
        self.nbytes = tensor.numel() * tensor.element_size()  # sparse tensors have no nbytes
        self._tensor = tensor.dtype, tuple(tensor.shape)

    def __str__(self) -> str:
        dtype, shape = str(self._tensor[0]).removeprefix("torch."), self._tensor[1]
        if bucket := BUCKET_NAME.fullmatch(self.name):
            return f"reduction of gradients, bucket {bucket[1]} of {bucket[2]} elements of {dtype}"
        return f"{self.kind} {self.name!r} of {dtype}{shape}"


class Work(Generic[T]):
    """An operation that has been given to a channel.

    Attributes:
        is_done: The operation has ended, or failed.
        error: Why it failed.
    """

    def __init__(
        self,
        channel: Channel,
        what: object,
        begin: Callable[[Backend], Operation[T] | Stages[T]],
        timeout_s: float,
    ) -> None:
        self.what = what
        self.timeout_s = timeout_s
        self.operation: Operation[T] | None = None  # until it may begin
        self.is_done = False
        self.error: BaseException | None = None
        self.on_end: Callable[[], None] | None = None  # called once, by the thread that ends it
        self._begin: Callable[[Backend], Operation[T] | Stages[T]] | None = begin
        self._channel = channel

    def begin(self, backend: Backend) -> None:
        """Begin on the transport; called once."""
        if self._begin is None:
            raise CollectiveError("it was interrupted as it began")
        begin, self._begin = self._begin, None
        begun = begin(backend)
        self.operation = begun if isinstance(begun, Operation) else Staged(begun)

    def done(self) -> bool:
        """Return True if wait() would return at once; moves what can be moved."""
        if not self.is_done:
            self._channel.advance()
        return self.is_done

    def wait(self) -> T:
        """Return the result; raise CollectiveError if the operation failed."""
        if not self.is_done:
            self._channel.wait(self)
        if self.error is not None:
            raise self.error
        assert self.operation is not None
        return self.operation.result

    def is_of_handler(self, error: Exception) -> bool:
        """Return True for an exception of a signal handler, which leaves the operation as it is: one may wait again."""
        is_own = isinstance(error, DualdistError) or (self.operation is not None and self.operation.failure is error)
        return not is_own and threading.current_thread() is threading.main_thread()

    def end(self, error: BaseException | None) -> None:
        """Mark it as done."""
        if not self.is_done:
            self.error = error
            self.is_done = True
            if self.on_end is not None:
                self.on_end()


class Channel:
    """One communicator's ordered queue of operations.

    Args:
        backend: moves the tensors.
        monitor: names the operation and the missing ranks in errors.
        timeout_s: the time for which a wait that names none may make no progress.
        latch: shared with another channel of the same ranks, which fail together.
        wait_budget_s: how long start() waits for what it begins: Note [wait budget]. By default the backend's.
    """

    def __init__(
        self,
        backend: Backend,
        monitor: Monitor,
        timeout_s: float,
        latch: Latch | None = None,
        wait_budget_s: float | None = None,
    ) -> None:
        self.backend = backend
        self.monitor = monitor
        self.timeout_s = timeout_s
        self.latch = latch or Latch(backend, monitor, timeout_s)
        if latch is not None:
            latch.add(backend)
        backend.on_late = self.latch.fail
        if monitor.probe is not None:
            monitor.probe.add_channel(self)
        # Called with "begun" or "done" and a Transfer; a group adds the events of its collectives.
        self.observers: list[Observer] = []
        self.source: Callable[[], float | None] | None = None  # see attend()
        self._wait_budget_s = backend.wait_budget_s if wait_budget_s is None else wait_budget_s
        self.started = 0  # operations
        self._queue: deque[Work[Any]] = deque()
        self._blocking = Work(self, "an operation that its caller performs", lambda _: PerformedByCaller(), timeout_s)
        self._blocking.operation = PerformedByCaller()
        self._ended = 0
        self._lock = threading.RLock()  # guards the queue, and what begins
        self._turn = threading.RLock()  # held by the thread that advances
        # Entered as a lock: Condition.__enter__ is Python, and a signal handler that raises in it leaves it locked.
        self._change_lock = threading.RLock()
        self._changed = threading.Condition(self._change_lock)
        self._waiters = 0  # threads that wait for another one's progress
        self._programs = 0  # threads in wait()
        self._thread: threading.Thread | None = None
        self._must_attend = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.backend.size

    @property
    def rank(self) -> int:
        """This process's index among them."""
        return self.backend.rank

    def start(
        self,
        what: object,
        begin: Callable[[Backend], Operation[T] | Stages[T]],
        *,
        timeout_s: float | None = None,
        attended: bool = False,
    ) -> Work[T]:
        """Queue an operation: it begins at once, or when operations before it admit it.

        Args:
            what: describes it in errors; observers are notified of a Transfer.
            begin: called with the backend, when all ranks may begin it.
            timeout_s: how long a wait for it may make no progress; by default the channel's.
            attended: let the progress thread advance it while the program computes, if it has several stages.

        Raises:
            CollectiveError: an operation has failed before.
            UnsupportedError: the transport cannot move this; nothing was sent.
        """
        self.latch.require_usable()
        work = Work(self, what, begin, timeout_s or self.timeout_s)
        if self.observers and isinstance(what, Transfer):
            self._observe(work, what)
        is_first = not self._queue
        self.started += 1
        with self._lock:
            self._queue.append(work)
            self._begin_admitted()
        if work.error is not None:
            raise work.error
        if is_first and self._wait_budget_s and self._turn.acquire(blocking=False):
            try:
                if self._queue and self._queue[0] is work:
                    nbytes = what.nbytes if isinstance(what, Transfer) else 0
                    self._advance_first(self._wait_budget_s + nbytes / BYTES_PER_S)
            finally:
                self._turn.release()
        if attended and not work.is_done and work.operation is not None and not work.operation.admits_next:
            self.attend()
        return work

    def _observe(self, work: Work[Any], transfer: Transfer) -> None:
        """Notify the observers that a transfer begins, and of its end."""
        observers = list(self.observers)

        def notify(event: str) -> None:
            for observe in observers:
                observe(event, transfer)

        notify("begun")
        work.on_end = partial(notify, "done")

    def run(
        self, what: object, begin: Callable[[Backend], Operation[T] | Stages[T]], *, timeout_s: float | None = None
    ) -> T:
        """Start an operation and wait for its result; an exception that leaves the wait closes the latch."""
        with self.failing(what):
            return self.start(what, begin, timeout_s=timeout_s).wait()

    @contextlib.contextmanager
    def failing(self, what: object = "") -> Iterator[None]:
        """Close the latch if any exception leaves the block but those that all ranks raise alike."""
        try:
            yield
        except BaseException as error:
            self.latch.fail(error, what)
            raise

    def _begin_admitted(self) -> None:
        """Begin what the operations before it admit."""
        with self._lock:
            queue = self._queue
            index = len(queue)
            while index and queue[index - 1].operation is None:
                index -= 1
            for work in list(queue)[index:]:
                last = queue[index - 1].operation if index else None
                if last is not None and not last.admits_next:
                    return
                try:
                    work.begin(self.backend)
                except BaseException as error:
                    self._fail(work, error)
                    if not isinstance(error, Exception):
                        raise
                    return
                index += 1

    def advance(self) -> None:
        """Move what can be moved without waiting, unless another thread advances."""
        if self._queue:
            self._advance_in_turn(0.0)

    def _advance_in_turn(self, wait_s: float, until: Work[Any] | None = None, turn_s: float = 0.0) -> bool:
        """Advance operations until one does not end within `wait_s`, or `until` is done.

        Returns False if another thread advances them now, and does not stop within `turn_s`.
        """
        if not self._turn.acquire(blocking=turn_s > 0, timeout=turn_s if turn_s > 0 else -1):
            return False
        try:
            while self._queue and not (until is not None and until.is_done) and self._advance_first(wait_s):
                pass
        finally:
            self._turn.release()
            self._notify()
        return True

    def _advance_first(self, wait_s: float) -> bool:
        """Advance the first operation; return True if it has ended. Called by the thread whose turn it is."""
        work = self._first()
        if work is None:  # another thread has given up all that was under way
            return False
        if not work.is_done:
            try:
                if work.operation is None or not work.operation.advance(wait_s):
                    self._begin_admitted()  # this one, if those before it have ended, or the next one
                    return False
            except Exception as error:
                if work.is_of_handler(error):
                    raise
                self._fail(work, error)
                return True
            work.end(None)
        with self._lock:
            if self._first() is work:
                self._queue.popleft()
                self._ended += 1
            self._begin_admitted()
        if self.latch.failure is not None and not self._queue:
            self.latch.report()
        if self._waiters:
            self._notify()
        return True

    def under_way(self) -> object | None:
        """Return the operation that has begun and not ended, if any, whether or not a thread waits for it."""
        first = self._first()
        return None if first is None else first.what

    def _first(self) -> Work[Any] | None:
        """Return the first operation, which another thread may remove at any time."""
        try:
            return self._queue[0]
        except IndexError:
            return None

    def _fail(self, work: Work[Any], error: BaseException) -> BaseException:
        """Fail a work, and those behind it unless all ranks raise this error; return it with the operation's name.

        What was begun before may still end.
        """
        described = self.monitor.describe(error, work.what)
        is_alone = isinstance(error, HARMLESS)
        with self._lock:
            works = list(self._queue)
            failed = works[works.index(work) :] if work in works else []  # else another thread has failed it
            failed = failed[:1] if is_alone else failed
            for each in failed:
                self._queue.remove(each)
            self._ended += len(failed)
        self.latch.record(described, work.what)
        if not self._queue:
            self.latch.report()
        for each in failed:
            each.end(described)
        if is_alone:
            self._begin_admitted()
        self._notify()
        return described

    def wait(self, work: Work[T]) -> None:
        """Wait until the work is done: the one wait loop. An exception that leaves it leaves the queue as it is.

        Raises:
            NotInitializedError: the session was closed meanwhile.
            RankLostError: a rank has ended.
            CollectiveError: another rank has failed.
            CollectiveTimeoutError: nothing made progress for the time limit of this work.
        """
        probe = self.monitor.probe
        before = None if probe is None else probe.enter(work.what)
        self._programs += 1
        try:
            self._wait(work)
        except CollectiveError as error:
            described = self._fail(work, error)
            if described is error:
                raise
            raise described from error.__cause__
        finally:
            self._programs -= 1
            if probe is not None:
                probe.leave(before)

    def _wait(self, work: Work[Any]) -> None:
        limit = ProgressLimit()
        while not work.is_done:
            if not self._advance_in_turn(SLICE_S, until=work):
                self.wait_for_change(SLICE_S, work)
            if not work.is_done:
                self.check(limit.deadline(work.timeout_s, self._progress()), lambda: work.is_done)

    def check(self, deadline: Deadline, has_ended: Callable[[], bool] = lambda: False) -> None:
        """Raise the error that ends a wait: the session was closed, a rank failed or ended, or the deadline passed.

        Not if the operation ends now: its data may have come just before the other rank went, or while this process
        was suspended.
        """
        latch = self.latch
        if not latch.is_open:
            raise NotInitializedError(CLOSED)
        if latch.is_reported and latch.failure is not None:
            latch.abandon()
            raise CollectiveError(latch.cause) from latch.failure
        lost = self.backend.lost_ranks()
        if not lost and not deadline.passed():
            return
        self.advance()
        if has_ended():
            return
        if lost:
            error = RankLostError(f"rank {', '.join(map(str, lost))} called dd.shutdown() or ended")
            error.ranks = tuple(lost)
            raise error
        raise timeout_error(deadline.timeout_s)

    def _progress(self) -> tuple[int, int]:
        """Return numbers that change whenever something moves: operations that ended, and steps of the first one."""
        first = self._first()
        return self._ended, 0 if first is None or first.operation is None else first.operation.steps

    def _notify(self) -> None:
        """Wake the threads that wait for another one's progress."""
        if self._waiters:
            with self._change_lock:
                self._changed.notify_all()

    def wait_for_change(self, seconds: float, work: Work[Any] | None = None) -> None:
        """Wait until another thread has ended an operation, or this one, at most for so many seconds."""
        with self._change_lock:
            self._waiters += 1
            try:
                if work is None or not work.is_done:  # it may have ended before this thread was a waiter
                    self._changed.wait(seconds)
            finally:
                self._waiters -= 1

    def enter(self) -> bool:
        """Let this thread use the backend itself, by finish(), until leave(); False if operations are under way."""
        if self._queue or not self._turn.acquire(blocking=False):
            return False
        with self._lock:
            if not self._queue:
                self._queue.append(self._blocking)
                return True
        self._turn.release()
        return False

    def leave(self) -> None:
        """End what enter() began; called once for each True that it returned."""
        with self._lock:
            if self._blocking in self._queue:  # else another thread has given up all that was under way
                self._queue.popleft()
            if self._queue:
                self._begin_admitted()
        self._turn.release()
        if self.latch.failure is not None and not self._queue:
            self.latch.report()
        if self._waiters:
            self._notify()

    def finish(self, operation: Operation[Any]) -> None:
        """Wait for an operation that this thread has begun after enter()."""
        limit = ProgressLimit()
        while not operation.advance(SLICE_S):
            self.check(limit.deadline(self.timeout_s, operation.steps), lambda: operation.advance(0.0))

    def attend(self) -> None:
        """Let the progress thread advance what is under way, and then what `source` begins.

        `source` begins the next operation if there is one; it returns the seconds after which it wants to be asked
        again, None if something must happen first, after which attend() is called.
        """
        with self._change_lock:
            self._must_attend = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{OUR_THREADS}progress", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        """Run the progress thread."""
        while self.latch.is_open:
            with self._change_lock:
                if not self._must_attend:
                    if self.latch.is_open:  # attend() and close() notify
                        self._changed.wait()
                    continue
                self._must_attend = False
            self._advance_in_background()

    def _advance_in_background(self) -> None:
        limit = ProgressLimit()
        while self.latch.is_open:
            if not self._queue:
                pause_s = None if self.source is None else self.source()
                if not self._queue:
                    if pause_s is None:
                        return
                    self.wait_for_change(pause_s)
                    continue
            self._advance_in_turn(SLICE_S, turn_s=SLICE_S)  # unless a program that advances has the turn
            first = self._first()
            if first is None or self._programs:  # a program that waits looks at its own limit
                continue
            try:
                self.check(limit.deadline(first.timeout_s, self._progress()), lambda first=first: first.is_done)  # type: ignore[misc]
            except (CollectiveError, NotInitializedError) as error:
                self._fail(first, error)

    def close(self) -> None:
        """End the progress thread; what is under way fails. The latch is closed first."""
        with self._change_lock:
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(DRAIN_S)
        while (first := self._first()) is not None:
            self._fail(first, NotInitializedError(CLOSED))
