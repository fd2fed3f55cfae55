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


def leaves_one_unfinished() -> None:
    if dd.rank() == 1:
        dd.allreduce(torch.ones(3), name="never.met", async_op=True)


def waits_for_a_stopped_rank() -> None:
    if dd.rank() == 0:
        dd.join()
    os.kill(os.getpid(), signal.SIGSTOP)


def joins_early() -> None:
    """The first rank has joined while the others compute for longer than the timeout, and reduce once more."""
    if dd.rank() == 0:
        assert dd.join() == dd.size() - 1
        return
    time.sleep(1.5 * TIMEOUT_S)
    assert dd.allreduce(torch.ones(1), "sum").item() == dd.size() - 1
    assert dd.join() == dd.size() - 1


def last_rank_begins_late() -> None:
    """The others have begun an operation; the last one comes after a while, within the timeout."""
    if dd.rank() == dd.size() - 1:
        time.sleep(TIMEOUT_S / 3)
    dd.allreduce(torch.ones(3), "sum", name="begun", async_op=True).wait()


def is_waited_for() -> None:
    """One after the other in one session, each of which the rank says; what is unfinished comes last."""
    for happens in (last_rank_begins_late, joins_early, leaves_one_unfinished):
        happens()
        sys.stdout.write(f"done: {happens.__name__}\n")


def stops_in_a_step(count: int) -> None:
    """One rank does not come to the backward of a second step, whose gradient has so many elements."""
    weight = torch.nn.Parameter(torch.ones(count))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    for step in range(2):
        if step == 1 and dd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        weight.sum().backward()
        optimizer.step()


# What all ranks do between two sums.
OPERATIONS: dict[str, Callable[[], object]] = {
    "joined": waits_for_a_stopped_rank,
    "is waited for": is_waited_for,
    "stops in a small step": lambda: stops_in_a_step(3),
    "stops in a large step": lambda: stops_in_a_step(1 << 18),
}


def main(backend: str, case: str = "") -> None:
    dd.init(backend, timeout_s=TIMEOUT_S)
    dd.allreduce(torch.ones(3))
    rank, happens = BETWEEN.get(case, (-1, None))
    if rank == dd.rank() and happens is not None:
        happens()
    OPERATIONS.get(case, lambda: None)()
    dd.allreduce(torch.ones(3), name="the.sum")
    if case == "twice":
        dd.init(backend)
    if case != "no shutdown":
        dd.shutdown()
    if case.startswith("to "):
        dd.init(case.removeprefix("to "), timeout_s=TIMEOUT_S)
        dd.allreduce(torch.ones(3))
        dd.shutdown()
    if case == "after":
        dd.allreduce(torch.ones(3))


if __name__ == "__main__":
    main(*sys.argv[1:])
