"""An elastic training by Horovod's names, undisturbed and then with failures on all ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from contract.oracle import loss_of, net
from harness.jobs import report

import dualdist.hvd as hvd
from dualdist.hvd.common import HorovodInternalError

BATCHES = 6


def trained(fail_at: list[int]) -> dict[str, Any]:
    """Train, failing on all ranks after each of these batches, and return the result."""
    hvd.init()
    model = net(seed=hvd.rank())  # the state makes them alike
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, batch=hvd.rank(), seen=[])
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
            if state.batch in fail_at:
                fail_at.remove(state.batch)
                raise HorovodInternalError("as where a network fails between two ranks that both live on")
            if state.batch % 2 == 0:
                state.commit()

    train(state)
    parameters = torch.cat([param.detach().flatten() for param in model.parameters()])
    hvd.shutdown()
    return {"parameters": parameters.tolist(), "seen": state.seen, "resets": resets}


def main() -> None:
    torch.set_num_threads(1)
    undisturbed = trained([])
    failing = trained([int(number) for number in sys.argv[1:]])
    hvd.init()
    report(hvd.rank(), {"undisturbed": undisturbed, "failing": failing})
    hvd.shutdown()


if __name__ == "__main__":
    main()
