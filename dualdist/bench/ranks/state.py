"""Measurement of large states in the ranks: broadcast, save and load, by dualdist and by torch, in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dualdist as dd
from dualdist.bench.jobs import STATE_CALLS, StateOptions
from dualdist.bench.ranks.measurements import interleave, merge_ranks
from dualdist.bench.ranks.training import torch_group
from dualdist.utils.machine import reset_peak, resident_kib

LAYER_WIDTH = 2048  # 16 MiB of float32


def measure_state(options: StateOptions, folder: Path) -> dict[str, Any]:
    """Time every call of STATE_CALLS in an open session; every rank calls this and gets the result."""
    device = torch.device("cpu")
    layers = max(1, options.nbytes // (4 * LAYER_WIDTH**2))
    model = nn.Sequential(*(nn.Linear(LAYER_WIDTH, LAYER_WIDTH, bias=False) for _ in range(layers)))
    with torch_group(device, options.timeout_s, is_needed=True):
        calls = _calls(model, folder / "dualdist", folder / "torch.pt")
        for call in calls.values():  # writes the files
            call()
        peaks: dict[str, list[int]] = {name: [] for name in calls}
        measured = {name: partial(_measure_peak, call, peaks[name]) for name, call in calls.items()}
        timings = interleave(measured, 1, options.rounds, device, warmup=0)
    of_ranks = dd.allgather_object(peaks)
    return {
        **merge_ranks(dd.allgather_object(timings)),
        "bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "peak_bytes": {
            name: [max(each) for each in zip(*(found[name] for found in of_ranks), strict=True)] for name in calls
        },
    }


def _measure_peak(call: Callable[[], object], peaks: list[int]) -> None:
    """Call, and append the largest resident size during the call minus that after it."""
    reset_peak()
    result = call()
    peaks.append(1024 * ((resident_kib(peak=True) or 0) - (resident_kib() or 0)))
    del result


def _calls(model: nn.Module, ours: Path, torchs: Path) -> dict[str, Callable[[], object]]:
    def save() -> None:
        if dd.rank() == 0:
            torch.save(model.state_dict(), torchs)
        dd.barrier()

    calls: dict[str, Callable[[], object]] = {
        "broadcast_parameters": lambda: dd.broadcast_parameters(model),
        "DDP(model)": lambda: DistributedDataParallel(model),
        "save_checkpoint": lambda: dd.save_checkpoint(ours, model=model),
        "torch.save": save,
        "load_checkpoint": lambda: dd.load_checkpoint(ours, model=model),
        "torch.load": lambda: model.load_state_dict(torch.load(torchs, mmap=True, weights_only=True)),
    }
    assert [*calls] == [name for pair in STATE_CALLS.items() for name in pair]
    return calls
