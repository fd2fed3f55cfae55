"""Starts the ranks itself, from one process, as programs do with torch.multiprocessing.spawn.

    python examples/spawn.py --ranks 2

dd.spawn finds a place for the ranks to meet, ends all of them when one fails, and brings their results back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import dualdist as dd
from common.data import digits
from common.help import parser


def train(epochs: int, lr: float) -> tuple[float, float]:
    """What every rank runs; the loss at the beginning and at the end, of all ranks' images."""
    dd.init()
    torch.manual_seed(0)
    train_set, _ = digits(channels=1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(dd.device())
    dd.broadcast_parameters(model)
    optimizer = dd.wrap_optimizer(torch.optim.Adam(model.parameters(), lr))
    loader = dd.loader(train_set, batch_size=32, sampler=dd.Sampler(train_set, remainder="drop"))
    losses = []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(dd.device())), labels.to(dd.device()))
            loss.backward()
            optimizer.step()
            losses.append(dd.allreduce(loss.detach()).item())
    dd.shutdown()
    return losses[0], losses[-1]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=2, help="processes to start")
    flags.add_argument("--epochs", type=int, default=5, help="times that all images are seen")
    flags.add_argument("--lr", type=float, default=0.01, help="learning rate")
    options = flags.parse_args()
    for rank, (first, last) in enumerate(dd.spawn(train, options.ranks, (options.epochs, options.lr))):
        print(f"rank {rank}: the loss went from {first:.3f} to {last:.3f}")


if __name__ == "__main__":  # new processes import this module: without the guard they would start ranks, too
    main()
