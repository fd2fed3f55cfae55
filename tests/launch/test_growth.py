"""Start-up requests to the one store of a job grow with the number of ranks as the README says, and no faster.

Each rank runs this file, and counts its requests until its first allreduce is done, dualdist's and Gloo's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness.jobs import Launch, report

import dualdist as dd
from dualdist.backends.native import store

RANKS = 4
asked: Counter[str] = Counter()
TcpStore = dist.TCPStore


def counted(name: str) -> Callable[..., Any]:
    """Return a method that counts and calls the store's."""

    def call(self: Counting, *args: Any) -> Any:
        asked[name] += 1
        return getattr(self.store, name)(*args)

    return call


class Counting(dist.Store):
    """torch's TCPStore; every call is one round trip."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.store = TcpStore(*args, **kwargs)

    set, get, add = counted("set"), counted("get"), counted("add")
    check, wait, delete_key = counted("check"), counted("wait"), counted("delete_key")


def main() -> None:
    store.dist.TCPStore = Counting
    dd.init("native", timeout_s=60)
    dd.allreduce(torch.ones(1), "sum")
    rank, total = dd.rank(), asked.total()
    dd.shutdown()
    report(rank, {"total": total})


def test_a_rank_requests_a_few_keys_for_each_other_rank(launch: Launch) -> None:
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    totals = sorted(seen["total"] for seen in launch.reports(torchrun, RANKS, env={"DUALDIST_TRANSPORT": "gloo"}))
    assert all(0 < total <= 12 + 4 * RANKS for total in totals[:-1]), totals
    assert totals[-1] <= 16 + 7 * RANKS, totals  # the last rank to arrive reads what all have written


if __name__ == "__main__":
    main()
