"""One rank that is traced: python timeline_program.py ENDING, which is shutdown, return or die (on rank 1)."""

import os
import sys

import torch

import dualdist as dd


def main(ending: str) -> None:
    dd.init(timeout_s=60)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(20):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        dd.allreduce(torch.ones(2), name=f"metric {step}")
    if ending == "shutdown":
        dd.shutdown()
    if ending == "die" and dd.rank() == 1:
        os._exit(7)
    if ending == "die":
        dd.allreduce(torch.ones(1))


if __name__ == "__main__":
    main(sys.argv[1])
