"""Running operations of a process group, as torch.distributed.Work.

Note [who finishes]: a transport begins operations in the order of the calls, and they are finished in that order, by
one thread at a time: a program that waits does it itself, without a change of threads; a background thread does it for
operations that their caller does not wait for at once, so that they overlap with what the program computes, and futures
complete. That thread also runs the callbacks of the futures. What a callback begins is finished at once: the callback
may wait for it, as torch's hooks for PowerSGD do, and no other thread would finish it. Before the program begins
another operation, those whose futures it has asked for are finished, with their callbacks: else what a callback begins
would come before it on some ranks and after it on others.

Note [no spare core]: where the program's threads use all cores of a rank, a background thread takes its core from them,
and, as the ranks go through an operation together, from the other ranks' threads. There the thread that begins an
operation of shared memory first waits for it: for a while, since another rank may need this one elsewhere first. It is
the Note [wait budget] of backends/mpi/backend.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist

from dualdist.backends import base
from dualdist.backends.mpi.work import BYTES_PER_S
from dualdist.errors import CollectiveError, MismatchError, NotInitializedError
from dualdist.monitoring.monitored import Monitor, MonitoredWork
from dualdist.monitoring.process_state import OUR_THREADS

NO_TIMEOUT = timedelta(0)
JOIN_S = 2.0
GROUP_CLOSED = "this process group has been destroyed, or dd.shutdown() has closed its transport"


class Progress:
    """The operations of one group that have begun: Note [who finishes]."""

    def __init__(self, wait_budget_s: float) -> None:
        self._wait_budget_s = wait_budget_s
        self._failure: Exception | None = None
        self._begun: deque[GroupWork] = deque()
        self._finishing = threading.RLock()
        self._finisher = 0  # the thread that finishes an operation now
        self._unattended = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self.may_call_back = False  # a future was asked for
        self.is_open = True

    def require_usable(self) -> None:
        """Raise CollectiveError if an operation has failed, and NotInitializedError after close()."""
        if not self.is_open:
            raise NotInitializedError(GROUP_CLOSED)
        if self._failure is not None:
            raise CollectiveError(
                "the ranks are out of step since an operation failed; create the process group again on every rank, or "
                f"start the job again. It was: {self._failure}"
            ) from self._failure

    def fail(self, error: Exception) -> None:
        """Refuse all further operations, unless the error left all ranks at the same point."""
        if isinstance(error, CollectiveError) and not isinstance(error, MismatchError):
            self._failure = self._failure or error

    def add(self, work: GroupWork, *, in_background: bool) -> None:
        is_first = not self._begun
        self._begun.append(work)
        if self._finisher == threading.get_ident():  # in a callback
            self.finish(work)
        elif in_background and not (is_first and self._wait_budget_s and self._try_finish(work)):
            self.attend()

    def _try_finish(self, work: GroupWork) -> bool:
        """Return True if the operation is done within the budget: Note [no spare core]."""
        if self._finishing.acquire(blocking=False):
            try:
                if self._begun and self._begun[0] is work and work.try_finish(self._wait_budget_s):
                    self._begun.popleft()
                    return True
            finally:
                self._finishing.release()
        return False

    def attend(self) -> None:
        """Let the background thread finish what has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{OUR_THREADS}c10d", daemon=True)
            self._thread.start()
        self._unattended.release()

    def end_callbacks(self) -> None:
        """Finish what has begun, with its callbacks, before another operation begins."""
        if self.may_call_back and self._finisher != threading.get_ident():
            self.may_call_back = False
            with self.all_finished():
                pass

    def finish(self, work: GroupWork) -> None:
        """Finish the operation, after those before it."""
        with self._finishing:
            while not work.is_completed():
                self._finish_first()

    @contextlib.contextmanager
    def all_finished(self) -> Iterator[None]:
        """Finish what has begun, and nothing else in the block, which uses the transport itself."""
        with self._finishing:
            while self._begun:
                self._finish_first()
            yield

    def close(self) -> None:
        """End the thread. The transport has been closed: what is still running fails."""
        self.is_open = False
        if self._thread is not None:
            self._unattended.release()
            self._thread.join(JOIN_S)
        for work in self._begun:
            work.fail(NotInitializedError(GROUP_CLOSED))

    def _run(self) -> None:
        while self._unattended.acquire() and self.is_open:
            while self._begun:
                with self._finishing:
                    if self._begun:
                        self._finish_first()

    def _finish_first(self) -> None:
        before, self._finisher = self._finisher, threading.get_ident()
        try:
            self._begun.popleft().finish()
        finally:
            self._finisher = before


class GroupWork(dist.Work):
    """A collective of a process group, of one or more operations of its transport."""

    def __init__(
        self,
        progress: Progress,
        parts: Sequence[base.Work],
        result: list[torch.Tensor],
        time_limit: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._progress = progress
        self._parts = parts
        self._result = result
        self._time_limit = time_limit
        self._error: Exception | None = None
        self._done = threading.Event()
        self._resolving = threading.Lock()
        self._source: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def finish(self) -> None:
        """Wait for the operations of the transport; called in order, by one thread at a time."""
        try:
            self._progress.require_usable()
            with self._time_limit():
                for part in self._parts:
                    part.wait()
        except Exception as error:  # of any kind: those who wait must see it
            self._progress.fail(error)
            self._error = error
        except BaseException:
            self._error = CollectiveError("this operation was interrupted")
            self._progress.fail(self._error)
            self._resolve()
            raise
        self._resolve()

    def try_finish(self, budget_s: float) -> bool:
        """Return True if this is one operation of shared memory, and done within the budget."""
        (part, *more) = self._parts or (None,)
        if more or not isinstance(part, MonitoredWork):
            return False
        nbytes = sum(tensor.nbytes for tensor in self._result)
        if not part.try_wait(budget_s + nbytes / BYTES_PER_S):
            return False
        self.finish()
        return True

    def fail(self, error: Exception) -> None:
        """Give up."""
        self._error = error
        self._resolve()

    def _resolve(self) -> None:
        self._parts = ()
        with self._resolving:
            self._done.set()
            source = self._source  # a later get_future() resolves its own
        if source is not None:
            source.set_result(None)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if timeout > NO_TIMEOUT:
            self._progress.attend()
            if not self._done.wait(timeout.total_seconds()):
                raise base.timeout_error(timeout.total_seconds())
        elif not self._done.is_set():
            self._progress.finish(self)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._progress.may_call_back = True
        with self._resolving:
            if self._future is None:
                self._source = torch.futures.Future()
                self._future = self._source.then(self._outcome)
                if not self._done.is_set():
                    self._progress.attend()
                    return self._future
                self._source.set_result(None)
        return self._future

    def _outcome(self, _: object) -> list[torch.Tensor]:
        """Return the result; what this raises is an error of the future in C++, too, as set_exception() is not."""
        if self._error is not None:
            raise self._error
        return self._result


class PeerWork(dist.Work):
    """A send or a receive."""

    def __init__(self, work: base.Work, what: str, monitor: Monitor, target: torch.Tensor | None = None) -> None:
        super().__init__()
        self._work = work
        self._what = what
        self._monitor = monitor
        self._target = target  # of a receive whose tensor is not contiguous
        self._is_done = False

    def is_completed(self) -> bool:
        return self._is_done or self._work.done()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._is_done:
            with self._monitor.operation(self._what):
                result = self._work.wait()
            if self._target is not None:
                self._target.detach().copy_(result.view(self._target.shape))
            self._is_done = True
        return True

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        source: int = self._work.source()  # type: ignore[attr-defined]  # of a receive
        return source

    source_rank = _source_rank
