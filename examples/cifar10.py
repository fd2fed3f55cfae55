"""ResNet-18 on CIFAR-10, by a Trainer as tutorials have it; the speed of one process alone is measured first.

    dualdist run -np 2 examples/cifar10.py --data data --download

Without --data the images are scikit-learn's digits, which need no download. --batch-size is per rank, --lr is for all.
Not run on GPUs yet: dualdist's tests have CPUs only.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dualdist as dd
from common import curves, data, precision
from common.help import parser
from common.ranks import parameter_hash
from dualdist.utils.torchvision_import import load_torchvision


class Trainer:
    """A model, its optimizer and its images; alone in a process, or together with the Trainers of all ranks."""

    def __init__(
        self, train_set: Dataset, validation_set: Dataset, options: argparse.Namespace, *, alone: bool = False
    ) -> None:
        self.model = resnet18(small_photographs=bool(options.data)).to(dd.device())
        self.optimizer = torch.optim.SGD(self.model.parameters(), options.lr, momentum=0.9, weight_decay=5e-4)
        # Down like a cosine to zero, in as many epochs as this run is told, also where it goes on from a snapshot.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda epoch: 0.5 * (1 + math.cos(math.pi * epoch / options.epochs))
        )
        self.scaler = precision.grad_scaler(options.amp)
        self.options = options
        self.step = 0
        how = data.loading(options.workers, dd.device())
        if alone:
            loader = DataLoader(train_set, options.batch_size, shuffle=True, drop_last=True, **how)
            self.loader = data.not_empty(loader)
            return
        dd.broadcast_parameters(self.model)
        dd.wrap_optimizer(self.optimizer)
        self.sampler = dd.Sampler(train_set, remainder="drop")
        loader = dd.loader(train_set, options.batch_size, sampler=self.sampler, drop_last=True, **how)
        self.loader = data.not_empty(loader)
        self.validation_loader = DataLoader(data.share(validation_set), options.batch_size, **how)

    def run_batch(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        with precision.autocast(self.options.amp):
            loss = F.cross_entropy(self.model(images.to(dd.device())), labels.to(dd.device()))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        return loss.detach()

    def run_epoch(self) -> tuple[float, float]:
        """Train on this process' part of the images; returns their mean loss, and how many a second they were."""
        self.model.train()
        began, total = time.perf_counter(), torch.zeros((), device=dd.device())
        for images, labels in self.loader:
            total += self.run_batch(images, labels)
        loss = total.item() / len(self.loader)  # waits for the GPU
        return loss, len(self.loader) * self.options.batch_size / (time.perf_counter() - began)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The accuracy on all of the validation set, of which each rank takes a part."""
        dd.broadcast_parameters(dict(self.model.named_buffers()))  # batch norm's statistics
        self.model.eval()
        accuracy = dd.Metric("accuracy")
        for images, labels in self.validation_loader:
            with precision.autocast(self.options.amp):
                is_right = self.model(images.to(dd.device())).argmax(1).cpu() == labels
            accuracy.update(is_right.float().mean(), len(labels))
        return accuracy.value()

    def train(self, alone: float) -> None:
        """All epochs, from the last snapshot on where there is one; rank 0 tells how it goes."""
        names = ("model", "optimizer", "scheduler", "scaler", "sampler")
        state = {name: getattr(self, name) for name in names}
        if self.options.snapshots:
            found = dd.load_checkpoint(self.options.snapshots, **state)
            self.step = found["step"] if found else 0
        curve = curves.Curves(self.options)
        for epoch in range(self.sampler.epoch, self.options.epochs):
            loss, speed = dd.allreduce(torch.tensor(self.run_epoch())).tolist()
            self.scheduler.step()
            accuracy = self.evaluate()
            curve.add(self.step, loss=loss, accuracy=accuracy)
            speed *= dd.size()
            dd.print(
                f"epoch {epoch + 1}/{self.options.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}, "
                f"{speed:.0f} images/s on {dd.size()} ranks, {speed / alone:.2f} times one process"
            )
            if self.options.snapshots:
                dd.save_checkpoint(self.options.snapshots, **state, step=self.step)
        curve.close()
        dd.print(f"every rank has the parameters {parameter_hash(self.model):.16}")


def resnet18(*, small_photographs: bool) -> nn.Module:
    model = load_torchvision().models.resnet18(num_classes=data.CLASSES)
    if small_photographs:  # the stem for 224x224 would leave little of 32x32
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--data", metavar="DIR", help="where CIFAR-10 lies")
    flags.add_argument("--download", action="store_true", help="one rank of each node downloads it to --data")
    flags.add_argument("--epochs", type=int, default=3, help="times that all images are seen")
    flags.add_argument("--batch-size", type=int, default=32, help="images per rank")
    flags.add_argument("--workers", type=int, default=0, help="processes per rank that load images")
    flags.add_argument("--amp", action="store_true", help=precision.HELP)
    flags.add_argument("--lr", type=float, default=0.05, help="learning rate at the beginning")
    flags.add_argument("--limit", type=int, metavar="N", help="take N images only")
    flags.add_argument("--snapshots", metavar="DIR", help="keep one for each epoch there, and go on from the last")
    curves.add_flags(flags)
    options = flags.parse_args()
    if options.download and not options.data:
        flags.error("--download: needs --data, the folder to which")
    dd.init()
    torch.manual_seed(dd.rank())
    images = data.cifar10(options.data, download=options.download) if options.data else data.digits(size=32)
    train_set, validation_set = data.limited(images, options.limit)
    alone = 0.0
    if dd.rank() == 0:  # without distribution, while the other ranks wait
        few, _ = data.limited((train_set, validation_set), 20 * options.batch_size)
        _, alone = Trainer(few, validation_set, options, alone=True).run_epoch()
        print(f"one process, without dualdist: {alone:.0f} images/s", flush=True)
    dd.barrier()
    Trainer(train_set, validation_set, options).train(dd.broadcast_object(alone))
    dd.shutdown()


if __name__ == "__main__":
    main()
