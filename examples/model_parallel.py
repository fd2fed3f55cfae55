"""One model split over two devices, and such models trained in parallel on different data.

    dualdist run -np 2 examples/model_parallel.py

Each rank holds a whole model: its first stage on one device, its second stage on another. So the ranks are copies of
each other, and their gradients are averaged as ever, those of each stage where they lie. A rank takes two GPUs; where
there are not two for every rank of the host, both stages are on the CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import dualdist as dd
from common.data import digits
from common.help import parser


class TwoStages(nn.Module):
    """A classifier of digits on two devices; what lies between the stages travels, and its gradient travels back."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.devices = first, second
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128)).to(first)
        self.classifier = nn.Sequential(nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first, second = self.devices
        return self.classifier(self.encoder(images.to(first)).to(second))


def two_devices() -> tuple[torch.device, torch.device]:
    """This rank's own two."""
    if torch.cuda.device_count() < 2 * dd.local_size():
        return torch.device("cpu"), torch.device("cpu")
    return torch.device("cuda", 2 * dd.local_rank()), torch.device("cuda", 2 * dd.local_rank() + 1)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--epochs", type=int, default=3, help="times that all images are seen")
    flags.add_argument("--batch-size", type=int, default=32, help="images per rank")
    flags.add_argument("--lr", type=float, default=0.3, help="learning rate")
    options = flags.parse_args()
    dd.init()
    torch.manual_seed(0)
    model = TwoStages(*two_devices())
    dd.broadcast_parameters(model)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), options.lr))
    train_set, validation_set = digits(channels=1)
    sampler = dd.Sampler(train_set, remainder="drop")
    loader = dd.loader(train_set, options.batch_size, sampler=sampler, drop_last=True)
    _, last = model.devices
    for epoch in range(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels.to(last)).backward()
            optimizer.step()
        images, labels = next(iter(DataLoader(validation_set, len(validation_set))))
        with torch.no_grad():
            loss = F.cross_entropy(model(images), labels.to(last)).item()
        where = " and ".join(map(str, model.devices))
        dd.print(f"epoch {epoch + 1}/{options.epochs}: loss {loss:.4f} on {dd.size()} ranks, rank 0's on {where}")
    dd.shutdown()


if __name__ == "__main__":
    main()
