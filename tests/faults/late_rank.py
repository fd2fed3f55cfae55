"""A rank that does not come back: python late_rank.py BACKEND CASE [WHERE]; the others wait 6 seconds for it.

WHERE is "operation" or "step", in which they wait, or "regardless": they go on as if nothing had happened. The last one
comes to it a while after the first.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable

import torch

import dualdist as dd

TIMEOUT_S = 6
BEHIND_S = 2


def loops_for_ever() -> None:
    while True:
        time.monotonic()


def keeps_the_lock() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, in which no other thread of Python runs


# Which rank, and what it does.
CASES: dict[str, dict[int, Callable[[], object]]] = {
    "loops": {1: loops_for_ever},
    "loops and keeps": {1: loops_for_ever, 3: keeps_the_lock},
    "never comes back": {1: lambda: time.sleep(60 * TIMEOUT_S)},
}


def arrive(case: str) -> None:
    CASES[case].get(dd.rank(), lambda: None)()
    if dd.rank() == 2:
        time.sleep(BEHIND_S)


def takes_steps(case: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    for step in range(2):
        if step:
            arrive(case)
        weight.sum().backward()
        optimizer.step()


def goes_on_regardless(case: str) -> None:
    for turn in range(3):
        with contextlib.suppress(dd.DualdistError):
            if turn == 0:
                arrive(case)
            dd.allreduce(torch.ones(3), name="the.sum")


def main(backend: str, case: str, where: str = "operation") -> None:
    dd.init(backend, timeout_s=TIMEOUT_S)
    dd.allreduce(torch.ones(3))
    if where == "step":
        takes_steps(case)
    elif where == "regardless":
        goes_on_regardless(case)
    else:
        arrive(case)
        dd.allreduce(torch.ones(3), name="the.sum")
    dd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
