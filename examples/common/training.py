"""What single_process.py and train.py do alike around their loops: data, model, pace and summary."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import dualdist as dd
from common import data
from common.options import Options
from common.ranks import is_root, parameter_hash
from dualdist.utils.torchvision_import import load_torchvision


def load_data(options: Options) -> data.Split:
    size = options.image_size
    if options.dataset == "digits":
        return data.digits(size)
    if options.dataset == "fake":
        return data.fake(size)
    return getattr(data, options.dataset)(options.data, size, download=options.download)


def build_model(options: Options) -> nn.Module:
    if options.model == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(3 * options.image_size**2, 64), nn.ReLU(), nn.Linear(64, data.CLASSES)
        )
    model: nn.Module = load_torchvision().models.get_model(options.model, num_classes=data.CLASSES)
    return model


def workers(options: Options) -> dict[str, Any]:
    return data.loading(options.workers, options.device)


class Pace:
    """Batches up to --max-steps under a progress bar, and how many images a second that was, but for the first step."""

    def __init__(self, loader: DataLoader[Any], options: Options) -> None:
        self.steps = 0
        self._loader = data.not_empty(loader)
        self._options = options
        self._ranks = dd.size() if dd.is_initialized() else 1
        self._seconds = 0.0

    @property
    def is_over(self) -> bool:
        return self.steps == self._options.max_steps

    def epoch(self, number: int) -> Iterator[Sequence[torch.Tensor]]:
        """The batches of one epoch."""
        planned = min(len(self._loader), self._options.max_steps - self.steps)
        began = self._now()
        for batch in dd.progress(islice(self._loader, planned), f"epoch {number + 1}", total=planned):
            yield batch
            self.steps += 1
            if self.steps == 1:
                began = self._now()
        self._seconds += self._now() - began

    @property
    def images_per_s(self) -> float:
        images = (self.steps - 1) * self._options.batch_size * self._ranks
        return images / self._seconds if images else 0.0

    def _now(self) -> float:
        """The time when everything queued on the device is done."""
        if self._options.device.type == "cuda":
            torch.cuda.synchronize(self._options.device)
        return time.perf_counter()


def summarize(model: nn.Module, pace: Pace, loss: float, accuracy: float, options: Options) -> dict[str, Any]:
    """What ran and what came out, on every rank; rank 0 prints it, and writes it to --summary."""
    place = ("none", "none", "none", 1, 1)
    if dd.is_initialized():
        place = (dd.launcher(), dd.backend(), dd.transport(), dd.size(), dd.num_nodes())
    summary = {
        **dict(zip(("launcher", "backend", "transport", "ranks", "nodes"), place, strict=True)),
        "images_per_s": round(pace.images_per_s, 1),
        "seconds": round(time.perf_counter() - options.started, 2),
        "loss": loss,
        "accuracy": accuracy,
        "parameter_hash": parameter_hash(model),
        "device": str(options.device),
        "steps": pace.steps,
    }
    line = "launcher={launcher} backend={backend} transport={transport} ranks={ranks} images/s={images_per_s} "
    line += "seconds={seconds} loss={loss:.4f} accuracy={accuracy:.4f} hash={parameter_hash:.16}"
    if is_root():
        print("summary: " + line.format_map(summary), flush=True)
    if is_root() and options.summary:
        Path(options.summary).write_text(json.dumps(summary, indent=2) + "\n")
    return summary
