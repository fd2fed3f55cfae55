"""Trains an image classifier in one process; train.py is the same script on any number of ranks.

python examples/single_process.py --model mlp --epochs 5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from common.curves import Curves
from common.options import Options, parse
from common.training import Pace, build_model, load_data, summarize, workers


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the flags say and return the summary."""
    options = parse(argv, "single_process.py", __doc__, ranks=False)
    torch.set_num_threads(options.threads)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(options.seed)
    train_set, validation_set = load_data(options)
    model = build_model(options).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, options.momentum, weight_decay=options.weight_decay)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    loader = DataLoader(train_set, options.batch_size, sampler=sampler, drop_last=True, **workers(options))

    pace, curves = Pace(loader, options), Curves(options)
    for epoch in range(options.epochs):
        order.manual_seed(options.seed + epoch)
        train(model, optimizer, pace.epoch(epoch), options)
        loss, accuracy = validate(model, validation_set, options)
        print(f"epoch {epoch + 1}/{options.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        curves.add(pace.steps, loss=loss, accuracy=accuracy)
        if pace.is_over:
            break
    curves.close()
    return summarize(model, pace, loss, accuracy, options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], options: Options) -> None:
    """One epoch."""
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(options.device)), labels.to(options.device))
        loss.backward()
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()


@torch.no_grad()
def validate(model: nn.Module, dataset: Dataset[Any], options: Options) -> tuple[float, float]:
    """Loss and accuracy on the whole set."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for images, labels in DataLoader(dataset, options.batch_size, **workers(options)):
        scores, labels = model(images.to(options.device)), labels.to(options.device)
        loss, correct = F.cross_entropy(scores, labels, reduction="sum"), (scores.argmax(1) == labels).sum()
        sums += torch.tensor([loss.item(), correct.item(), len(labels)])
    loss_sum, correct_sum, count = sums.tolist()
    return loss_sum / count, correct_sum / count


if __name__ == "__main__":
    main()
