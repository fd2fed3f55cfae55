"""An elastic Horovod script of which a rank is lost and returns: elastic_script.py BATCHES"""

import os
import signal
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch
from contract.oracle import loss_of, net
from harness.jobs import report


def main(batches: int) -> None:
    torch.set_num_threads(1)
    hvd.init()
    model = net(seed=hvd.rank())  # the state makes them alike
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    sizes = [hvd.size()]
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < batches:
            if state.batch == 3 and hvd.size() == 2 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss_of(model, 0, state.batch).backward()  # of the same data on every rank: their number does not matter
            optimizer.step()
            state.batch += 1
            if state.batch == 5:
                while hvd.size() == 1:  # until the other is back
                    state.check_host_updates()
                    time.sleep(0.05)
            state.commit()

    train(state)
    parameters = torch.cat([param.detach().flatten() for param in model.parameters()])
    report(hvd.rank(), {"parameters": parameters.tolist(), "sizes": sizes})
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
