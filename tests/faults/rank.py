"""A rank to which something happens: python rank.py BACKEND [CASE]; it waits at most 6 seconds for another rank."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import dualdist as dd

TIMEOUT_S = 6


def main(backend: str, case: str = "") -> None:
    dd.init(backend, timeout_s=TIMEOUT_S)
    dd.allreduce(torch.ones(3))
    if dd.rank() == 1:
        match case:
            case "raises":
                raise ValueError("this rank's own mistake")
            case "exits":
                sys.exit(5)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "is late":
                time.sleep(3 * TIMEOUT_S)
    dd.allreduce(torch.ones(3), name="the.sum")
    if case == "twice":
        dd.init(backend)
    dd.shutdown()
    if case == "after":
        dd.allreduce(torch.ones(3))


if __name__ == "__main__":
    main(*sys.argv[1:])
