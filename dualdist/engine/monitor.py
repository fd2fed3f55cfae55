"""Errors of operations: they name the operation and the missing ranks. Operations that succeed send nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from dualdist.errors import CollectiveError, CollectiveTimeoutError, RankLostError, RendezvousError, UnsupportedError
from dualdist.liveness.rank_probe import STORE_GONE, RankProbe, find_lost_ranks, find_silent_ranks, report_timeout
from dualdist.utils.suggest import format_ranks


class Monitor:
    """Adds the operation and the missing ranks to errors of operations between these ranks.

    Args:
        probe: asks the other ranks where they are; None in a job of one rank.
        ranks: of the job.
        scope: the name of these ranks' operations, the same on all of them; a failure in one scope ends no other.
    """

    def __init__(self, probe: RankProbe | None, ranks: Sequence[int], scope: str = "") -> None:
        self.probe = probe
        self.ranks = ranks
        self.scope = scope

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
            reported = self.probe.find_failure(self.scope)
            if reported is not None:
                return _named(CollectiveError(f"{what}: {reported}"), error)
            gone = [] if error.ranks else find_lost_ranks(self.probe, self.ranks)
            message += f"; no answer from {format_ranks(gone)}" if gone else ""
            message += "; if its loop was shorter than this rank's, call dd.join() after the loop on every rank"
        return _named(type(error)(message), error)

    def report_failure(self, cause: str) -> None:
        """Let the other ranks know that this one takes part in no further operation, and why."""
        if self.probe is not None:
            self.probe.report_failure(self.scope, cause)

    def watch_failures(self, on_failure: Callable[[CollectiveError], None]) -> None:
        """Call `on_failure` with the failure of another rank in this scope, within seconds."""
        if self.probe is not None:
            self.probe.watch_failures(self.scope, on_failure)

    def require_responsive(self) -> None:
        """Raise CollectiveTimeoutError unless all ranks still answer, wherever they are."""
        if self.probe is None:
            return
        try:
            silent = find_silent_ranks(self.probe, self.ranks)
        except (RendezvousError, TimeoutError) as error:
            raise CollectiveTimeoutError(STORE_GONE) from error
        if silent:
            raise CollectiveTimeoutError(f"{format_ranks(silent)} stopped responding")


def _named(described: CollectiveError | UnsupportedError, error: CollectiveError | UnsupportedError) -> BaseException:
    """Return `described`, which names the operation of `error`, with the same cause and lost ranks."""
    described.names_operation = True
    described.__cause__ = error.__cause__
    if isinstance(described, RankLostError) and isinstance(error, RankLostError):
        described.ranks = error.ranks
    return described
