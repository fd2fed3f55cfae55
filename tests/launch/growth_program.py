"""How often one rank asks the job's store until its first allreduce is done: python growth_program.py

Counts what dualdist asks, and what Gloo asks from C++, by a store in Python in front of torch's.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness.jobs import report

import dualdist as dd
from dualdist.backends.native import store

asked: Counter[str] = Counter()
TcpStore = dist.TCPStore


class Counting(dist.Store):
    """torch's TCPStore; every call is one round trip."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.store = TcpStore(*args, **kwargs)

    def set(self, key: str, value: Any) -> None:
        asked["set"] += 1
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        asked["get"] += 1
        value: bytes = self.store.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        asked["add"] += 1
        return int(self.store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        asked["check"] += 1
        return bool(self.store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        asked["wait"] += 1
        self.store.wait(keys, *([] if timeout is None else [timeout]))

    def delete_key(self, key: str) -> bool:
        asked["delete_key"] += 1
        return bool(self.store.delete_key(key))


def main() -> None:
    store.dist.TCPStore = Counting
    dd.init("native", timeout_s=60)
    dd.allreduce(torch.ones(1), "sum")
    rank = dd.rank()
    seen = {"rank": rank, "asked": dict(asked), "total": asked.total()}
    dd.shutdown()
    report(rank, seen)


if __name__ == "__main__":
    main()
