"""Signals that end a program, turned into exceptions while it runs a job, and held off while it cleans up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from dualdist.utils.exit_codes import SIGNALS

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that it can clean up; only the main thread can arrange that.

    A SIGHUP that is ignored, as under nohup, stays so.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled([number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN], end):
        yield


@contextlib.contextmanager
def notices(hear: Callable[[int], None]) -> Iterator[None]:
    """What tells a job to stop does not end the block: hear() is called with the signal's number, wherever that is."""
    with _handled(list(SIGNALS), lambda number, frame: hear(number)):
        yield


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A signal that would end the block does so at its end: what it was starting is known by then, and can be ended."""
    came: list[int] = []
    numbers = [number for number in (signal.SIGINT, *ENDING) if signal.getsignal(number) != signal.SIG_IGN]
    try:
        with _handled(numbers, lambda number, frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No signal that asks the program to end interrupts the block: it is ending already."""
    with _handled([*ENDING, *SIGNALS, signal.SIGINT], signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handled(numbers: list[signal.Signals], handler: signal._HANDLER) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in dict.fromkeys(numbers)]
    try:
        yield
    finally:
        for number, previous in before:
            signal.signal(number, previous)
