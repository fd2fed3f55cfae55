"""A rank of an elastic training: python elastic_rank.py FOLDER [FATE ...]; see FATES for what may happen to it.

Each fate happens once, even if the job starts again. Checkpoints are in FOLDER.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from harness.jobs import report
from harness.problem import flat, make_model, make_optimizer

import dualdist as dd
from dualdist.elastic import training_state

EPOCHS = 2
SAMPLES = 48
GLOBAL_BATCH = 6  # samples in a step of all ranks, however many those are
EVERY = 3
TIMEOUT_S = 20
SEED = 5
KILLERS: list[threading.Timer] = []  # until the training has ended, whose result would be there


def inputs_of(samples: torch.Tensor) -> torch.Tensor:
    return torch.sin(samples[:, None] * torch.arange(1.0, 5.0))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor, noise: float = 0.0) -> None:
    x = inputs_of(samples)
    optimizer.zero_grad()
    (torch.nn.functional.mse_loss(model(x), x[:, :2]) * (1 + noise)).backward()
    optimizer.step()


def happens_first(folder: Path, what: str) -> bool:
    """Return True on the first call, also of earlier processes."""
    try:
        (folder / f"{what}.happened").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def kill(folder: Path, delay_ms: str) -> None:
    """Kill this rank after a delay, whatever it does then."""
    if happens_first(folder, f"killed-{delay_ms}"):
        timer = threading.Timer(float(delay_ms) / 1000, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        KILLERS.append(timer)


def lose_host(folder: Path, _: str) -> None:
    """Kill this rank, and torchrun's agent, which started it."""
    if happens_first(folder, "host-lost"):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def send_signals(folder: Path, signals: str) -> None:
    """Send itself signals that request a stop."""
    if happens_first(folder, f"signalled-{dd.rank()}"):
        for name in signals.split("+"):
            os.kill(os.getpid(), signal.Signals[name])


def wait(folder: Path, name: str) -> None:
    """Wait for a notice, from the test or another rank."""
    if happens_first(folder, f"waiting-{dd.rank()}{name}"):
        last = training_state.last_step()
        while not (last.notice.kind or last._has_published):
            time.sleep(0.01)


def offer(folder: Path, slots: str) -> None:
    """Let the job's host discovery find so many slots on this host."""
    if happens_first(folder, f"offered-{slots}"):
        new = folder / "hosts.new"
        new.write_text(f"localhost:{slots}\n")
        new.rename(folder / "hosts")


def pause(folder: Path, seconds: str) -> None:
    if happens_first(folder, "paused"):
        time.sleep(float(seconds))


# A fate is who@step=what:value, on ranks "0", "1" or "all", before the step of that number.
FATES: dict[str, Callable[[Path, str], None]] = {
    "killed": kill,
    "pauses": pause,
    "host-lost": lose_host,
    "signalled": send_signals,
    "waits": wait,
    "offers": offer,
}


def apply(fate: str, folder: Path, step: int) -> None:
    """Let the fate happen if it is this rank's, before this step."""
    where, _, what = fate.partition("=")
    rank, _, at = where.partition("@")
    name, _, value = what.partition(":")
    if rank in ("all", str(dd.rank())) and int(at) == step:
        FATES[name](folder, value)


def assert_seen_once(report: Mapping[str, Any]) -> None:
    """Require that the rank reports each sample of each epoch once."""
    for epoch in range(EPOCHS):
        seen = chain(*(samples for number, *samples in report["seen"] if number == epoch))
        assert sorted(seen) == list(range(SAMPLES))


def main(folder: Path, *fates: str) -> None:
    torch.set_num_threads(1)
    dd.init(timeout_s=TIMEOUT_S)
    torch.manual_seed(dd.rank())
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).add_(dd.rank())  # sync() makes them equal
    optimizer = dd.wrap_optimizer(make_optimizer(model))
    sampler = dd.Sampler(range(SAMPLES), remainder="uneven", seed=SEED)
    path = None if os.environ.get("IN_MEMORY") == "1" else folder / "run"
    state = dd.elastic.State(path, every=EVERY, model=model, optimizer=optimizer, sampler=sampler, step=0, seen=[])
    is_noisy = os.environ.get("NOISY", "1") == "1"  # so that random states matter, which differ between ranks
    begun: list[int] = []
    sizes: list[int] = []

    @dd.elastic.run
    def train(state: dd.elastic.State) -> None:
        begun.append(state.step)
        sizes.append(dd.size())
        workers = int(os.environ.get("WORKERS", "0"))
        loader = dd.loader(range(SAMPLES), GLOBAL_BATCH // dd.size(), sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        for epoch in range(sampler.epoch, EPOCHS):
            for samples in loader:
                for fate in fates:
                    apply(fate, folder, state.step)
                step(model, optimizer, samples, 0.01 * torch.rand(()).item() if is_noisy else 0.0)
                state.seen.append([epoch, *chain(*dd.allgather_object(samples.tolist()))])
                state.step += 1
                state.commit()

    train(state)
    for timer in KILLERS:
        timer.cancel()
    report(dd.rank(), {"parameters": flat(model), "seen": state.seen, "begun": begun, "sizes": sizes})
    dd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
