"""Trains an image classifier on any number of ranks: one script for every launcher and every backend.

    python examples/train.py
    torchrun --nproc-per-node 2 examples/train.py --backend native
    horovodrun -np 2 python examples/train.py
    mpirun -np 2 python examples/train.py --backend horovod

The calls to `dd.` are all that makes it a distributed program: single_process.py is the script without them. Nothing
is scaled behind your back: --batch-size is per rank and --lr is used as it stands, so choose it for the batch of all
ranks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import dualdist as dd
from common.curves import Curves
from common.options import Options, parse
from common.training import Pace, build_model, load_data, summarize, workers


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the flags say and return the summary."""
    options = parse(argv, "train.py", __doc__)
    torch.set_num_threads(options.threads)
    dd.init(options.backend)
    options.device = torch.device(options.device or dd.device())
    torch.manual_seed(options.seed)
    train_set, validation_set = load_data(options)
    model = build_model(options).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, options.momentum, weight_decay=options.weight_decay)
    dd.broadcast_parameters(model)
    dd.broadcast_optimizer_state(optimizer)
    dd.wrap_optimizer(optimizer, model.named_parameters())
    torch.manual_seed(options.seed + dd.rank())  # from here on each rank draws its own augmentation and dropout
    # Shuffled anew in each epoch; images that do not fill a batch on every rank sit that epoch out.
    sampler = dd.Sampler(train_set, remainder="drop", seed=options.seed)
    loader = dd.loader(train_set, options.batch_size, sampler=sampler, drop_last=True, **workers(options))

    pace, curves = Pace(loader, options), Curves(options)
    for epoch in range(options.epochs):
        train(model, optimizer, pace.epoch(epoch), options)
        loss, accuracy = validate(model, validation_set, options)
        if dd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        curves.add(pace.steps, loss=loss, accuracy=accuracy)
        if pace.is_over:
            break
    curves.close()
    summary = summarize(model, pace, loss, accuracy, options)
    dd.shutdown()
    return summary


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], options: Options) -> None:
    """One epoch."""
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(options.device)), labels.to(options.device))
        loss.backward()  # the gradients are averaged over all ranks when this returns
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()


@torch.no_grad()
def validate(model: nn.Module, dataset: Dataset[Any], options: Options) -> tuple[float, float]:
    """Loss and accuracy on the whole set."""
    dd.broadcast_parameters(dict(model.named_buffers()))  # batch norm's statistics: each rank saw other images
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    dataset = Subset(dataset, range(dd.rank(), len(dataset), dd.size()))  # no sample counts twice
    for images, labels in DataLoader(dataset, options.batch_size, **workers(options)):
        scores, labels = model(images.to(options.device)), labels.to(options.device)
        loss, correct = F.cross_entropy(scores, labels, reduction="sum"), (scores.argmax(1) == labels).sum()
        sums += torch.tensor([loss.item(), correct.item(), len(labels)])
    loss_sum, correct_sum, count = dd.allreduce(sums, op="sum").tolist()
    return loss_sum / count, correct_sum / count


if __name__ == "__main__":
    main()
