"""Failed exit: a rank whose collective failed exits with an error that its launcher sees, even if it was ignored."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

from dualdist.utils.deadline import STDERR, wait_until_read

HYDRA = "hydra_pmi_proxy"
CONTINUED = "the program continued after a failed collective"


class RefusedCalls:
    """Calls that the program made after a collective had failed, each of which raised again."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def __bool__(self) -> bool:
        return self._first_at is not None

    def add(self, timeout_s: float, failure: BaseException) -> None:
        """Count a call; raise SystemExit if the program has continued for so long that its peers have timed out."""
        now = time.monotonic()
        self._first_at = now if self._first_at is None else self._first_at
        if now > self._first_at + timeout_s:
            _print(f"{CONTINUED}, for {now - self._first_at:.0f} s", str(failure))
            raise SystemExit(1)


def exit_if_failed(failure: str) -> None:
    """Exit with status 1 if `failure`, of a collective after which the program continued, is not empty; for atexit."""
    if getattr(sys, "last_value", None) is not None:
        if _is_under_hydra():
            _exit()
    elif failure:
        _print(f"{CONTINUED}; exits with status 1 regardless", failure)
        _exit()


def _is_under_hydra() -> bool:
    """Return True if MPICH's launcher started this process.

    It ends the other ranks only if one dies by a signal. If one exits with a status, it waits for them, forever if one
    is stuck.
    """
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() == HYDRA
    except OSError:
        return False


def _exit() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if _is_under_hydra():
        wait_until_read(STDERR)  # the launcher's reader is killed too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)


def _print(message: str, failure: str) -> None:
    print(f"dualdist: {message}: {failure.splitlines()[0]}", file=sys.stderr, flush=True)
