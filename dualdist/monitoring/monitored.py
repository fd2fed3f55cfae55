"""Monitored operations: errors name the operation and the missing ranks; operations that succeed send nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dualdist.backends.base import Backend, ForwardingBackend, LazyDescription, ReduceOp, Work
from dualdist.backends.shm.collectives import HostWork
from dualdist.errors import CollectiveError, CollectiveTimeoutError, RankLostError, RendezvousError, UnsupportedError
from dualdist.monitoring.rank_probe import STORE_GONE, RankProbe, find_lost_ranks, find_silent_ranks, report_timeout
from dualdist.utils.suggest import format_ranks

if TYPE_CHECKING:
    import torch


class Monitor:
    """Adds the operation and the missing ranks to errors of operations between these ranks."""

    def __init__(self, probe: RankProbe | None, ranks: Sequence[int]) -> None:
        self.probe = probe  # None in a job of one rank
        self.ranks = ranks
        # Called with "begun" or "done", and the kind, name and bytes of an operation of a MonitoredBackend.
        self.observer: Callable[[str, str, str, int], None] | None = None

    def begun(self, kind: str, name: str, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Notify the observer, if any, that an operation began; return what notifies it, once, of its end."""
        observer = self.observer
        if observer is None:
            return None
        nbytes = tensor.nbytes
        observer("begun", kind, name, nbytes)
        pending = [observer]
        return lambda: pending.pop()("done", kind, name, nbytes) if pending else None

    @contextlib.contextmanager
    def operation(self, what: object) -> Iterator[None]:
        """Set this rank's position to the operation `what` for the block, and name it in errors that leave it."""
        previous = None if self.probe is None else self.probe.enter(what)
        try:
            yield
        except BaseException as error:
            described = self.describe(error, what)
            if described is error:
                raise
            raise described from error.__cause__
        finally:
            if self.probe is not None:
                self.probe.leave(previous)

    def describe(self, error: BaseException, what: object) -> BaseException:
        """Return `error` with the operation and the missing ranks in its message, or itself if it names them."""
        if not isinstance(error, (CollectiveError, UnsupportedError)) or error.names_operation:
            return error
        message = f"{what}: {error}"
        if self.probe is not None and isinstance(error, CollectiveTimeoutError):
            message = report_timeout(self.probe, self.ranks, str(what), str(error))
        elif self.probe is not None and isinstance(error, RankLostError):
            gone = [] if error.ranks else find_lost_ranks(self.probe, self.ranks)
            message += f"; no answer from {format_ranks(gone)}" if gone else ""
            message += "; if its loop was shorter than this rank's, call dd.join() after the loop on every rank"
        described = type(error)(message)
        described.names_operation = True
        return described


def require_responsive(monitor: Monitor) -> None:
    """Raise CollectiveTimeoutError unless all ranks still answer, wherever they are."""
    if monitor.probe is None:
        return
    try:
        silent = find_silent_ranks(monitor.probe, monitor.ranks)
    except (RendezvousError, TimeoutError) as error:
        raise CollectiveTimeoutError(STORE_GONE) from error
    if silent:
        raise CollectiveTimeoutError(f"{format_ranks(silent)} stopped responding")


class MonitoredWork:
    """Work whose errors name its operation; calls `ended` when it is first found to be done."""

    def __init__(self, work: Work, what: object, monitor: Monitor, ended: Callable[[], None] | None) -> None:
        self._work = work
        self._what = what
        self._monitor = monitor
        self._ended = ended

    def done(self) -> bool:
        try:
            is_done = self._work.done()
        except CollectiveError:
            with self._monitor.operation(self._what):
                raise
        if is_done and self._ended is not None:
            self._ended()
        return is_done

    def try_wait(self, seconds: float) -> bool:
        """Return True if this is done within `seconds`; False at once if it is not shared memory that moves it."""
        return isinstance(self._work, HostWork) and self._work.try_wait(seconds)

    def wait(self) -> torch.Tensor:
        try:
            with self._monitor.operation(self._what):
                return self._work.wait()
        finally:
            if self._ended is not None:
                self._ended()


class MonitoredBackend(ForwardingBackend):
    """A backend whose errors name the operation and the missing ranks."""

    def __init__(self, backend: Backend, monitor: Monitor) -> None:
        super().__init__(backend)
        self._monitor = monitor

    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> MonitoredWork:
        return self._start("allreduce", name, buffer, partial(self._backend.allreduce_, buffer, op, name, source))

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> MonitoredWork:
        return self._start("allgather", name, tensor, partial(self._backend.allgather, tensor, name, output))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> MonitoredWork:
        return self._start("broadcast", name, buffer, partial(self._backend.broadcast_, buffer, root, name))

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> MonitoredWork:
        return self._start("alltoall", name, tensor, partial(self._backend.alltoall, tensor, sent, received, name))

    def _start(self, kind: str, name: str, tensor: torch.Tensor, start: Callable[[], Work]) -> MonitoredWork:
        what = LazyDescription(kind, name, tensor)
        ended = self._monitor.begun(kind, name, tensor)
        try:
            with self._monitor.operation(what):
                return MonitoredWork(start(), what, self._monitor, ended)
        except BaseException:
            if ended is not None:
                ended()
            raise
