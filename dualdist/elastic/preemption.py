"""Preemption: one rank gets a signal or sees a file, and all ranks stop after the same step.

Note [last step]: a rank that is preempted must not stop alone, as the others would wait for it, and a collective after
every step would slow down each step. So a thread of each rank polls the job's store once a second. When it finds a
request there, it answers with the number of steps that this rank has done, and from then on this rank does at most one
more step until all answers are known. The last step is the one after the highest answer: no rank is past it, and all
reach it. Ranks wait for answers of threads only, so there is no deadlock.
"""

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from dualdist.backends.base import Store
from dualdist.errors import CollectiveTimeoutError, RankLostError, RendezvousError, UsageError
from dualdist.utils.deadline import Deadline
from dualdist.utils.suggest import format_ranks
from dualdist.utils.variables import DONE, NOTICE, PREEMPTION_SIGNALS

POLL_S = 1.0
ANSWER_POLL_S = 0.02
# Seconds in which a live rank's thread answers.
ANSWER_S = 15.0
CLOSE_S = 2.5

STOP, CHANGE = "stop", "change"


class PreemptionNotice:
    """A request to this rank to stop: by SIGTERM or SIGUSR1, by a file that appears, or by the program."""

    def __init__(self, file: Path | None = None) -> None:
        self.kind = ""
        self.reason = ""
        self.file = file
        self.launcher_requests: Sequence[str] = ()  # what an elastic launcher reported
        self._handled: list[signal.Signals] = []

    def request(self, kind: str, reason: str) -> None:
        """Record the first request. Takes no lock: callable from any thread and from signal handlers."""
        if not self.kind:
            self.reason = reason
            self.kind = kind  # last, since other threads check it first

    def install_handlers(self) -> None:
        """Turn signals that would kill this process into requests, unless the program handles them.

        Does nothing outside the main thread, which alone can set handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in PREEMPTION_SIGNALS:
            if number not in self._handled and signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._on_signal)
                self._handled.append(number)

    def poll(self) -> None:
        """Check for the launcher's requests and for the file."""
        if self.launcher_requests:
            self.request(CHANGE, self.launcher_requests[0])
        if self.file is not None and not self.kind:
            with contextlib.suppress(OSError):
                with os.scandir(self.file.parent) as entries:
                    next(entries, None)  # refreshes NFS's cache of missing files
                if self.file.exists():
                    self.request(STOP, f"the file {self.file}")

    def acknowledge(self) -> None:
        """Tell the file's writer that the job stops and can be queued again."""
        if self.file is not None:
            self.file.with_name(self.file.name + DONE).touch()

    def close(self) -> None:
        """Restore the default signal handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in self._handled:
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL)
        self._handled.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(STOP, signal.Signals(number).name)

    _on_signal.requests_stop = True  # type: ignore[attr-defined]  # for worker_signals.py


class LastStep:
    """Finds the step after which all ranks follow a request to one of them: Note [last step].

    `store` is None in a job of one rank.
    """

    def __init__(
        self,
        notice: PreemptionNotice,
        store: Store | None,
        key: str,
        ranks: Sequence[int],
        rank: int,
        *,
        poll_s: float = POLL_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.notice = notice
        self._poll_s = poll_s
        self._answer_s = answer_s
        self._store = store
        self._key = f"{key}/last-step"
        self._ranks = ranks
        self._rank = rank
        self._steps = 0
        self._lock = threading.Lock()
        self._has_published = False
        self._last: int | None = None
        self._result: tuple[str, str] = "", ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll_requests, name="dualdist-last-step", daemon=True)

    def start(self) -> None:
        """Start polling for requests of other ranks."""
        self._thread.start()
        atexit.register(self.close)  # as in RankProbe: a thread in the store's code must not outlive the interpreter

    def after_step(self) -> tuple[str, str]:
        """Count a step; return what all ranks do now and the reason, ("", "") to continue.

        Every rank calls this after every step. It waits for answers only if there is a request.
        """
        with self._lock:
            self._steps += 1
            must_wait = self._has_published
        if not must_wait and not self.notice.kind:
            return "", ""
        if self._store is None:
            return self.notice.kind, self.notice.reason
        try:
            if not must_wait:
                self._publish_request(self._store)
                self._publish_steps(self._store)
            if self._last is None:
                self._await_last_step(self._store)
        except RendezvousError as error:
            raise RankLostError(f"the ranks are to stop together, but {error}") from error
        except TimeoutError as error:
            raise CollectiveTimeoutError(f"the ranks are to stop together, but {error}") from error
        assert self._last is not None
        return self._result if self._steps >= self._last else ("", "")

    def close(self) -> None:
        """Stop polling; this rank does no more steps."""
        atexit.unregister(self.close)
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _poll_requests(self) -> None:
        """Run in the thread."""
        while not self._stop.wait(self._poll_s):
            self.notice.poll()
            if self._store is None:
                continue
            try:
                if self.notice.kind:
                    self._publish_request(self._store)
                if self._store.has(f"{self._key}/request"):
                    self._publish_steps(self._store)
                    return
            except (RendezvousError, TimeoutError):
                return  # the process that served the store has exited; operations raise that
        if self._store is not None:
            with contextlib.suppress(RendezvousError, TimeoutError):
                self._publish_steps(self._store)  # other ranks need not wait for it

    def _publish_request(self, store: Store) -> None:
        """Publish this rank's request, if it is the first."""
        if not store.has(f"{self._key}/request") and store.add(f"{self._key}/requests", 1) == 1:
            where = f" on rank {self._rank}" if len(self._ranks) > 1 else ""
            store.set(f"{self._key}/request", f"{self.notice.kind} {self.notice.reason}{where}")

    def _publish_steps(self, store: Store) -> None:
        """Publish this rank's step count, once; the last rank to answer computes the last step."""
        with self._lock:
            if self._has_published:
                return
            self._has_published = True
            steps = self._steps
        store.set(f"{self._key}/answer/{self._rank}", str(steps))
        if store.add(f"{self._key}/answers", 1) == len(self._ranks):
            answers = [int(store.get(f"{self._key}/answer/{rank}", self._answer_s)) for rank in self._ranks]
            store.set(f"{self._key}/last", str(1 + max(answers)))

    def _await_last_step(self, store: Store) -> None:
        """Wait until the last step is known; raise CollectiveTimeoutError if a rank does not answer."""
        deadline = Deadline(self._answer_s)
        while not store.has(f"{self._key}/last"):
            if deadline.passed():
                silent = [rank for rank in self._ranks if not store.has(f"{self._key}/answer/{rank}")]
                raise CollectiveTimeoutError(
                    f"the ranks are to stop together, but {format_ranks(silent)} did not report a step count within "
                    f"{self._answer_s:g} s: exited or stopped"
                )
            deadline.sleep(ANSWER_POLL_S)
        self._last = int(store.get(f"{self._key}/last", self._answer_s))
        kind, _, reason = store.get(f"{self._key}/request", self._answer_s).partition(" ")
        self._result = kind, reason


def parse_notice_file(text: str | None) -> Path | None:
    """Return the path in the variable's value; raise UsageError for a relative one."""
    if not text:
        return None
    path = Path(text)
    if not path.is_absolute():
        raise UsageError(f"{NOTICE}={text!r}: expected the absolute path of a file, whose creation requests a stop")
    return path
