"""nn.DataParallel beside dualdist: the same model and the same batch, on the same GPUs or processor cores.

    dualdist run -np 2 examples/data_parallel.py

Written for GPUs, too, and not run on one yet.

nn.DataParallel is one process with a thread for each GPU. The threads share one interpreter lock; in each step the
model is copied to all GPUs, and all outputs and gradients are collected on the first one, which needs the most memory.
It ends at the edge of the host, and on CPUs it does nothing: the module runs as it is. Ranks have an interpreter each,
keep their model, and exchange gradients while backward() still runs.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import dualdist as dd
from common.data import digits
from common.help import parser


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--batch-size", type=int, default=32, help="images per rank")
    flags.add_argument("--steps", type=int, default=10, help="steps in each round")
    flags.add_argument("--rounds", type=int, default=3, help="rounds, in which both take turns")
    options = flags.parse_args()
    dd.init()
    images, labels = whole_batch(options.batch_size * dd.size())
    mine = slice(dd.rank(), None, dd.size())
    threads = torch.get_num_threads()

    times: dict[str, list[float]] = {"nn.DataParallel": [], "dualdist": []}
    losses = {}
    for _ in range(options.rounds):
        if dd.rank() == 0:  # one process, with the GPUs or the cores of all ranks
            torch.set_num_threads(threads * dd.size())
            gpus = list(range(dd.local_size())) if torch.cuda.is_available() else None
            model = new_model()
            seconds, loss = train(nn.DataParallel(model, gpus), sgd(model), images, labels, options.steps)
            times["nn.DataParallel"].append(seconds)
            losses["nn.DataParallel"] = loss
            torch.set_num_threads(threads)
        dd.barrier()
        model = new_model()
        dd.broadcast_parameters(model)
        optimizer = dd.wrap_optimizer(sgd(model))
        seconds, loss = train(model, optimizer, images[mine], labels[mine], options.steps)
        times["dualdist"].append(seconds)
        losses["dualdist"] = dd.allreduce(loss)

    if dd.rank() == 0:
        where = "GPUs" if dd.device().type == "cuda" else "CPU threads"
        print(f"{len(images)} images a step, on {dd.size()} {where}")
        for name, seconds in times.items():
            rate = len(images) / statistics.median(seconds)
            print(f"{name:<16}{rate:6.0f} images/s, loss {losses[name].item():.4f}")
        ratios = [a / b for a, b in zip(*times.values(), strict=True)]
        print(f"dualdist is {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")
    dd.shutdown()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, steps: int
) -> tuple[float, torch.Tensor]:
    """Seconds of a step, the first one, which warms up, left out; and the last loss."""
    for step in range(steps + 1):
        if step == 1:
            began = now()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return (now() - began) / steps, loss.detach()


def whole_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    train_set, _ = digits(size=32)
    images, labels = zip(*(train_set[n % len(train_set)] for n in range(size)), strict=True)
    return torch.stack(images).to(dd.device()), torch.stack(labels).to(dd.device())


def new_model() -> nn.Module:
    torch.manual_seed(0)  # both start alike, and no layer looks at the batch as a whole: so both end alike
    convolutions = nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(), nn.Conv2d(64, 64, 3)
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 25, 10)).to(dd.device())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
