"""A training that stops in the middle of an epoch, and resumes there on other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from harness.problem import make_model, make_optimizer
from torch.utils.data import DataLoader, IterableDataset

import dualdist as dd

SAMPLES = 48
TOGETHER = 6  # samples in a step of all ranks, however many those are
SEED = 5


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def inputs_of(samples: torch.Tensor) -> torch.Tensor:
    return torch.sin(samples[:, None] * torch.arange(1.0, 5.0))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> None:
    x = inputs_of(samples)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x[:, :2]).backward()
    optimizer.step()


def train(folder: str, steps: int, workers: int) -> dict[str, Any]:
    """Train one epoch from the newest checkpoint; stop and save after `steps` steps."""
    torch.set_num_threads(1)
    dd.init(timeout_s=40)
    model = make_model()
    optimizer = dd.wrap_optimizer(make_optimizer(model))
    sampler = dd.Sampler(range(SAMPLES), remainder="uneven", seed=SEED)
    stream = dd.Sampler(Stream(), remainder="uneven", shuffle=False)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler, "stream": stream}
    mine = folder if dd.rank() == 0 else "/proc/nowhere"
    found = dd.load_checkpoint(mine, **parts)
    seen: list[tuple[list[int], list[int]]] = []
    batch = TOGETHER // dd.size()
    loaders: list[DataLoader[Any]] = [
        dd.loader(range(SAMPLES), batch, sampler=sampler, num_workers=workers),  # type: ignore[arg-type]
        dd.loader(Stream(), batch, sampler=stream, num_workers=workers),
    ]
    for samples, numbers in zip(*loaders, strict=True):
        step(model, optimizer, samples)
        seen.append((samples.tolist(), numbers.tolist()))
        if len(seen) == steps:
            dd.save_checkpoint(mine, **parts, backend=dd.backend())
            break
    epochs = sampler.epoch, stream.epoch
    dd.shutdown()
    return {"seen": seen, "parameters": list(model.parameters()), "found": found, "epochs": epochs}
