"""A rank of a contract job, which runs one task after the other, as the tests ask for them.

python rank.py [BACKEND]

A task is a law, one of TASKS, or RANDOM or SENT and a seed. Laws share a session, except those in ALONE.
"""

import copy
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch._dynamo.utils  # DistributedDataParallel would import it later, after gc.freeze()
from contract import random_training, sent_laws
from contract.laws import ALONE, LAWS
from contract.oracle import digest, loss_of, net, raises
from harness.rank_pool import serve
from torch import nn

import dualdist as dd
from dualdist.errors import NotInitializedError

ACCELERATOR = "DUALDIST_TESTS_ACCELERATOR"  # its collective library, or ""
STEPS = 60
BATCHES = 4  # a step, whatever the number of ranks: one, two and four ranks see the same data
SEED = 3
CLIP = 0.5
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
TIMEOUT_S = 40
RANDOM = "random training "
SENT = "tensors that cannot be sent "
FULL_DRAWS = 500  # in one task, of a minute at most
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
    """Return the hashes of three ordered trainings: with a bucket a tensor, with one bucket, and resumed half-way.

    In the first one buckets leave early, as it is the session's first.
    """
    hashes = []
    for megabytes, parts in ((1e-4, [range(STEPS)]), (25.0, [range(STEPS)]), (25.0, [range(20), range(20, STEPS)])):
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
}
OWN_SESSION: Mapping[str, Callable[[], object]] = {"ordered training": trained_in_rank_order, **ALONE}


def run(backend: str | None, name: str) -> object:
    """Run a task; those in OWN_SESSION have a session of their own."""
    if name in OWN_SESSION and dd.is_initialized():
        dd.shutdown()
    if not dd.is_initialized():
        dd.init(backend, timeout_s=TIMEOUT_S)
    if name.startswith(RANDOM):
        return random_training.train(int(name.removeprefix(RANDOM)))
    if name.startswith(SENT):
        return sent_laws.try_draws(int(name.removeprefix(SENT)), FULL_DRAWS)
    try:
        return {**TASKS, **LAWS, **OWN_SESSION}[name]()
    finally:
        if name in OWN_SESSION and dd.is_initialized():  # else it failed between two sessions
            dd.shutdown()


def use_accelerator(library: str) -> None:
    """Let tensors be on the simulated accelerator, which has a collective library or none."""
    from harness.accelerator import device

    if library:
        device.register_library()
    torch.set_default_device(device.NAME)


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    if ACCELERATOR in os.environ:
        use_accelerator(os.environ[ACCELERATOR])
    gc.freeze()  # wrapping an optimizer collects garbage, which takes 0.1 s with all the objects of torch
    backend = arguments[0] if arguments else None
    raises(NotInitializedError, dd.rank, "before dd.init()")
    dd.init(backend, timeout_s=TIMEOUT_S)
    serve(dd.rank(), partial(run, backend))
    if dd.is_initialized():
        dd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
