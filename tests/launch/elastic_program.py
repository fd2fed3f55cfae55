"""A training by Horovod's elastic names, in which an operation fails: python elastic_program.py [HURT_AT_BATCH]."""

from __future__ import annotations

import sys
from typing import Any

import torch
from contract.oracle import loss_of, net
from harness.jobs import report

import dualdist.hvd as hvd

BATCHES = 6


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    model = net(seed=hvd.rank())  # the state makes them alike
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, batch=hvd.rank(), seen=[])
    hurt_at = [int(number) for number in sys.argv[1:]]
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < BATCHES:
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), state.batch).backward()
            optimizer.step()
            state.seen.append(state.batch)
            state.batch += 1
            if state.batch in hurt_at:
                hurt_at.remove(state.batch)
                hvd.allreduce(torch.ones(1 + hvd.rank()))  # of different shapes, which no rank survives
            if state.batch % 2 == 0:
                state.commit()

    train(state)
    parameters = torch.cat([param.detach().flatten() for param in model.parameters()])
    report(hvd.rank(), {"parameters": parameters.tolist(), "seen": state.seen, "resets": resets})
    hvd.shutdown()


if __name__ == "__main__":
    main()
