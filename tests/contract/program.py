"""What every rank of a contract job runs: all laws in one session, a training run, and the way out and in again.

python program.py [BACKEND]
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo  # optimizers would import it later, when it is no longer out of the collector's sight
from contract.laws import ALONE, LAWS, digest, loss_of, net, raises
from harness.jobs import report
from torch import nn

import dualdist as dd
from dualdist.errors import NotInitializedError

STEPS = 60
BATCHES = 4  # a step, whatever the number of ranks: one, two and four ranks see the same data
SEED = 3
CLIP = 0.5
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def train(model: nn.Module, parallel: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """STEPS steps with momentum, weight decay and clipping, on this rank's part of the batches."""
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = range(dd.rank(), BATCHES, dd.size())
        sum(loss_of(parallel, number, step) / len(mine) for number in mine).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def trained_by_dualdist() -> nn.Module:
    model = net(SEED)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    dd.broadcast_parameters(model)
    dd.wrap_optimizer(optimizer, model.named_parameters())
    train(model, model, optimizer)
    return model


def trained_by_ddp() -> nn.Module:
    """The default process group is torch's own, so DistributedDataParallel works beside dualdist."""
    model = net(SEED)
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    train(model, parallel, torch.optim.SGD(model.parameters(), **SGD))
    return model


def values(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def failures(laws: Mapping[str, Callable[[], None]]) -> Iterator[tuple[str, str]]:
    for name, check in laws.items():
        try:
            check()
        except Exception:
            yield name, traceback.format_exc()


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # wrapping an optimizer collects garbage, which takes 0.1 s and more among all the objects of torch
    backend = arguments[0] if arguments else None
    raises(NotInitializedError, dd.rank, "before dd.init()")
    dd.init(backend, timeout_s=40)
    rank = dd.rank()
    model = trained_by_dualdist()
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
        "hash": digest(model),
        "parameters": values(model),
        "ddp": values(trained_by_ddp()) if dd.backend() == "native" else {},
        "failures": dict(failures(LAWS)),
    }
    weight = nn.Parameter(torch.ones(1))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
    dd.shutdown()
    raises(NotInitializedError, dd.size, "after dd.shutdown()")
    raises(NotInitializedError, (weight * rank).sum().backward, "dd.wrap_optimizer again")
    dd.init(backend, timeout_s=40)
    dd.wrap_optimizer(optimizer)
    optimizer.zero_grad()
    (weight * rank).sum().backward()
    optimizer.step()
    result["stepped_to"] = weight.item()
    result["again"] = dd.allreduce(torch.tensor(rank), "sum").item()
    dd.shutdown()
    for name, check in ALONE.items():
        dd.init(backend, timeout_s=40)
        result["failures"] |= dict(failures({name: check}))
        if dd.is_initialized():  # else the law has failed between two sessions of its own
            dd.shutdown()
    report(rank, result)


if __name__ == "__main__":
    main(sys.argv[1:])
