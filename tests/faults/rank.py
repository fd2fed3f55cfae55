"""A rank to which something happens: python rank.py BACKEND [CASE]; it waits at most 6 seconds for another rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch

import dualdist as dd

TIMEOUT_S = 6


def fail(message: str) -> NoReturn:
    raise ValueError(message)


# What a rank does between two sums: (which rank, what).
BETWEEN: dict[str, tuple[int, Callable[[], object]]] = {
    "raises": (1, lambda: fail("this rank's own mistake")),
    "exits": (1, lambda: sys.exit(5)),
    "is killed": (1, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stops": (1, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "is late": (1, lambda: time.sleep(3 * TIMEOUT_S)),
    "the first stops": (0, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "fails once": (1, lambda: os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and fail("the first try fails")),
}


def late_rank_begins() -> None:
    """The others begin an operation and compute; the last one comes within the timeout, but after a second."""
    if dd.rank() == dd.size() - 1:
        time.sleep(2)
    handle = dd.allreduce(torch.ones(3), "sum", name="begun", async_op=True)
    handle.wait()


def main(backend: str, case: str = "") -> None:
    dd.init(backend, timeout_s=TIMEOUT_S)
    dd.allreduce(torch.ones(3))
    rank, happens = BETWEEN.get(case, (-1, None))
    if rank == dd.rank() and happens is not None:
        happens()
    if case == "unfinished" and dd.rank() == 1:
        dd.allreduce(torch.ones(3), name="never.met", async_op=True)
    if case == "late begun":
        late_rank_begins()
    dd.allreduce(torch.ones(3), name="the.sum")
    if case == "twice":
        dd.init(backend)
    if case != "no shutdown":
        dd.shutdown()
    if case == "changes":
        dd.init("horovod", timeout_s=TIMEOUT_S)
    if case == "after":
        dd.allreduce(torch.ones(3))


if __name__ == "__main__":
    main(*sys.argv[1:])
