"""A rank of a training that goes on: python elastic_rank.py FOLDER [FATE ...]; see FATES for what may happen.

What happens to a rank happens once, also where the job starts again. Checkpoints are in FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from harness.jobs import report
from harness.problem import flat, make_model, make_optimizer

import dualdist as dd
from dualdist.elastic import training_state

EPOCHS = 2
SAMPLES = 48
TOGETHER = 6  # samples in a step of all ranks, however many those are
EVERY = 3
TIMEOUT_S = 20
SEED = 5


def inputs_of(samples: torch.Tensor) -> torch.Tensor:
    return torch.sin(samples[:, None] * torch.arange(1.0, 5.0))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor, noise: float = 0.0) -> None:
    x = inputs_of(samples)
    optimizer.zero_grad()
    (torch.nn.functional.mse_loss(model(x), x[:, :2]) * (1 + noise)).backward()
    optimizer.step()


def once(folder: Path, what: str) -> bool:
    """Whether this has not happened yet; it has from now on."""
    try:
        (folder / f"{what}.happened").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def is_killed(folder: Path, delay_ms: str) -> None:
    """In the middle of whatever comes next."""

    def kill() -> None:
        time.sleep(float(delay_ms) / 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    if once(folder, "killed"):
        threading.Thread(target=kill).start()


def host_is_lost(folder: Path, _: str) -> None:
    """With torchrun's agent on it, which started this rank."""
    if once(folder, "host-lost"):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def is_told(folder: Path, signals: str) -> None:
    """By a signal, SIGTERM or SIGUSR1, and by the same again."""
    if once(folder, f"told-{dd.rank()}"):
        for name in signals.split("+"):
            os.kill(os.getpid(), signal.Signals[name])


def waits(folder: Path, _: str) -> None:
    """Until it is told to stop, by the test or by another rank."""
    if once(folder, f"waiting-{dd.rank()}"):
        last = training_state.last_step()
        while not (last.notice.kind or last._has_published):
            time.sleep(0.01)


# A fate is who@step:what, on ranks "0", "1" or "all", before the step of that number.
FATES: dict[str, Callable[[Path, str], None]] = {
    "killed": is_killed,
    "host-lost": host_is_lost,
    "told": is_told,
    "waits": waits,
}


def meet(fate: str, folder: Path, step: int) -> None:
    """What is in store for this rank before this step happens."""
    where, _, what = fate.partition("=")
    rank, _, at = where.partition("@")
    name, _, value = what.partition(":")
    if rank in ("all", str(dd.rank())) and int(at) == step:
        FATES[name](folder, value)


def main(folder: Path, *fates: str) -> None:
    torch.set_num_threads(1)
    dd.init(timeout_s=TIMEOUT_S)
    torch.manual_seed(dd.rank())
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).add_(dd.rank())  # the state makes them alike
    optimizer = dd.wrap_optimizer(make_optimizer(model))
    sampler = dd.Sampler(range(SAMPLES), remainder="uneven", seed=SEED)
    state = dd.elastic.State(
        folder / "run", every=EVERY, model=model, optimizer=optimizer, sampler=sampler, step=0, seen=[]
    )
    is_noisy = os.environ.get("NOISY", "1") == "1"  # so that random states count; these differ on other ranks
    begun: list[int] = []
    sizes: list[int] = []

    @dd.elastic.run
    def train(state: dd.elastic.State) -> None:
        begun.append(state.step)
        sizes.append(dd.size())
        workers = int(os.environ.get("WORKERS", "0"))
        loader = dd.loader(range(SAMPLES), TOGETHER // dd.size(), sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        for epoch in range(sampler.epoch, EPOCHS):
            for samples in loader:
                for fate in fates:
                    meet(fate, folder, state.step)
                step(model, optimizer, samples, 0.01 * torch.rand(()).item() if is_noisy else 0.0)
                state.seen.append([epoch, *chain(*dd.allgather_object(samples.tolist()))])
                state.step += 1
                state.commit()

    train(state)
    report(dd.rank(), {"parameters": flat(model), "seen": state.seen, "begun": begun, "sizes": sizes})
    dd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
