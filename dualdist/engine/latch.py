"""The latch, which refuses operations between some ranks once one of them has failed.

Note [failures]: whatever leaves an operation that had begun to send, also an interrupt, closes the latch: this rank
begins no operation on the channel any more, and its connections are broken, so that the other ranks stop waiting for
it. They find the reason in the job's store. So all ranks raise at this operation or at the next one, and no message is
ever taken for another one.
"""

from __future__ import annotations

import time

from dualdist.backends.base import Backend
from dualdist.engine.monitor import Monitor
from dualdist.errors import (
    CLOSED,
    CollectiveError,
    MismatchError,
    NotInitializedError,
    RankLostError,
    TrainingError,
    UnsupportedError,
    UsageError,
)
from dualdist.liveness.failed_exit import exit_if_continued

# Errors that are raised on all ranks alike, or before anything was sent: the channel goes on.
HARMLESS = (MismatchError, UnsupportedError, UsageError, TrainingError)


class Latch:
    """Refuses operations between some ranks once one of them has failed: Note [failures].

    Attributes:
        failure: Why this rank begins no more operations.
        cause: The same as text, with the operation.
        is_reported: The other ranks know, and operations that are still under way will not end.
    """

    def __init__(self, backend: Backend, monitor: Monitor, timeout_s: float) -> None:
        self.failure: BaseException | None = None
        self.cause = ""
        self.is_reported = False
        self.is_open = True
        self._backends = [backend]
        self._monitor = monitor
        self._timeout_s = timeout_s
        self._refused_since = 0.0  # when the program first called after the failure, on the monotonic clock
        monitor.watch_failures(self.record_remote)

    @property
    def ignored_failure(self) -> str:
        """Return the failure after which the program kept calling, or ""."""
        return str(self.failure) if self._refused_since else ""

    def add(self, backend: Backend) -> None:
        """Let this backend fail together with the others."""
        self._backends.append(backend)

    def require_usable(self) -> None:
        """Raise NotInitializedError or CollectiveError if this rank cannot begin an operation."""
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        if self.failure is not None:
            self._refused_since = self._refused_since or time.monotonic()
            exit_if_continued(self._refused_since, self._timeout_s, str(self.failure))
            raise CollectiveError(
                "the ranks are out of step since an operation failed; call dd.shutdown() and dd.init() on every rank, "
                f"or start the job again. It was: {self.cause}"
            ) from self.failure

    def fail(self, error: BaseException, what: object = "") -> None:
        """Refuse all further operations here and on the other ranks, unless the error left all at the same point."""
        if self.record(error, what):
            self.report()

    def record(self, error: BaseException, what: object) -> bool:
        """Refuse further operations, unless the error left all ranks at the same point; return True if it is new."""
        if self.failure is not None or not self.is_open or isinstance(error, HARMLESS):
            return False
        self.failure, self.cause = error, describe_cause(error, what)
        return True

    def report(self) -> None:
        """Report the failure to the other ranks, and break the connections to them."""
        if self.failure is None or self.is_reported:
            return
        self.is_reported = True
        if not isinstance(self.failure, RankLostError):  # which each rank finds by itself
            self._monitor.report_failure(self.cause)
        self.abandon()

    def abandon(self) -> None:
        """Break the connections of these ranks, if an operation has failed here or elsewhere."""
        if self.failure is not None:
            backends, self._backends = self._backends, []
            for backend in backends:
                backend.abandon()

    def explain(self, error: BaseException) -> BaseException:
        """Return why the connections were broken, for an error that follows from that, else the error."""
        if self.failure is None or not self.is_reported or not isinstance(error, CollectiveError):
            return error
        found = CollectiveError(self.cause)
        found.__cause__ = self.failure
        return found

    def record_remote(self, error: CollectiveError) -> None:
        """Fail, as another rank has."""
        if self.failure is None and self.is_open:
            self.failure, self.cause, self.is_reported = error, f"{error}", True


def describe_cause(error: BaseException, what: object = "") -> str:
    """Return the message of an error of ours, or the kind of another one, with the operation that it left."""
    if isinstance(error, CollectiveError) and error.names_operation:
        return f"{error}"
    kind = f"{error}" if isinstance(error, CollectiveError) else f"{type(error).__name__} {error}".strip()
    return f"{what}: {kind}" if str(what) else kind
