"""ResNet-50 as on ImageNet: warm-up, what is per rank and what for all, mixed precision, seeds, and going on later.

    dualdist run -np 2 examples/imagenet.py --data /data/imagenet --checkpoints run --amp

DIR/train and DIR/val have a folder for each class. Without --data the images are scikit-learn's digits, which need no
download; `--image-size 64 --batch-size 32 --epochs 2 --warmup 1` makes that quick on CPUs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import dualdist as dd
from common import curves
from common.data import Split, digits, limited, not_empty, share
from common.help import parser
from common.ranks import fail, parameter_hash
from dualdist.utils.torchvision_import import load_torchvision


def main() -> None:
    options = parse()
    dd.init()
    make_repeatable(options.seed)
    # Nobody scales anything in secret: these three are all the arithmetic there is between one rank and many.
    batch_size = divided(options.batch_size, dd.size())
    lr = options.lr * options.batch_size / 256
    workers = math.ceil(options.workers / dd.local_size())

    train_set, validation_set = load_data(options)
    model: nn.Module = load_torchvision().models.get_model(options.model, num_classes=options.classes)
    if options.weights:  # without map_location every rank of a host would load them to the GPU they were saved on
        model.load_state_dict(torch.load(options.weights, map_location="cpu", weights_only=True)["model"])
    model = model.to(dd.device(), memory_format=torch.channels_last)
    dd.broadcast_parameters(model)
    optimizer = torch.optim.SGD(groups(model, weight_decay=1e-4), lr, momentum=0.9, nesterov=True)
    dd.wrap_optimizer(optimizer, model.named_parameters())
    scaler = torch.amp.GradScaler(dd.device().type, enabled=options.amp and dd.device().type == "cuda")
    sampler = dd.Sampler(train_set, remainder="drop", seed=options.seed or 0)
    loader = not_empty(dd.loader(train_set, batch_size, sampler=sampler, drop_last=True, **loading(workers)))
    validation_loader = DataLoader(share(validation_set), batch_size, **loading(workers))
    factor = schedule(warmup=options.warmup * len(loader), steps=options.epochs * len(loader))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    best = 0.0
    if options.checkpoints and (found := dd.load_checkpoint(options.checkpoints, **state)):
        best = found["best"]  # rank 0 alone has read the file, and everything is on each rank's own device
        dd.print(f"goes on with epoch {sampler.epoch + 1}, best so far {best:.4f}")
    curve = curves.Curves(options)
    for epoch in range(sampler.epoch, options.epochs):
        loss = train(model, optimizer, scheduler, scaler, loader, options)
        top1, top5 = validate(model, validation_loader, options)
        best, (next_lr, _) = max(best, top1), scheduler.get_last_lr()
        figures = f"loss {loss:.4f}, top-1 {top1:.4f}, top-5 {top5:.4f}, lr {next_lr:.5f}"
        dd.print(f"epoch {epoch + 1}/{options.epochs}: {figures}")
        curve.add((epoch + 1) * len(loader), loss=loss, top1=top1, lr=next_lr)
        if options.checkpoints:
            dd.save_checkpoint(options.checkpoints, **state, best=best)
    curve.close()
    dd.print(f"every rank has the parameters {parameter_hash(model):.16}")
    dd.shutdown()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    loader: DataLoader[Any],
    options: argparse.Namespace,
) -> float:
    """One epoch; the mean loss of all ranks."""
    model.train()
    mean = dd.Metric("loss")
    for images, labels in dd.progress(loader, "train"):
        images = images.to(dd.device(), memory_format=torch.channels_last, non_blocking=True)
        labels = labels.to(dd.device(), non_blocking=True)
        optimizer.zero_grad()
        with mixed_precision(options):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()  # where gradients overflow on one rank, all ranks skip the step
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        mean.update(loss, len(labels))
    return mean.value()


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[Any], options: argparse.Namespace) -> tuple[float, float]:
    """Top-1 and top-5 accuracy on the whole set, of which each rank sees a part."""
    dd.broadcast_parameters(dict(model.named_buffers()))  # batch norm's statistics: each rank saw other images
    model.eval()
    top1, top5 = dd.Metric("top-1"), dd.Metric("top-5")
    for images, labels in loader:
        with mixed_precision(options):
            scores = model(images.to(dd.device(), memory_format=torch.channels_last))
        hits = (scores.topk(min(5, scores.shape[1])).indices.cpu() == labels[:, None]).float()
        top1.update(hits[:, 0].mean(), len(labels))  # the last batch may be smaller, and not every rank may have it
        top5.update(hits.sum(1).mean(), len(labels))
    return top1.value(), top5.value()


def schedule(*, warmup: float, steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at each step: up in a line over the warm-up, then down like a cosine to zero.

    A function, which a checkpoint leaves out: who goes on with more --epochs gets the curve of those.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, steps - warmup)))

    return factor


def load_data(options: argparse.Namespace) -> Split:
    if not options.data:
        return limited(digits(options.image_size), options.limit)
    vision, size = load_torchvision(), options.image_size
    T = vision.transforms
    tensor = [T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    train = T.Compose([T.RandomResizedCrop(size), T.RandomHorizontalFlip(), *tensor])
    val = T.Compose([T.Resize(size * 8 // 7), T.CenterCrop(size), *tensor])
    folder = vision.datasets.ImageFolder
    return limited((folder(f"{options.data}/train", train), folder(f"{options.data}/val", val)), options.limit)


def loading(workers: int) -> dict[str, Any]:
    """What loaders are told; forked workers would inherit the threads and connections of MPI and Horovod."""
    pinned = {"pin_memory": dd.device().type == "cuda"}
    if workers == 0:
        return pinned
    return {**pinned, "num_workers": workers, "multiprocessing_context": "forkserver", "persistent_workers": True}


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Batch norm and biases do not decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def mixed_precision(options: argparse.Namespace) -> torch.autocast:
    kind = dd.device().type
    return torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16, enabled=options.amp)


def make_repeatable(seed: int | None) -> None:
    """With a seed the same run gives the same bits; without one cuDNN may try which algorithms are the fastest."""
    torch.backends.cudnn.benchmark = seed is None
    torch.backends.cudnn.deterministic = seed is not None
    if seed is not None:
        torch.manual_seed(seed + dd.rank())


def divided(batch_size: int, ranks: int) -> int:
    each, rest = divmod(batch_size, ranks)
    if rest:
        fail(f"--batch-size {batch_size}: {ranks} ranks cannot share it evenly")
    return each


def parse() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--data", metavar="DIR", help="where ImageNet lies")
    flags.add_argument("--classes", type=int, default=1000, help="how many there are")
    flags.add_argument("--model", default="resnet50", help="a classifier of torchvision")
    flags.add_argument("--image-size", type=int, default=224, help="height and width")
    flags.add_argument("--limit", type=int, metavar="N", help="take so many images only")
    flags.add_argument("--epochs", type=int, default=90, help="times that all images are seen")
    flags.add_argument("--batch-size", type=int, default=256, help="images in a step, of all ranks together")
    flags.add_argument("--workers", type=int, default=0, help="processes that load images, of all ranks of a host")
    flags.add_argument("--lr", type=float, default=0.1, help="learning rate for 256 images in a step")
    flags.add_argument("--warmup", type=float, default=5, metavar="EPOCHS", help="how long the learning rate goes up")
    flags.add_argument("--amp", action="store_true", help="compute in float16 on GPUs, in bfloat16 on CPUs")
    flags.add_argument("--seed", type=int, help="make runs repeat each other, at some speed")
    flags.add_argument("--weights", metavar="FILE", help="start from the model in this checkpoint")
    flags.add_argument("--checkpoints", metavar="DIR", help="keep one for each epoch, and go on from the last")
    curves.add_flags(flags)
    return flags.parse_args()


if __name__ == "__main__":
    main()
