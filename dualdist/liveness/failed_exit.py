"""Failed exit: a rank whose collective failed exits with an error that its launcher sees, even if it was ignored."""

import logging
import os
import signal
import sys
import time
from pathlib import Path

from dualdist.utils.deadline import STDERR, wait_until_read

HYDRA = "hydra_pmi_proxy"
CONTINUED = "the program continued after a failed collective"


def exit_if_continued(since: float, timeout_s: float, failure: str) -> None:
    """Raise SystemExit if the program has continued since a failure for so long that its peers have timed out."""
    continued_s = time.monotonic() - since
    if continued_s > timeout_s:
        _print(f"{CONTINUED}, for {continued_s:.0f} s", failure)
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
