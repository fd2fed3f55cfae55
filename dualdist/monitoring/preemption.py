"""After which step all ranks stop: one of them is told to, by a signal or a file, and all stop at the same place.

Note [last step]: a rank that is told to stop must not stop by itself, as the others would wait for it; and to ask each
other after every step whether one was told would cost every step something. So a thread of each rank looks into the
job's store once a second. When it finds the request there, it answers with the number of the step that this rank has
done, and from then on this rank goes no further than the next step until all answers are known. The last step is the
one after the highest answer: nobody is past it, and all come to it, as they do the same steps. Those who wait for
answers wait for threads only, never for a rank that waits for theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dualdist.backends.base import Store
from dualdist.errors import CollectiveTimeoutError, RendezvousError, UsageError
from dualdist.utils.deadline import Deadline
from dualdist.utils.exit_codes import DONE, NOTICE, SIGNALS

LOOK_S = 1.0
POLL_S = 0.02
# Seconds in which a rank's thread answers, unless the rank is gone.
ANSWER_S = 15.0
CLOSE_S = 2.5

STOP, CHANGE = "stop", "change"


class PreemptionNotice:
    """What this rank was told to do: by SIGTERM or SIGUSR1, by a file that appears, or by the program itself."""

    def __init__(self, file: Path | None = None) -> None:
        self.kind = ""
        self.reason = ""
        self.file = file
        self.launcher_requests: Sequence[str] = ()  # of a launcher, whose ranks come and go
        self._listens_to: list[signal.Signals] = []

    def request(self, kind: str, reason: str) -> None:
        """Only the first time counts. For any thread, and for signal handlers: it takes no lock."""
        if not self.kind:
            self.reason = reason
            self.kind = kind  # last, for other threads look at it first

    def install_handlers(self) -> None:
        """Signals that would end this process tell it to stop; those for which the program has a handler do not.

        Only the main thread can arrange that; elsewhere nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if number not in self._listens_to and signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._on_signal)
                self._listens_to.append(number)

    def poll(self) -> None:
        """See whether there is news, or the file."""
        if self.launcher_requests:
            self.request(CHANGE, self.launcher_requests[0])
        if self.file is not None and not self.kind:
            with contextlib.suppress(OSError):
                with os.scandir(self.file.parent) as entries:
                    next(entries, None)  # so that NFS looks again for a file that was not there a moment ago
                if self.file.exists():
                    self.request(STOP, f"the file {self.file}")

    def acknowledge(self) -> None:
        """Whoever wrote the file finds that the job has stopped, and saved its state."""
        if self.file is not None:
            self.file.with_name(self.file.name + DONE).touch()

    def close(self) -> None:
        """Signals end this process again."""
        if threading.current_thread() is threading.main_thread():
            for number in self._listens_to:
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL)
        self._listens_to.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(STOP, signal.Signals(number).name)


class LastStep:
    """Finds the step after which all ranks do what one of them was told: Note [last step].

    The store is None where there is one rank.
    """

    def __init__(
        self,
        notice: PreemptionNotice,
        store: Store | None,
        key: str,
        ranks: Sequence[int],
        rank: int,
        *,
        look_s: float = LOOK_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.notice = notice
        self._look_s = look_s
        self._answer_s = answer_s
        self._store = store
        self._key = key
        self._ranks = ranks
        self._rank = rank
        self._steps = 0
        self._lock = threading.Lock()
        self._has_answered = False
        self._last: int | None = None
        self._found: tuple[str, str] = "", ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="dualdist-last-step", daemon=True)

    def start(self) -> None:
        """Look from now on whether another rank was told something."""
        self._thread.start()
        atexit.register(self.close)  # as for RankProbe: a thread in the store's code must not outlive the interpreter

    def after_step(self) -> tuple[str, str]:
        """This rank has done one step more. What all ranks do now, and why: both empty where they go on.

        Every rank calls this after every step; only where a rank was told something does it wait for answers.
        """
        with self._lock:
            self._steps += 1
            must_know = self._has_answered
        if not must_know and not self.notice.kind:
            return "", ""
        if self._store is None:
            return self.notice.kind, self.notice.reason
        try:
            if not must_know:
                self._ask(self._store)
                self._answer(self._store)
            if self._last is None:
                self._wait(self._store)
        except (RendezvousError, TimeoutError) as error:
            raise CollectiveTimeoutError(f"the ranks are to stop together, but {error}") from error
        assert self._last is not None
        return self._found if self._steps >= self._last else ("", "")

    def close(self) -> None:
        """This rank does no more steps, and answers no more."""
        atexit.unregister(self.close)
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _look(self) -> None:
        """What the thread does."""
        while not self._stop.wait(self._look_s):
            self.notice.poll()
            if self._store is None:
                continue
            try:
                if self.notice.kind:
                    self._ask(self._store)
                if self._store.has(self._at("asked")):
                    self._answer(self._store)
                    return
            except (RendezvousError, TimeoutError):
                return  # the process that served the store has ended; whoever waits learns it from the operation
        if self._store is not None:
            with contextlib.suppress(RendezvousError, TimeoutError):
                self._answer(self._store)  # the others need not wait for this rank's

    def _ask(self, store: Store) -> None:
        """The first request counts."""
        if not store.has(self._at("asked")) and store.add(self._at("askers"), 1) == 1:
            where = f" on rank {self._rank}" if len(self._ranks) > 1 else ""
            store.set(self._at("asked"), f"{self.notice.kind} {self.notice.reason}{where}")

    def _answer(self, store: Store) -> None:
        """Tell the others, once, how far this rank is; the last one to tell finds the last step."""
        with self._lock:
            if self._has_answered:
                return
            self._has_answered = True
            steps = self._steps
        store.set(self._at(f"answer/{self._rank}"), str(steps))
        if store.add(self._at("answers"), 1) == len(self._ranks):
            answers = [int(store.get(self._at(f"answer/{rank}"), self._answer_s)) for rank in self._ranks]
            store.set(self._at("last"), str(1 + max(answers)))

    def _wait(self, store: Store) -> None:
        """Until the last step is known; CollectiveTimeoutError where a rank does not answer."""
        deadline = Deadline(self._answer_s)
        while not store.has(self._at("last")):
            if deadline.passed():
                silent = [str(rank) for rank in self._ranks if not store.has(self._at(f"answer/{rank}"))]
                raise CollectiveTimeoutError(
                    f"the ranks are to stop together, but rank {', '.join(silent)} did not say within "
                    f"{self._answer_s:g} s how far it is: ended or stopped"
                )
            deadline.sleep(POLL_S)
        self._last = int(store.get(self._at("last"), self._answer_s))
        kind, _, words = store.get(self._at("asked"), self._answer_s).partition(" ")
        self._found = kind, words

    def _at(self, name: str) -> str:
        return f"{self._key}/last-step/{name}"


def unhandled_signals() -> tuple[signal.Signals, ...]:
    """The signals that tell this process to stop, or would end it; for the others the program has a handler.

    None where a process cannot learn who sent it a signal: it could not obey its parent.
    """
    if sys.platform != "linux":
        return ()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return tuple(
        number
        for number, handler in handlers.items()
        if handler == signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), PreemptionNotice)
    )


@contextlib.contextmanager
def block_signals(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Processes that this thread starts in the block, and all their threads, get none of the signals; this one later.

    Until obey_parent() nothing but SIGKILL ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_with_parent(numbers: Collection[signal.Signals]) -> None:
    """From now on only the parent ends this process by the signals, and its own end does.

    As torch's own workers have it, except that they end their rank, too, where anybody else sends the signal.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not numbers:
        return
    started_by = os.getppid()  # not the parent where a server of multiprocessing forks, which may outlive it

    def exit_on_signal() -> None:
        # A forked process does not see the end of its parent by is_alive() while later ones run.
        while parent.is_alive() and os.getppid() == started_by:
            came = signal.sigtimedwait(numbers, LOOK_S)
            if came is not None and came.si_pid == parent.pid:
                break
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # in this thread, and in those that it starts
    _leave_unblocked_in_children(numbers)
    threading.Thread(target=exit_on_signal, name="dualdist-notices", daemon=True).start()


def _leave_unblocked_in_children(numbers: Collection[signal.Signals]) -> None:
    """Programs and processes that this process starts can be ended by the signals: they would inherit what is blocked.

    While it starts a program a signal of anybody else's ends this process, too.
    """
    popen: Any = subprocess.Popen
    execute = popen._execute_child

    @functools.wraps(execute)
    def execute_unblocked(*args: Any, **options: Any) -> None:
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        try:
            execute(*args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    popen._execute_child = execute_unblocked
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers))


def parse_notice_file(text: str | None) -> Path | None:
    """The file that the variable names; UsageError where that depends on the folder."""
    if not text:
        return None
    path = Path(text)
    if not path.is_absolute():
        raise UsageError(f"{NOTICE}={text!r}: expected the full path of a file, whose appearance tells the job to stop")
    return path
