"""A program that goes on although an operation between ranks has failed does not end as one that succeeded."""

from __future__ import annotations

import logging
import os
import sys
import time

REGARDLESS = "the program went on after an operation between ranks had failed"


class Refusals:
    """Calls between ranks that a program made after one had failed, each of which raised an error again."""

    def __init__(self) -> None:
        self._first: float | None = None

    def __bool__(self) -> bool:
        return self._first is not None

    def add(self, timeout_s: float, failure: BaseException) -> None:
        """SystemExit where the program has gone on for so long that no other rank waits for it any more."""
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        if now > self._first + timeout_s:
            _say(f"{REGARDLESS}, for {now - self._first:.0f} s", str(failure))
            raise SystemExit(1)


def end(failure: str) -> None:
    """For atexit: the exit code is not 0, whatever the program thinks, unless an exception ends it anyway."""
    if getattr(sys, "last_value", None) is not None:
        return
    _say(f"{REGARDLESS}, and ends with code 1", failure)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)


def _say(what: str, failure: str) -> None:
    print(f"dualdist: {what}: {failure.splitlines()[0]}", file=sys.stderr, flush=True)
