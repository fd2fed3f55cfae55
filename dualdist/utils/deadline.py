"""Time limits: deadlines, reads of pipes, calls that may block in foreign code, and waits at exit."""

import contextlib
import fcntl
import os
import select
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from dualdist.errors import CollectiveError, DualdistError, RankLostError

T = TypeVar("T")

# Seconds that stopping may take at exit: milliseconds if all ranks answer, forever if one does not. The shorter limit
# applies if an operation has already failed.
EXIT_S, EXIT_FAILED_S = 10.0, 2.0
STDERR = 2
READ_S, POLL_S = 1.0, 0.001
# Seconds between two calls of call_within()'s find_problem.
PROBLEM_POLL_S = 0.1
READ_BYTES = 1 << 16
LONGEST_POLL_S = 3600.0  # poll() takes no infinity


class Deadline:
    """A point in time, `timeout_s` after its creation."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds until the deadline, 0.0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self.left_s() == 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, but not past the deadline."""
        time.sleep(min(seconds, self.left_s()))


class ProgressLimit:
    """The time limit of a wait, which begins anew whenever something has made progress."""

    def __init__(self) -> None:
        self._deadline = Deadline(0.0)
        self._progress: object = None

    def deadline(self, timeout_s: float, progress: object) -> Deadline:
        """Return the deadline, `timeout_s` after `progress` was another one for the first time."""
        if progress != self._progress:
            self._deadline, self._progress = Deadline(timeout_s), progress
        return self._deadline


class LineReader:
    """Reads lines from a pipe until a deadline, even if no process that holds the pipe open ever writes or exits."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._unread = b""
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def readline(self, deadline: Deadline) -> bytes:
        """Return the next line, or what is left at the end of the output; raise TimeoutError at the deadline."""
        is_open = True
        while is_open and b"\n" not in self._unread:
            if self._poll.poll(1000 * min(LONGEST_POLL_S, deadline.left_s())):
                read = os.read(self._pipe, READ_BYTES)
                self._unread += read
                is_open = bool(read)
            if deadline.passed():
                raise TimeoutError
        line, newline, self._unread = self._unread.partition(b"\n")
        return line + newline


def call_within(
    timeout_s: float,
    call: Callable[[], T],
    late: Callable[[], DualdistError],
    find_problem: Callable[[], DualdistError | None] = lambda: None,
) -> T:
    """Return call(), or raise late() after timeout_s seconds, or what `find_problem` returns in the meantime.

    The call runs in a daemon thread. If it never returns, the thread stays behind without keeping the process alive:
    the caller is expected to end the job, or to leave what the thread waits for alone.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # re-raised in the caller's thread below
            outcome.set_exception(error)

    threading.Thread(target=run, name="dualdist-deadline", daemon=True).start()
    deadline = Deadline(timeout_s)
    while not wait([outcome], min(PROBLEM_POLL_S, deadline.left_s())).done:
        if (problem := find_problem()) is not None:
            raise problem
        if deadline.passed():
            raise late()
    return outcome.result()


def stop_at_exit(stop: Callable[[], None]) -> None:
    """Call stop() at exit; exit with status 1 if it does not return in time, as when it waits for a lost rank."""
    has_failed = isinstance(getattr(sys, "last_value", None), CollectiveError)
    limit_s = EXIT_FAILED_S if has_failed else EXIT_S
    try:
        call_within(limit_s, stop, lambda: RankLostError(f"another rank did not answer for {limit_s:g} s"))
    except RankLostError as error:
        print(f"dualdist: {error}; exiting without waiting for it", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def wait_until_read(output: int) -> None:
    """Wait, for at most a second, until the reader of the pipe `output` has read all of it."""
    deadline = Deadline(READ_S)
    with contextlib.suppress(OSError):
        while stat.S_ISFIFO(os.fstat(output).st_mode) and not deadline.passed():
            unread = bytearray(4)
            fcntl.ioctl(output, termios.FIONREAD, unread)
            if int.from_bytes(unread, sys.byteorder) == 0:
                return
            time.sleep(POLL_S)
