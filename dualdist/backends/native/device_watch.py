"""A time limit for operations in a device's queue, for which the host does not wait."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from dualdist.errors import CollectiveError, CollectiveTimeoutError
from dualdist.utils.deadline import Deadline

LONGEST_PAUSE_S, POLL_S = 1.0, 0.001


class DeviceWatch:
    """Notices an operation that a device does not end in time.

    The program looks at earlier operations when it adds one. The thread looks only at those that are late: a question
    to the device from another thread would end the capture of a graph.

    Args:
        timeout_s: how long the device may take for an operation, with what was queued before it.
        on_late: called once with the error and the name of the operation that takes longer.
    """

    def __init__(self, timeout_s: float, on_late: Callable[[CollectiveError, str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._events: deque[tuple[torch.Event, str, float]] = deque()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def add(self, name: str, ended: torch.Event) -> None:
        """Watch an operation; they end in this order."""
        self._forget_ended()
        self._events.append((ended, name, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dualdist-device", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait until the device has ended all of them, at most for the time limit, and not after a failure."""
        self._closing.set()
        deadline = Deadline(self._timeout_s)
        with contextlib.suppress(RuntimeError):
            while self._events and not self._has_failed and not deadline.passed():
                self._forget_ended()
                deadline.sleep(POLL_S if self._events else 0.0)

    def _forget_ended(self) -> None:
        with self._lock:
            while self._events and self._events[0][0].query():
                self._events.popleft()

    def _run(self) -> None:
        while not self._closing.wait(min(LONGEST_PAUSE_S, self._timeout_s / 10)):
            try:
                first = self._events[0]
            except IndexError:
                continue
            _, name, since = first
            if time.monotonic() - since <= self._timeout_s:
                continue
            try:
                self._forget_ended()
            except RuntimeError as error:
                self._has_failed = True
                self._on_late(CollectiveError(f"the device failed ({error})"), name)
                return
            if self._events and self._events[0] is first:
                self._has_failed = True
                text = f"the device did not end it within {self._timeout_s:g} s; do not save what it has computed since"
                self._on_late(CollectiveTimeoutError(text), name)
                return
