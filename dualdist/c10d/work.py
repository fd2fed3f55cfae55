"""Running operations of a process group, as torch.distributed.Work.

Note [who finishes]: operations begin and end in the order of the calls (engine/channel.py). A program that waits
advances them itself; the channel's progress thread does it for operations that their caller does not wait for at once,
so that they overlap with what the program computes, and futures complete. Whoever ends an operation runs the callbacks
of its future. What a callback begins is finished at once: the callback may wait for it, as torch's hooks for PowerSGD
do, and no other thread would finish it. Before the program begins another operation, those whose futures it has asked
for are finished, with their callbacks: else what a callback begins would come before it on some ranks and after it on
others.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from dualdist.backends.base import Receive, timeout_error
from dualdist.backends.operation import Operation
from dualdist.engine import channel as engine
from dualdist.engine.channel import Channel
from dualdist.engine.monitor import Monitor
from dualdist.errors import CollectiveTimeoutError, DualdistError
from dualdist.utils.deadline import Deadline

NO_TIMEOUT = timedelta(0)


class Callbacks:
    """The thread that runs callbacks of futures, if a future was asked for: Note [who finishes]."""

    def __init__(self) -> None:
        self.are_wanted = False  # a future was asked for
        self._thread = 0

    @property
    def are_running_here(self) -> bool:
        """Return True in a callback."""
        return self._thread == threading.get_ident()

    def run(self, source: torch.futures.Future[None]) -> None:
        """Complete a future, and run its callbacks in this thread."""
        before, self._thread = self._thread, threading.get_ident()
        try:
            source.set_result(None)
        finally:
            self._thread = before


class GroupWork(dist.Work):
    """A collective of a process group."""

    def __init__(
        self, channel: Channel, work: engine.Work[object], result: list[torch.Tensor], callbacks: Callbacks
    ) -> None:
        super().__init__()
        self._channel = channel
        self._work = work
        self._result = result
        self._callbacks = callbacks
        self._error: BaseException | None = None
        self._resolving = threading.Lock()
        self._is_resolved = False
        self._source: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        work.on_end = self._resolve
        if work.is_done:
            self._resolve()

    def _resolve(self) -> None:
        """Complete the future, by the thread that ended the operation; once."""
        self._work.on_end = None  # refers to this object
        error = self._work.error
        if isinstance(error, CollectiveTimeoutError):  # programs look for the word timeout in errors of torch
            text = f"the timeout of {self._work.timeout_s:g} s has passed: {error}"
            error = CollectiveTimeoutError(text).with_traceback(error.__traceback__)
        with self._resolving:
            if self._is_resolved:
                return
            self._error = error
            self._is_resolved = True
            source = self._source  # a later get_future() resolves its own
        if source is not None:
            self._callbacks.run(source)

    def is_completed(self) -> bool:
        if not self._work.is_done:
            self._channel.advance()
        return self._is_resolved

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        try:
            if not self._work.is_done:
                if timeout > NO_TIMEOUT:
                    self._wait_for(timeout.total_seconds())
                else:
                    self._channel.wait(self._work)
        except DualdistError:
            if self._error is None:
                raise
        except BaseException as error:
            self._channel.latch.fail(error, self._work.what)
            raise
        if self._error is not None:
            raise self._error
        return True

    def _wait_for(self, seconds: float) -> None:
        """Wait for the progress thread; the operation goes on after the timeout."""
        self._channel.attend()
        deadline = Deadline(seconds)
        while not self._work.is_done:
            if deadline.passed():
                raise timeout_error(seconds)
            self._channel.wait_for_change(deadline.left_s(), self._work)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._callbacks.are_wanted = True
        with self._resolving:
            if self._future is None:
                self._source = torch.futures.Future()
                self._future = self._source.then(self._outcome)
                if not self._is_resolved:
                    self._channel.attend()
                    return self._future
                self._source.set_result(None)
        return self._future

    def _outcome(self, _: object) -> list[torch.Tensor]:
        """Return the result; what this raises is an error of the future in C++, too, as set_exception() is not."""
        if self._error is not None:
            raise self._error
        return self._result


class PeerWork(dist.Work):
    """A send or a receive, which is in no queue."""

    def __init__(
        self,
        operation: Operation[torch.Tensor],
        what: str,
        monitor: Monitor,
        timeout_s: float,
        target: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._operation = operation
        self._what = what
        self._monitor = monitor
        self._timeout_s = timeout_s
        self._target = target  # where wait() copies what a receive got, if that tensor is not contiguous
        self._is_done = False

    def is_completed(self) -> bool:
        return self._is_done or self._operation.advance(0.0)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if self._is_done:
            return True
        limit_s = timeout.total_seconds() if timeout > NO_TIMEOUT else self._timeout_s
        with self._monitor.operation(self._what):
            if not self._operation.advance(limit_s):
                raise timeout_error(limit_s)
        if self._target is not None:
            self._target.detach().copy_(self._operation.result.view(self._target.shape))
        self._is_done = True
        return True

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        assert isinstance(self._operation, Receive)
        return self._operation.source()

    source_rank = _source_rank
