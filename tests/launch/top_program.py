"""A rank that trains until it is killed; each step of the last rank takes longer, in slow()."""

import itertools
import time

import torch

import dualdist as dd

SLOW_S = 0.2


def slow() -> None:
    if dd.rank() == dd.size() - 1:
        time.sleep(SLOW_S)


def main() -> None:
    dd.init("native", timeout_s=60)
    model = torch.nn.Linear(4, 1)
    dd.broadcast_parameters(model)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in itertools.count():
        if step == 3:
            print("has taken steps", flush=True)
        slow()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
