"""Inside the ranks: one training step of every contender, taking turns, and the peak memory of one alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import dualdist as dd
from dualdist.bench.cases import COMMUNICATING, WITH_TORCH, StepOptions
from dualdist.bench.ranks import baselines
from dualdist.bench.ranks.interleaving import TimedContender, interleave, repeats_to_fill, timed, together
from dualdist.bench.ranks.models import ModelFactory, case_of
from dualdist.collectives.fingerprint import digest
from dualdist.topology import Topology
from dualdist.utils.machine import peak_kib, reset_peak, resident_kib

LEARNING_RATE, MOMENTUM = 1e-3, 0.9
LEAST_STEPS, MOST_STEPS = 3, 50
# DDP rebuilds its buckets after its first step, and allocators reach their peak with the second.
MEMORY_STEPS = 5
SESSION = ("dualdist", "hvd")  # raw Horovod needs somebody to start its engine under any launcher


@dataclass(frozen=True)
class Contender:
    """A model of its own, and what one step of it is."""

    name: str
    model: nn.Module
    step: Callable[[ModelFactory], torch.Tensor]  # on this batch; returns its loss


def contender(name: str, case: ModelFactory, device: torch.device) -> Contender:
    """The contender of this name; all begin with the same parameters and use the same kind of optimizer."""
    module = case.build()
    model = baselines.ddp(module, device, **DDP_FLAGS[name]) if name in DDP_FLAGS else module
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    if name == "dualdist":
        dd.wrap_optimizer(optimizer, module.named_parameters())
    elif name == "hvd":
        optimizer = baselines.horovod_optimizer(optimizer, module)
    average = name == "naive"

    def step(case: ModelFactory) -> torch.Tensor:
        optimizer.zero_grad()
        loss = case.loss(model)
        loss.backward()
        if average:
            baselines.average_each(module.parameters())
        optimizer.step()
        return loss.detach()

    return Contender(name, module, step)


DDP_FLAGS: dict[str, dict[str, bool]] = {
    "ddp": {},
    "ddp_view": {"gradient_as_bucket_view": True},
    "ddp_best": {"gradient_as_bucket_view": True, "broadcast_buffers": False},
}


def measure(options: StepOptions) -> dict[str, Any]:
    """The report of a job on an open session; every rank calls this, and gets it."""
    device = dd.device()
    end = _nothing
    if any(name in WITH_TORCH for name in options.contenders):
        end = baselines.start_torch(
            dd.rank(), dd.size(), dd.num_nodes(), dd.broadcast_object, device, options.timeout_s
        )
    try:
        case = case_of(options, device, dd.rank())
        contenders = [contender(name, case, device) for name in options.contenders]
        steps_of = {each.name: functools.partial(each.step, case) for each in contenders}
        turns = [TimedContender(name, step, step) for name, step in steps_of.items()]
        synchronize = _synchronizer(device)
        for _ in range(options.warmup):
            for turn in turns:
                timed(turn, 1, meet=dd.barrier, synchronize=synchronize)
        steps = options.steps or _agreed_steps(turns, options, synchronize)
        sight = interleave(
            turns, steps, options.rounds, meet=dd.barrier, synchronize=synchronize, node_rank=dd.node_rank()
        )
        parameters = list(contenders[0].model.parameters())
        return {
            **together(dd.allgather_object(sight)),
            "steps": steps,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "tensors": len(parameters),
            "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            **_verified(contenders),
        }
    finally:
        end()


def _agreed_steps(turns: list[TimedContender], options: StepOptions, synchronize: Callable[[], None]) -> int:
    """How many steps the median contender takes in a block; rank 0 decides, and all make as many."""
    seconds = [timed(turn, 1, meet=dd.barrier, synchronize=synchronize)[0] for turn in turns]
    return dd.broadcast_object(repeats_to_fill(options.block_s, median(seconds), LEAST_STEPS, MOST_STEPS))


def _verified(contenders: list[Contender]) -> dict[str, Any]:
    """Whether a contender's parameters are the same bits on all ranks, and how far it ended from the first of those
    that communicate: all of them have taken as many steps from the same start.
    """
    digests = dd.allgather_object({each.name: digest(each.model.parameters()) for each in contenders})
    same = {name: len({seen[name] for seen in digests}) == 1 for name in digests[0]}
    talking = [each for each in contenders if each.name in COMMUNICATING]
    return {
        "identical_across_ranks": same,
        "distance_from": talking[0].name if talking else None,
        "distance": {each.name: _distance(each.model, talking[0].model) for each in talking},
    }


def _distance(first: nn.Module, second: nn.Module) -> float:
    """The largest difference of a parameter's elements."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def memory(name: str, backend: str, options: StepOptions, topology: Topology, store: Path) -> dict[str, Any]:
    """How much one contender alone adds to a process that has imported all it needs. Opens no session but its own.

    On CPUs the peak of the resident size (VmHWM, shared memory that was touched included) minus the size before
    anything was set up: connections, model, optimizer state and activations count. On CUDA the peak of what torch's
    allocator gave out; NCCL's own buffers are not in it.
    """
    cuda = torch.cuda.is_available() and options.device != "cpu"
    case_of(options, torch.device("cpu"), topology.rank)  # imports what the model needs
    if backend == "horovod" and name in SESSION:
        from dualdist.backends.horovod import backend as horovod

        horovod.import_horovod()
    could_reset = reset_peak()
    before = resident_kib()
    end: Callable[[], None] = _nothing
    device = torch.device("cuda", topology.local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if name in SESSION:
        dd.init(timeout_s=options.timeout_s)
        end, device = dd.shutdown, dd.device()
    elif name in WITH_TORCH:
        if cuda:
            torch.cuda.set_device(device)
        end = baselines.start_torch_by_file(store, topology.rank, topology.size, device, options.timeout_s)
    try:
        case = case_of(options, device, topology.rank)
        each = contender(name, case, device)
        for _ in range(MEMORY_STEPS):
            each.step(case)
        _synchronizer(device)()
        peak = torch.cuda.max_memory_allocated() if cuda else ((peak_kib() or 0) - (before or 0)) * 1024
    finally:
        end()
    known = cuda or (before is not None and could_reset)
    return {"contender": name, "peak_bytes": peak if known else None, "rank": topology.rank}


def _synchronizer(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else _nothing


def _nothing() -> None: ...
