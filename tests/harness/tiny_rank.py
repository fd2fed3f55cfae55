"""Rank program of launcher tests: initialize, sum integers, train a few steps, write a report, shut down.

    python tiny_rank.py BACKEND [STARTED_BY]

STARTED_BY names variables, separated by commas, whose values go into the report.
"""

import os
import sys

import torch
from harness import problem
from harness.jobs import report

import dualdist as dd

TIMEOUT_S = 60.0
"""Less than the launch helper's limit: a timeout names the missing ranks before the job is killed."""


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    if dd.rank() != 0:
        with torch.no_grad():
            next(model.parameters()).zero_()  # overwritten by rank 0's
    dd.broadcast_parameters(model)
    dd.wrap_optimizer(optimizer)
    for step in range(problem.STEPS):
        optimizer.zero_grad()
        problem.loss_of(model, dd.rank(), step).backward()
        optimizer.step()
    return problem.flat(model)


def main(backend: str, variables: str = "") -> None:
    model = problem.make_model()
    optimizer = problem.make_optimizer(model)  # imports much of torch: cheaper before ranks busy-wait in MPI
    dd.init(backend, timeout_s=TIMEOUT_S)
    powers = torch.tensor([1 << dd.rank(), 1 << 40], dtype=torch.int64)
    rank = dd.rank()
    seen = {
        "rank": rank,
        "size": dd.size(),
        "local_rank": dd.local_rank(),
        "local_size": dd.local_size(),
        "node_rank": dd.node_rank(),
        "num_nodes": dd.num_nodes(),
        "launcher": dd.launcher(),
        "backend": dd.backend(),
        "transport": dd.transport(),
        "sum": dd.allreduce(powers, op="sum").tolist(),
        "parameters": train(model, optimizer),
        "variables": {name: os.environ.get(name) for name in variables.split(",") if name},
    }
    dd.shutdown()
    report(rank, seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
