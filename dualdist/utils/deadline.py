"""A call that may block in foreign code gets a time limit with a name."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from dualdist.errors import CollectiveError, DualdistError, RankLostError

T = TypeVar("T")


# Seconds that stopping may take at the end of a process; it takes milliseconds where all ranks answer, and for ever
# where one does not: who has been told so waits for less.
EXIT_S, EXIT_FAILED_S = 10.0, 2.0


class Deadline:
    """A moment by which something must have happened; seconds left count down from the moment it is made."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds until the deadline, 0.0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self.left_s() == 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep so long, but not past the deadline."""
        time.sleep(min(seconds, self.left_s()))


class _CallOutcome(Generic[T]):
    value: T
    error: BaseException | None = None


def call_within(timeout_s: float, call: Callable[[], T], late: Callable[[], DualdistError]) -> T:
    """Return call(), or raise late() after timeout_s seconds.

    The call runs in a thread of its own. Where it never returns the thread stays behind as a daemon, which does not
    keep the process alive: the caller is expected to end the job.
    """
    outcome: _CallOutcome[T] = _CallOutcome()

    def run() -> None:
        try:
            outcome.value = call()
        except BaseException as error:  # re-raised in the caller's thread below
            outcome.error = error

    thread = threading.Thread(target=run, name="dualdist-deadline", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise late()
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def stop_at_exit(stop: Callable[[], None]) -> None:
    """For atexit: stop, within some seconds, or else end the process without; it would wait for a lost rank."""
    has_failed = isinstance(getattr(sys, "last_value", None), CollectiveError)
    limit_s = EXIT_FAILED_S if has_failed else EXIT_S

    def late() -> DualdistError:
        return RankLostError(f"another rank did not answer for {limit_s:g} s")

    try:
        call_within(limit_s, stop, late)
    except RankLostError as error:
        print(f"dualdist: {error}; this process ends without it", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
