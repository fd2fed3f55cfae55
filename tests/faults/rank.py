"""A rank to which something happens: python rank.py BACKEND [CASE]; it waits at most 6 seconds for another rank."""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch

import dualdist as dd

TIMEOUT_S = 6
NAMED_S = 4  # after the time limit, in which a rank that does not arrive is named
BEHIND_S = 2  # by which the last of several ranks comes later than the first


def fail(message: str) -> NoReturn:
    raise ValueError(message)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_forever() -> None:
    while True:
        time.monotonic()


def hold_the_gil() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, in which no other thread of Python runs


def begin_another() -> None:
    dd.allreduce(torch.ones(3), name="another", async_op=True)
    time.sleep(3 * TIMEOUT_S)


# What ranks do between two sums.
BETWEEN: dict[str, dict[int, Callable[[], object]]] = {
    "raises": {1: lambda: fail("this rank's own mistake")},
    "exits": {1: lambda: sys.exit(5)},
    "is killed": {1: lambda: os.kill(os.getpid(), signal.SIGKILL)},
    "stops": {1: stop},
    "is late": {1: lambda: time.sleep(3 * TIMEOUT_S)},
    "begins another": {1: begin_another},
    "the first stops": {0: stop},
    "fails once": {1: lambda: os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and fail("the first try fails")},
    "loops and holds the GIL": {1: loop_forever, 2: lambda: time.sleep(BEHIND_S), 3: hold_the_gil},
}


def leave_one_unfinished() -> None:
    if dd.rank() == 1:
        dd.allreduce(torch.ones(3), name="never.met", async_op=True)


def wait_for_a_stopped_rank() -> None:
    if dd.rank() == 0:
        dd.join()
    stop()


def join_early() -> None:
    """Join on rank 0, while the others compute for longer than the timeout, and reduce once more."""
    if dd.rank() == 0:
        assert dd.join() == dd.size() - 1
        return
    time.sleep(1.5 * TIMEOUT_S)
    assert dd.allreduce(torch.ones(1), "sum").item() == dd.size() - 1
    assert dd.join() == dd.size() - 1


def begin_late() -> None:
    """Begin an operation on the last rank a while after the others, within the timeout."""
    if dd.rank() == dd.size() - 1:
        time.sleep(TIMEOUT_S / 3)
    dd.allreduce(torch.ones(3), "sum", name="begun", async_op=True).wait()


def work_long_before_a_barrier() -> None:
    """Let the others wait for rank 0 for longer than the timeout, by a limit of the call."""
    if dd.rank() == 0:
        time.sleep(1.3 * TIMEOUT_S)
    dd.barrier(timeout_s=3 * TIMEOUT_S)


def wait_in_one_session() -> None:
    """Run these one after the other; what is unfinished comes last."""
    for happens in (begin_late, join_early, work_long_before_a_barrier, leave_one_unfinished):
        happens()
        sys.stdout.write(f"done: {happens.__name__}\n")


def take_steps(count: int, arrive: Callable[[], None]) -> None:
    """Take two optimizer steps with a gradient of `count` elements; `arrive` comes before the second."""
    weight = torch.nn.Parameter(torch.ones(count))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    for step in range(2):
        if step == 1:
            arrive()
        weight.sum().backward()
        optimizer.step()


def stop_rank_1() -> None:
    if dd.rank() == 1:
        stop()


def connect_after_rank_0_stopped(connect: Callable[[], object]) -> None:
    """Connect the ranks once more, while rank 0, which may serve the store, is stopped: named in time."""
    if dd.rank() == 0:
        stop()
    began = time.monotonic()
    try:
        connect()
    finally:
        assert time.monotonic() - began < TIMEOUT_S + NAMED_S, "rank 0 was named too late"


def wrap_an_optimizer() -> None:
    dd.wrap_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0))


def loop_on_rank_1() -> None:
    if dd.rank() == 1:
        loop_forever()
    if dd.rank() == 2:
        time.sleep(BEHIND_S)


def continue_after_errors() -> None:
    """Never return on rank 1; on the others go on as if the collective had not failed, and end."""
    for turn in range(3):
        with contextlib.suppress(dd.DualdistError):
            if turn == 0:
                time.sleep({1: 60 * TIMEOUT_S, 2: BEHIND_S}.get(dd.rank(), 0))
            dd.allreduce(torch.ones(3), name="the.sum")
    dd.shutdown()
    sys.exit()


# What all ranks do between two sums.
OPERATIONS: dict[str, Callable[[], object]] = {
    "joined": wait_for_a_stopped_rank,
    "is waited for": wait_in_one_session,
    "stops in a small step": lambda: take_steps(3, stop_rank_1),
    "stops in a large step": lambda: take_steps(1 << 18, stop_rank_1),
    "the first stops before a wrap": lambda: connect_after_rank_0_stopped(wrap_an_optimizer),
    "the first stops before a group": lambda: connect_after_rank_0_stopped(lambda: dd.new_group([0, 1])),
    "loops in a step": lambda: take_steps(3, loop_on_rank_1),
    "continues after errors": continue_after_errors,
}


def main(backend: str, case: str = "") -> None:
    dd.init(backend, timeout_s=TIMEOUT_S)
    dd.allreduce(torch.ones(3))
    BETWEEN.get(case, {}).get(dd.rank(), lambda: None)()
    OPERATIONS.get(case, lambda: None)()
    dd.allreduce(torch.ones(3), name="the.sum")
    if case != "no shutdown":
        dd.shutdown()
    if case.startswith("to "):
        dd.init(case.removeprefix("to "), timeout_s=TIMEOUT_S)
        dd.allreduce(torch.ones(3))
        dd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
