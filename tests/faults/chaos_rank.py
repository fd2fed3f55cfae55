"""A rank that makes each public call that waits, in an order of its seed; in one of them something happens to a rank.

    PYTHONPATH=.:tests mpirun -np 3 python tests/faults/chaos_rank.py native 17 stop FOLDER

Each rank writes what it saw into a file of the folder, a line for each call. Knows what is drawn, not what is right
after it: test_chaos.py does.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from faults.interrupted_operations import Call, collectives, compare, make_model, values
from torch import nn

import dualdist as dd

TIMEOUT_S = 5.0
DELAY_S = 1.0
# What happens, as a command of the shell; $0 is the rank's process.
FAULTS: Mapping[str, str] = {
    "stop": "kill -STOP $0",
    "kill": "kill -KILL $0",
    "delay": f"kill -STOP $0; sleep {DELAY_S}; kill -CONT $0",
    "cut": "ip link set eth0 down",
    "short cut": f"ip link set eth0 down; sleep {DELAY_S}; ip link set eth0 up",
}


@dataclass(frozen=True)
class Chaos:
    """What a seed means: the order of the calls, and when what happens to which rank."""

    order: tuple[str, ...]
    rank: int
    call: str
    at_s: float  # after the call began
    late_s: float  # by which the other ranks begin the call later

    def __str__(self) -> str:
        return f"rank {self.rank} in {self.call!r}, {self.at_s:.4f} s after its begin; the others {self.late_s} s later"


def draw(seed: int, ranks: range) -> Chaos:
    """Return what a seed means; one of `ranks` is hit."""
    rng = random.Random(seed)
    order = [*CALLS]
    rng.shuffle(order)
    late_s = rng.choice((0.0, 0.0, 0.3))
    call = CALLS[seed % len(CALLS)]
    return Chaos(tuple(order), rng.choice(ranks), call, rng.uniform(0, late_s or 0.03), late_s)


class Program:
    """The public calls on one rank; each returns what is wrong with its result, or ""."""

    def __init__(self, backend: str, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        self._open()

    def _open(self) -> None:
        dd.init(self._backend, timeout_s=TIMEOUT_S)
        self.rank, self.size = dd.rank(), dd.size()
        self.model, self.ordered = make_model(), make_model()
        self.optimizer, self._ordered_optimizer = self._wrap(self.model), self._wrap(self.ordered, reduction="ordered")

    def _wrap(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return dd.wrap_optimizer(optimizer, model.named_parameters(), **options)

    def reopen(self, name: str) -> str:
        dd.shutdown()
        self._open()
        return ""

    def step(self, name: str, *, is_ordered: bool = False) -> str:
        model, optimizer = (self.ordered, self._ordered_optimizer) if is_ordered else (self.model, self.optimizer)
        optimizer.zero_grad()
        model(values(name, self.rank, 8 * 32).reshape(8, 32) / 100).square().mean().backward()
        optimizer.step()
        return ""

    def wrap(self, name: str) -> str:
        dd.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
        return ""

    def broadcast_parameters(self, name: str) -> str:
        other = make_model()
        if self.rank:
            nn.init.zeros_(other[0].weight)  # type: ignore[index]
        dd.broadcast_parameters(other)
        return compare(other[0].weight.detach().flatten(), make_model()[0].weight.detach().flatten())  # type: ignore[index]

    def broadcast_optimizer_state(self, name: str) -> str:
        dd.broadcast_optimizer_state(self.optimizer)
        return ""

    def check(self, name: str) -> str:
        dd.check_consistency(self.model, optimizer=self.optimizer)
        return ""

    def save_and_load(self, name: str) -> str:
        path = self._folder / "checkpoint.pt"
        dd.save_checkpoint(path, model=self.model, optimizer=self.optimizer, word=name)
        found = dd.load_checkpoint(path, model=self.model, optimizer=self.optimizer)
        return "" if found and found["word"] == name else f"{found}"

    def group(self, name: str) -> str:
        group = dd.new_group([*range(self.size)])
        found = dd.allreduce(values(name, self.rank, 5), "sum", group=group)
        dd.remove_group(group)
        return compare(found, sum(values(name, rank, 5) for rank in range(self.size)))  # type: ignore[arg-type]

    def join(self, name: str) -> str:
        last = dd.join()
        return "" if 0 <= last < self.size else f"{last}"

    def objects(self, name: str) -> str:
        found = dd.allgather_object((name, self.rank))
        return "" if found == [(name, rank) for rank in range(self.size)] else f"{found}"

    def gather_and_scatter(self, name: str) -> str:
        parts = dd.gather(values(name, self.rank, 7), root=self.size - 1)
        found = dd.scatter(parts, root=self.size - 1)
        return compare(found, values(name, self.rank, 7))

    def reducescatter(self, name: str) -> str:
        found = dd.reducescatter(values(name, 0, 4 * self.size), "sum")
        return compare(found, self.size * values(name, 0, 4 * self.size).chunk(self.size)[self.rank])

    def sampler(self, name: str) -> str:
        found = [*dd.Sampler(range(5 * self.size), shuffle=True, remainder="drop")]
        return "" if len(found) == 5 else f"{found}"

    def batch_norm(self, name: str) -> str:
        layer = dd.SyncBatchNorm(3)
        layer(values(name, self.rank, 12).reshape(4, 3).requires_grad_()).square().sum().backward()
        return ""

    def calls(self) -> Mapping[str, Call]:
        """Return all calls by name."""
        return {
            **collectives(self.rank, self.size),
            "reopen": self.reopen,
            "step": self.step,
            "ordered step": lambda name: self.step(name, is_ordered=True),
            "wrap_optimizer": self.wrap,
            "broadcast_parameters": self.broadcast_parameters,
            "broadcast_optimizer_state": self.broadcast_optimizer_state,
            "check_consistency": self.check,
            "checkpoint": self.save_and_load,
            "group": self.group,
            "join": self.join,
            "allgather_object": self.objects,
            "gather and scatter": self.gather_and_scatter,
            "reducescatter": self.reducescatter,
            "Sampler": self.sampler,
            "SyncBatchNorm": self.batch_norm,
        }


CALLS = (
    *("allreduce of 8 bytes", "allreduce of 1 MiB", "allreduce of 8 MiB", "allreduce in place", "allgather"),
    *("broadcast", "alltoall", "grouped allreduce", "async allreduces", "broadcast_object", "barrier"),
    *("reopen", "step", "ordered step", "wrap_optimizer", "broadcast_parameters", "broadcast_optimizer_state"),
    *("check_consistency", "checkpoint", "group", "join", "allgather_object", "gather and scatter", "reducescatter"),
    *("Sampler", "SyncBatchNorm"),
)


def main(backend: str, seed: str, fault: str, folder: str, size: str, first: str) -> None:
    torch.set_num_threads(1)
    chaos = draw(int(seed), range(int(first), int(size)))
    program = Program(backend, Path(folder))
    assert set(program.calls()) == set(CALLS)
    with Path(folder, f"rank-{program.rank}.jsonl").open("w", buffering=1) as log:

        def report(what: str, **facts: object) -> None:
            log.write(json.dumps({"what": what, "at": time.monotonic(), **facts}) + "\n")

        report("process", pid=os.getpid())
        for what in (*chaos.order, "the end"):
            perform: Callable[[str], str] = program.calls().get(what, program.calls()["allreduce of 8 bytes"])
            if what == chaos.call and program.rank == chaos.rank:
                report("fault", number=chaos.at_s)
                command = f"sleep {chaos.at_s}; {FAULTS[fault]}"
                subprocess.Popen(["sh", "-c", command, str(os.getpid())], start_new_session=True)
            elif what == chaos.call:
                time.sleep(chaos.late_s)
            try:
                wrong = perform(f"chaos.{what}")
            except Exception as error:
                report(what, error=f"{type(error).__name__}: {error}", is_ours=isinstance(error, dd.DualdistError))
                raise
            report(what, wrong=wrong)
        models = nn.ModuleList([program.model, program.ordered])
        parameters = nn.utils.parameters_to_vector(models.parameters()).detach()
        report("parameters", values=[float(parameters.double().sum()), float(parameters.double().norm())])
        dd.shutdown()
        report("shutdown")


if __name__ == "__main__":
    main(*sys.argv[1:])
