"""A training that resumes from its newest checkpoint; one rank gets a signal at some moment of some step.

    python training.py BACKEND FOLDER [RANK:SIGNAL:STEP:SHARE] [PACE_S] [TIMEOUT_S]

The signal arrives when this share of the usual time of a step has passed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from harness.jobs import REPORT_DIR, report

import dualdist as dd

STEPS = 40
SAVED_EVERY = 6
SAMPLES = 96
TIMEOUT_S = 5.0


class Hurt(NamedTuple):
    """Send `signal` to `rank` in `step`, after `share` of the time that a step takes."""

    rank: int
    signal: int
    step: int
    share: float

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @staticmethod
    def parse(words: str) -> Hurt:
        rank, number, step, share = words.split(":")
        return Hurt(int(rank), int(number), int(step), float(share))


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 2))


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()


def train(folder: str, hurt: Hurt | None = None, pace_s: float = 0.0) -> str:
    """Train from the newest checkpoint to STEPS steps, pausing after each; return a digest of the parameters."""
    model = make_model(3)
    optimizer = dd.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    sampler = dd.Sampler(range(SAMPLES), remainder="drop", seed=7)
    loader = dd.loader(range(SAMPLES), 4, sampler=sampler)  # type: ignore[arg-type]
    torch.manual_seed(100 + dd.rank())
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    found = dd.load_checkpoint(folder, **parts)
    done = found["step"] if found else 0
    took_s = 0.01
    while done < STEPS:
        for batch in loader:
            if hurt is not None and (hurt.rank, hurt.step) == (dd.rank(), done):
                timer = threading.Timer(hurt.share * took_s, os.kill, (os.getpid(), hurt.signal))
                timer.name = "dualdist-fault"  # a thread of the program's own would have dualdist wait otherwise
                timer.start()
            began = time.monotonic()
            x = torch.sin(batch[:, None] * torch.arange(1.0, 7.0))
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
            done += 1
            if done % SAVED_EVERY == 0:
                dd.save_checkpoint(folder, **parts, step=done, async_op=done % (2 * SAVED_EVERY) == 0)
            took_s = max(time.monotonic() - began, 0.001)
            time.sleep(pace_s)
            if done == STEPS:
                break
    return digest(model)


def main(backend: str, folder: str, words: str = "", pace: str = "0", timeout: str = f"{TIMEOUT_S}") -> None:
    torch.set_num_threads(1)
    dd.init(backend, timeout_s=float(timeout))
    rank = dd.rank()
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    parameters = train(str(Path(folder, "run")), Hurt.parse(words) if words else None, float(pace))
    dd.shutdown()
    if REPORT_DIR in os.environ:
        report(rank, {"parameters": parameters})


if __name__ == "__main__":
    main(*sys.argv[1:])
