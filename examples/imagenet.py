"""ResNet-50 as on ImageNet: warm-up, what is per rank, mixed precision, seeds, resuming, evaluation.

    dualdist run -np 2 examples/imagenet.py --data /data/imagenet --checkpoints run --amp
    dualdist run -np 2 examples/imagenet.py --data /data/imagenet --pretrained resnet50.pth --evaluate

DIR/train and DIR/val have a folder for each class. Without --data the images are scikit-learn's digits, which need no
download; `--image-size 64 --batch-size 16 --epochs 2 --warmup 1` makes that quick on CPUs.
Not run on GPUs yet: dualdist's tests have CPUs only.
"""

from __future__ import annotations

import argparse
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dualdist as dd
from common import curves, precision
from common.data import cores_of_rank, digits, first, loading, not_empty, share
from common.help import parser
from common.ranks import fail, parameter_hash
from dualdist.utils.torchvision_import import load_torchvision


def main() -> None:
    options = parse()
    dd.init()
    make_repeatable(options.seed)
    lr = options.lr * options.batch_size * dd.size() / 256  # nothing else depends on the number of ranks
    how = loading(cores_of_rank() if options.workers is None else options.workers, dd.device())

    model: nn.Module = load_torchvision().models.get_model(options.model, num_classes=options.classes)
    if options.pretrained:
        load_pretrained(model, options.pretrained)
    model = model.to(dd.device(), memory_format=torch.channels_last)
    dd.broadcast_parameters(model)
    validation_set = load_data(options, training=False)
    validation_loader = DataLoader(share(validation_set), options.batch_size, **how)
    if options.evaluate:
        if options.checkpoints and not dd.load_checkpoint(options.checkpoints, model=model):
            fail(f"--checkpoints {options.checkpoints}: holds no checkpoint to evaluate")
        top1, top5 = validate(model, validation_loader, options)
        dd.print(f"evaluated: top-1 {top1:.4f}, top-5 {top5:.4f}")
        dd.shutdown()
        return
    optimizer = torch.optim.SGD(groups(model, weight_decay=1e-4), lr, momentum=0.9, nesterov=True)
    dd.wrap_optimizer(optimizer, model.named_parameters())
    scaler = precision.grad_scaler(options.amp)
    train_set = load_data(options, training=True)
    sampler = dd.Sampler(train_set, remainder="drop", seed=options.seed or 0)
    loader = not_empty(dd.loader(train_set, options.batch_size, sampler=sampler, drop_last=True, **how))
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
        with precision.autocast(options.amp):
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
        with precision.autocast(options.amp):
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


def load_data(options: argparse.Namespace, *, training: bool) -> Dataset[Any]:
    if not options.data:
        train_set, validation_set = digits(options.image_size)
        return first(train_set if training else validation_set, options.limit)
    vision, size = load_torchvision(), options.image_size
    T = vision.transforms
    tensor = [T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    if training:
        folder, crop = "train", [T.RandomResizedCrop(size), T.RandomHorizontalFlip()]
    else:
        folder, crop = "val", [T.Resize(size * 8 // 7), T.CenterCrop(size)]
    return first(vision.datasets.ImageFolder(f"{options.data}/{folder}", T.Compose([*crop, *tensor])), options.limit)


def load_pretrained(model: nn.Module, file: str) -> None:
    """Take the parameters in a file of torchvision, of pytorch/examples, or of --checkpoints."""
    try:  # without map_location every rank of a host would load them to the GPU they were saved on
        found = torch.load(file, map_location="cpu", weights_only=True)
        parameters = found.get("model", found.get("state_dict", found))
        nn.modules.utils.consume_prefix_in_state_dict_if_present(parameters, "module.")
        model.load_state_dict(parameters)
    except (OSError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
        fail(f"--pretrained {file}: {' '.join(str(error).split())[:400]}")


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Batch norm and biases do not decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def make_repeatable(seed: int | None) -> None:
    """With a seed the same run gives the same bits; without one cuDNN may try which algorithms are the fastest."""
    torch.backends.cudnn.benchmark = seed is None
    torch.backends.cudnn.deterministic = seed is not None
    if seed is not None:
        torch.manual_seed(seed + dd.rank())


def parse() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--data", metavar="DIR", help="where ImageNet lies")
    flags.add_argument("--classes", type=int, default=1000, help="how many there are")
    flags.add_argument("--model", default="resnet50", help="a classifier of torchvision")
    flags.add_argument("--image-size", type=int, default=224, help="height and width")
    flags.add_argument("--limit", type=int, metavar="N", help="take N images only")
    flags.add_argument("--epochs", type=int, default=90, help="times that all images are seen")
    flags.add_argument("--batch-size", type=int, default=32, help="images per rank")
    flags.add_argument("--workers", type=int, help="processes per rank that load images (default: its cores)")
    flags.add_argument("--lr", type=float, default=0.1, help="learning rate for 256 images in a step of all ranks")
    flags.add_argument("--warmup", type=float, default=5, metavar="EPOCHS", help="how long the learning rate goes up")
    flags.add_argument("--amp", action="store_true", help=precision.HELP)
    flags.add_argument("--seed", type=int, help="make runs repeat each other, at some speed")
    flags.add_argument("--pretrained", metavar="FILE", help="start from the parameters in this file")
    flags.add_argument("--checkpoints", metavar="DIR", help="keep one for each epoch, and go on from the last")
    flags.add_argument("--evaluate", action="store_true", help="validate what these two name, without training")
    curves.add_flags(flags)
    options = flags.parse_args()
    if options.evaluate and not (options.pretrained or options.checkpoints):
        flags.error("--evaluate: needs --pretrained FILE or --checkpoints DIR")
    return options


if __name__ == "__main__":
    main()
