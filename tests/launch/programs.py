"""Functions and programs that the tests of this folder start as ranks."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from harness.jobs import report

import dualdist as dd


def identity(extra: str) -> tuple[int, int, str, str, str]:
    dd.init(timeout_s=30)
    found = (dd.rank(), dd.size(), dd.launcher(), dd.backend(), extra)
    dd.shutdown()
    return found


def one_fails(how: str) -> None:
    dd.init(timeout_s=30)
    if dd.rank() == 1:
        if how == "raises":
            raise ValueError("rank 1's own mistake")
        os._exit(7)
    time.sleep(60)


def cannot_be_sent_back() -> Any:
    return lambda: None


class Unsendable(Exception):
    """Cannot be unpickled: made from two values, pickled as one."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first}, {second}")


def raises_what_cannot_be_sent() -> None:
    raise Unsendable(1, 2)


def one_dies_while_others_wait() -> None:
    dd.init(timeout_s=30)
    if dd.rank() == 1:
        os._exit(7)
    dd.barrier()


def beside_an_existing_group(rank: int, size: int, init_method: str) -> None:
    """Use the program's own process group by dualdist, and again after dd.shutdown()."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size)
    dd.init(timeout_s=30)
    names = ("rank", "size", "local_rank", "local_size", "backend", "transport")
    seen = {name: getattr(dd, name)() for name in names}
    seen["sum"] = dd.allreduce(torch.tensor(float(rank + 1)), "sum").item()
    dd.shutdown()
    still = torch.ones(1)
    dist.all_reduce(still)
    dist.destroy_process_group()
    report(rank, seen | {"still": still.item()})


if __name__ == "__main__":
    rank, size, init_method = sys.argv[1:]
    beside_an_existing_group(int(rank), int(size), init_method)
