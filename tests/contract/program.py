"""What every rank of a contract job runs: all laws in one session, a training run, and the way out and in again.

    python program.py [BACKEND]
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import torch
from torch import nn

import dualdist as dd
from contract.laws import LAWS, digest, loss_of, net, raises
from dualdist.errors import NotInitializedError
from harness.jobs import report

STEPS = 60


def train(rank: int, size: int) -> str:
    """A hash of the parameters after STEPS steps with momentum, weight decay, clipping and an untouched parameter.

    Four batches a step, whatever the size, so that one rank, two and four see the same data.
    """
    model = net(seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    dd.broadcast_parameters(model)
    dd.wrap_optimizer(optimizer, model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, number, step) for number in range(4) if number % size == rank]
        (sum(losses) * size / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return digest(model)


def failures() -> Iterator[tuple[str, str]]:
    for name, check in LAWS.items():
        try:
            check()
        except Exception:
            yield name, traceback.format_exc()


def main() -> None:
    torch.set_num_threads(1)
    backend = sys.argv[1] if len(sys.argv) > 1 else None
    raises(NotInitializedError, dd.rank, "before dd.init()")
    dd.init(backend, timeout_s=40)
    rank = dd.rank()
    result = {
        "rank": rank,
        "size": dd.size(),
        "local_rank": dd.local_rank(),
        "local_size": dd.local_size(),
        "node": dd.node(),
        "nodes": dd.nodes(),
        "launcher": dd.launcher(),
        "backend": dd.backend(),
        "transport": dd.transport(),
        "hash": train(rank, dd.size()),
        "failures": dict(failures()),
    }
    dd.shutdown()
    raises(NotInitializedError, dd.size, "after dd.shutdown()")
    dd.init(backend, timeout_s=40)
    result["again"] = dd.allreduce(torch.tensor(rank), "sum").item()
    dd.shutdown()
    report(rank, result)


if __name__ == "__main__":
    main()
