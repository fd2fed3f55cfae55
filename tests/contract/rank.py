"""A rank of a contract job, which runs one task after the other, as the tests ask for them.

python rank.py [BACKEND]

A task is a law, one of TASKS, or "random training" and a seed. Laws share a session, except those in ALONE.
"""

import copy
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.utils  # DistributedDataParallel would import it later, after gc.freeze()
from contract import random_training
from contract.laws import ALONE, LAWS
from contract.oracle import digest, loss_of, net, raises
from harness.rank_pool import serve
from torch import nn

import dualdist as dd
from dualdist.errors import NotInitializedError

STEPS = 60
BATCHES = 4  # a step, whatever the number of ranks: one, two and four ranks see the same data
SEED = 3
CLIP = 0.5
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
TIMEOUT_S = 40
RANDOM = "random training "
TOPOLOGY = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes", "launcher", "backend", "transport")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    """Train these steps with momentum, weight decay and clipping, on this rank's part of the batches."""
    for step in steps:
        optimizer.zero_grad()
        mine = range(dd.rank(), BATCHES, dd.size())
        sum(loss_of(model, number, step) / len(mine) for number in mine).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def trained_by_dualdist() -> dict[str, Any]:
    model = net(SEED)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    dd.broadcast_parameters(model)
    dd.wrap_optimizer(optimizer, model.named_parameters())
    train(model, optimizer)
    return {"hash": digest(model), "parameters": {name: tensor.tolist() for name, tensor in model.state_dict().items()}}


def trained_in_rank_order() -> list[str]:
    """Return the hashes of three ordered trainings: with one bucket, with a bucket a tensor, and resumed half-way."""
    hashes = []
    for megabytes, parts in ((25.0, [range(STEPS)]), (1e-4, [range(STEPS)]), (25.0, [range(20), range(20, STEPS)])):
        options = {"bucket_cap_mb": megabytes, "first_bucket_mb": megabytes}
        model = net(SEED)
        state = torch.optim.SGD(model.parameters(), **SGD).state_dict()
        for steps in parts:
            model = copy.deepcopy(model)
            optimizer = torch.optim.SGD(model.parameters(), **SGD)
            optimizer.load_state_dict(state)
            dd.wrap_optimizer(optimizer, model.named_parameters(), reduction="ordered", **options)
            train(model, optimizer, steps)
            state = optimizer.state_dict()
        hashes.append(digest(model))
    return hashes


def topology() -> dict[str, object]:
    return {name: getattr(dd, name)() for name in TOPOLOGY}


TASKS: Mapping[str, Callable[[], object]] = {
    "topology": topology,
    "training": trained_by_dualdist,
    "ordered training": trained_in_rank_order,
}


class Tasks:
    """The tasks of one rank: laws in ALONE have a session of their own."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend
        self._alone: Mapping[str, Callable[[], object]] = {"two sessions": self._two_sessions, **ALONE}
        self._shared: Mapping[str, Callable[[], object]] = {**TASKS, **LAWS}

    def init(self) -> None:
        dd.init(self._backend, timeout_s=TIMEOUT_S)

    def run(self, name: str) -> object:
        if name in self._alone:
            if dd.is_initialized():
                dd.shutdown()
            self.init()
            try:
                return self._alone[name]()
            finally:
                if dd.is_initialized():  # else it failed between two sessions
                    dd.shutdown()
        if not dd.is_initialized():
            self.init()
        if name.startswith(RANDOM):
            return random_training.train(int(name.removeprefix(RANDOM)))
        return self._shared[name]()

    def _two_sessions(self) -> dict[str, object]:
        """Wrap an optimizer in one session, and again in the next one."""
        rank = dd.rank()
        weight = nn.Parameter(torch.ones(1))
        optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
        dd.shutdown()
        raises(NotInitializedError, dd.size, "after dd.shutdown()")
        raises(NotInitializedError, (weight * rank).sum().backward, "dd.wrap_optimizer again")
        self.init()
        dd.wrap_optimizer(optimizer)
        optimizer.zero_grad()
        (weight * rank).sum().backward()
        optimizer.step()
        return {"stepped_to": weight.item(), "sum": dd.allreduce(torch.tensor(rank), "sum").item()}


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # wrapping an optimizer collects garbage, which takes 0.1 s with all the objects of torch
    tasks = Tasks(arguments[0] if arguments else None)
    raises(NotInitializedError, dd.rank, "before dd.init()")
    tasks.init()
    serve(dd.rank(), tasks.run)
    if dd.is_initialized():
        dd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
