"""A rank that has failed ends so that its launcher sees it, even if its program went on as if nothing had happened."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

from dualdist.utils.output import STDERR, wait_until_read

HYDRA = "hydra_pmi_proxy"
REGARDLESS = "the program went on after an operation between ranks had failed"


class RefusedCalls:
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


def exit_if_failed(failure: str) -> None:
    """For atexit: the exit code is not 0, whatever the program thinks, unless an exception ends it anyway.

    `failure` is that of an operation after which the program went on, "" for none.
    """
    if getattr(sys, "last_value", None) is not None:
        if _only_signals_count():
            _leave()
    elif failure:
        _say(f"{REGARDLESS}, and ends with code 1", failure)
        _leave()


def _only_signals_count() -> bool:
    """Whether MPICH's launcher has started this process.

    It ends the other ranks where one ends by a signal. Where one ends with a code it waits for them, and for ever for
    one that is stuck.
    """
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() == HYDRA
    except OSError:
        return False


def _leave() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if _only_signals_count():
        wait_until_read(STDERR)  # it goes with the others
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)


def _say(what: str, failure: str) -> None:
    print(f"dualdist: {what}: {failure.splitlines()[0]}", file=sys.stderr, flush=True)
