"""Trains an image classifier on any number of ranks: one file for every launcher and every backend.

    python examples/train.py
    torchrun --nproc-per-node 2 examples/train.py --backend native
    horovodrun -np 2 python examples/train.py
    mpirun -np 2 python examples/train.py --backend horovod

The calls to `dd.` are all that makes it a distributed program. Nothing is scaled behind your back: --batch-size is
per rank and --lr is used as it stands, so choose it for the batch of all ranks together.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from tqdm import tqdm

import dualdist as dd
from dualdist.vision import load_torchvision

CLASSES = 10
Options = argparse.Namespace


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the flags say and return the summary, on every rank."""
    options = parse(sys.argv[1:] if argv is None else argv)
    # Sums of floats depend on the number of threads, and each launcher sets another one: fix it, and all runs agree.
    torch.set_num_threads(options.threads)
    dd.init(options.backend)
    started = time.perf_counter()
    options.device = dd.device() if options.device == "auto" else torch.device(options.device)
    torch.manual_seed(options.seed)
    train_set, validation_set = load_data(options)
    model = build_model(options).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, options.momentum, weight_decay=options.weight_decay)
    dd.broadcast_parameters(model)
    dd.broadcast_optimizer_state(optimizer)
    dd.wrap_optimizer(optimizer, model.named_parameters())
    torch.manual_seed(options.seed + dd.rank())  # from here on each rank draws its own augmentation and dropout
    # Shuffled anew in each epoch; images that do not fill a batch on every rank sit that epoch out.
    sampler = DistributedSampler(train_set, dd.size(), dd.rank(), seed=options.seed, drop_last=True)
    loader = make_loader(train_set, options, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        fail(f"{len(train_set)} images do not fill a batch of {options.batch_size} on each of {dd.size()} ranks")

    steps, train_s = 0, 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        planned = min(len(loader), options.max_steps - steps)
        hidden = dd.rank() > 0 or not sys.stderr.isatty()
        bar = tqdm(islice(loader, planned), f"epoch {epoch + 1}", planned, disable=hidden)
        train_s += train(model, optimizer, bar, options, warm_up=epoch == 0)
        steps += planned
        loss, accuracy = validate(model, validation_set, options)
        if dd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        if steps == options.max_steps:
            break

    summary = {
        "launcher": dd.launcher(),
        "backend": dd.backend(),
        "transport": dd.transport(),
        "ranks": dd.size(),
        "images_per_s": round((steps - 1) * options.batch_size * dd.size() / train_s, 1),
        "seconds": round(time.perf_counter() - started, 2),
        "loss": loss,
        "accuracy": accuracy,
        "parameter_hash": parameter_hash(model),
        "device": str(options.device),
        "steps": steps,
    }
    if dd.rank() == 0:
        report(summary, options.summary)
    dd.shutdown()
    return summary


def train(model: nn.Module, optimizer: Any, batches: Iterable[Any], options: Options, *, warm_up: bool) -> float:
    """One epoch; returns its seconds, without those of the first step where that one is a warm-up."""
    model.train()
    began = now(options.device)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(options.device)), labels.to(options.device))
        loss.backward()  # the gradients are averaged over all ranks when this returns
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        if warm_up:
            began, warm_up = now(options.device), False
    return now(options.device) - began


@torch.no_grad()
def validate(model: nn.Module, dataset: Dataset[Any], options: Options) -> tuple[float, float]:
    """Loss and accuracy on the whole set, alike on every rank; each takes every size-th sample, none counts twice."""
    # Batch norm's running statistics differ, since each rank saw other images: all ranks validate rank 0's model.
    dd.broadcast_parameters(dict(model.named_buffers()))
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for images, labels in make_loader(Subset(dataset, range(dd.rank(), len(dataset), dd.size())), options):
        scores, labels = model(images.to(options.device)), labels.to(options.device)
        loss, correct = F.cross_entropy(scores, labels, reduction="sum"), (scores.argmax(1) == labels).sum()
        sums += torch.tensor([loss.item(), correct.item(), len(labels)])
    loss_sum, correct_sum, count = dd.allreduce(sums, op="sum").tolist()
    return loss_sum / count, correct_sum / count


def load_data(options: Options) -> tuple[Dataset[Any], Dataset[Any]]:
    """The training and validation sets, alike on every rank."""
    size = options.image_size
    if options.dataset == "cifar10":
        return load_cifar10(options)
    if options.dataset == "fake":
        random = torch.Generator().manual_seed(0)
        pool = TensorDataset(torch.randn(64, 3, size, size, generator=random), torch.arange(64) % CLASSES)
        return Subset(pool, [n % 64 for n in range(4096)]), pool
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 - 0.3) / 0.4
    images = F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
    digits = TensorDataset(images, torch.tensor(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()  # one split for all seeds
    return Subset(digits, order[360:]), Subset(digits, order[:360])


def load_cifar10(options: Options) -> tuple[Dataset[Any], Dataset[Any]]:
    """CIFAR-10; one rank of each node downloads it while the others wait."""
    vision, error = load_torchvision(), ""
    if options.download and dd.local_rank() == 0:
        try:
            vision.datasets.CIFAR10(options.data, download=True)
        except (OSError, RuntimeError) as failure:
            error = f"rank {dd.rank()} could not download CIFAR-10 to {options.data}: {failure}"
    for failed in filter(None, dd.allgather_object(error)):
        fail(failed)
    T = vision.transforms
    usual = [T.Resize(options.image_size), T.ToTensor(), T.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))]
    augmented = [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), *usual]
    return (
        vision.datasets.CIFAR10(options.data, train=True, transform=T.Compose(augmented)),
        vision.datasets.CIFAR10(options.data, train=False, transform=T.Compose(usual)),
    )


def make_loader(dataset: Dataset[Any], options: Options, **settings: Any) -> DataLoader[Any]:
    if options.workers:  # forked workers would inherit the threads and connections of MPI and Horovod
        settings |= {"multiprocessing_context": "forkserver", "persistent_workers": True}
    return DataLoader(dataset, options.batch_size, num_workers=options.workers, **settings)


def build_model(options: Options) -> nn.Module:
    if options.model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * options.image_size**2, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model: nn.Module = load_torchvision().models.get_model(options.model, num_classes=CLASSES)
    return model


def parameter_hash(model: nn.Module) -> str:
    """SHA-256 of all parameters, equal only where every bit is; ends the program where the ranks disagree."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        array = parameter.detach().cpu().numpy()
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    hashes = dd.allgather_object(digest.hexdigest())
    if len(set(hashes)) > 1:
        fail(f"the ranks ended with different parameters: {', '.join(hashes)}")
    return hashes[0]


def now(device: torch.device) -> float:
    """The time when everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def report(summary: dict[str, Any], file: str | None) -> None:
    line = "launcher={launcher} backend={backend} transport={transport} ranks={ranks} images/s={images_per_s} "
    line += "seconds={seconds} loss={loss:.4f} accuracy={accuracy:.4f} hash={parameter_hash:.16}"
    print("summary: " + line.format_map(summary), flush=True)
    if file:
        Path(file).write_text(json.dumps(summary, indent=2) + "\n")


def fail(message: str) -> NoReturn:
    sys.exit(f"train.py: error: {message}")


def number(kind: type, *, minimum: float = 0) -> Any:
    """The argparse type of an int or a float with a lower bound."""

    def parsed(text: str) -> Any:
        if not minimum <= (value := kind(text)) < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not {minimum} or more")
        return value

    parsed.__name__ = kind.__name__
    return parsed


# The flags, and the keys of --config FILE.
FLAGS: dict[str, dict[str, Any]] = {
    "backend": {"choices": ["auto", "native", "horovod"], "help": "default: DUALDIST_BACKEND, else auto"},
    "dataset": {"choices": ["digits", "cifar10", "fake"], "default": "digits"},
    "data": {"default": "data", "metavar": "DIR", "help": "where CIFAR-10 lies (default: data)"},
    "download": {"action": argparse.BooleanOptionalAction, "help": "one rank of each node downloads CIFAR-10"},
    "model": {"default": "resnet18", "help": "a classifier of torchvision, or mlp (default: resnet18)"},
    "image-size": {"type": number(int, minimum=8), "default": 32},
    "epochs": {"type": number(int, minimum=1), "default": 3},
    "max-steps": {"type": number(int, minimum=1), "default": sys.maxsize, "help": "end after so many steps"},
    "batch-size": {"type": number(int, minimum=1), "default": 32, "help": "per rank (default: 32)"},
    "lr": {"type": number(float), "default": 0.02, "help": "used as it stands, whatever the number of ranks"},
    "momentum": {"type": number(float), "default": 0.9},
    "weight-decay": {"type": number(float), "default": 5e-4},
    "clip": {"type": number(float), "default": 0.0, "help": "largest norm of the gradient (default: 0, no limit)"},
    "seed": {"type": number(int), "default": 0},
    "device": {"choices": ["auto", "cpu", "cuda"], "default": "auto"},
    "threads": {"type": number(int, minimum=1), "default": 1, "help": "CPU threads per rank (default: 1)"},
    "workers": {"type": number(int), "default": 0, "help": "processes per rank that load images (default: 0)"},
    "summary": {"metavar": "FILE", "help": "write the summary as JSON"},
}


def parse(argv: Sequence[str]) -> Options:
    """The flags, else the keys of --config FILE, else the defaults; a wrong one ends the program with one line."""
    parser = argparse.ArgumentParser("train.py", "train.py [options]", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="a YAML file with these flags as keys; flags win over it")
    for name, settings in FLAGS.items():
        parser.add_argument(f"--{name}", **settings)
    options = parser.parse_args(argv)
    if options.config:
        from_file = flags_in(options.config, parser)
        parser.prog += f": --config {options.config}"  # the flags were fine: what is wrong now is in the file
        options = parser.parse_args([*from_file, *argv])
    if options.model != "mlp":
        models = load_torchvision().models
        valid = {"mlp", *models.list_models(module=models)} - {"googlenet", "inception_v3"}  # return more than scores
        if options.model not in valid:
            parser.error(f"--model {options.model}: unknown; {nearest(options.model, valid)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if options.dataset == "cifar10" and not (options.download or Path(options.data, "cifar-10-batches-py").is_dir()):
        parser.error(f"--data {options.data}: holds no folder cifar-10-batches-py; name another or add --download")
    return options


def flags_in(file: str, parser: argparse.ArgumentParser) -> list[str]:
    """The YAML file's keys as flags."""
    try:
        keys = yaml.safe_load(Path(file).read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(f"--config {file}: {' '.join(str(error).split())}")
    if not isinstance(keys, dict):
        parser.error(f"--config {file}: expected lines such as `epochs: 3`, not a {type(keys).__name__}")
    flags = []
    for key, value in keys.items():
        name = str(key).replace("_", "-")
        if name not in FLAGS:
            parser.error(f"--config {file}: unknown key {key!r}; {nearest(name, FLAGS)}")
        kind = getattr(FLAGS[name].get("type"), "__name__", "bool" if "action" in FLAGS[name] else "str")
        fitting = {"bool": bool, "int": int, "float": (int, float, str), "str": str}[kind]  # YAML takes 1e-3 for text
        if not isinstance(value, fitting) or (isinstance(value, bool) and kind != "bool"):
            parser.error(f"--config {file}: {key}: expected {kind}, not {value!r}")
        flags.append(f"--{name}={value}" if kind != "bool" else f"--{name}" if value else f"--no-{name}")
    return flags


def nearest(name: str, valid: Iterable[str]) -> str:
    return f"did you mean {difflib.get_close_matches(name, sorted(valid), 1, cutoff=0)[0]!r}?"


if __name__ == "__main__":
    main()
