"""Data sets of images: real ones that need no download, and the usual ones where they are there."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import dualdist as dd
from common.ranks import fail
from dualdist.utils.machine import usable_cores
from dualdist.utils.torchvision_import import load_torchvision

CLASSES = 10
Split = tuple[Dataset[Any], Dataset[Any]]  # for training and for validation

# What torchvision's data sets look for in the folder they are given.
FOLDERS = {"cifar10": "cifar-10-batches-py", "mnist": "MNIST/raw"}


def digits(size: int = 8, channels: int = 3) -> Split:
    """1,797 handwritten digits, which scikit-learn ships; every seed has the same 360 of them for validation."""
    package = find_spec("sklearn")  # its file alone: to import the package takes nearly as long as to import torch
    if package is None or package.origin is None:
        fail("the digits come with scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz", np.float32, delimiter=",")
    pixels, labels = torch.from_numpy(table).split([64, 1], dim=1)
    images = (pixels.reshape(-1, 1, 8, 8) / 16 - 0.3) / 0.4
    images = F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, channels, -1, -1)
    dataset = TensorDataset(images, labels.flatten().long())
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(dataset, order[360:]), Subset(dataset, order[:360])


def fake(size: int) -> Split:
    """Noise, to measure with."""
    pool = TensorDataset(
        torch.randn(64, 3, size, size, generator=torch.Generator().manual_seed(0)), torch.arange(64) % CLASSES
    )
    return Subset(pool, [n % 64 for n in range(4096)]), pool


def mnist(folder: str, size: int = 28, *, download: bool = False) -> Split:
    vision = load_torchvision()
    T = vision.transforms
    usual = [T.Resize(size), T.Grayscale(3), T.ToTensor(), T.Normalize([0.131] * 3, [0.308] * 3)]
    return _train_and_test(vision.datasets.MNIST, folder, [T.RandomAffine(10, (0.1, 0.1))], usual, download)


def cifar10(folder: str, size: int = 32, *, download: bool = False) -> Split:
    vision = load_torchvision()
    T = vision.transforms
    usual = [T.Resize(size), T.ToTensor(), T.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))]
    augmentation = [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip()]
    return _train_and_test(vision.datasets.CIFAR10, folder, augmentation, usual, download)


def _train_and_test(kind: Any, folder: str, augmentation: list[Any], usual: list[Any], download: bool) -> Split:
    compose = load_torchvision().transforms.Compose
    if download:
        once_a_node(lambda: kind(folder, download=True), f"download {kind.__name__} to {folder}")
    return (
        kind(folder, train=True, transform=compose([*augmentation, *usual])),
        kind(folder, train=False, transform=compose(usual)),
    )


def limited(split: Split, images: int | None) -> Split:
    """At most so many images of each of the two."""
    train_set, validation_set = (first(part, images) for part in split)
    return train_set, validation_set


def first(dataset: Dataset[Any], images: int | None) -> Dataset[Any]:
    """At most so many images."""
    count = len(dataset)  # type: ignore[arg-type]
    return Subset(dataset, range(min(count, images or count)))


def share(dataset: Dataset[Any]) -> Dataset[Any]:
    """Every size-th sample, from this rank's number on: the ranks have all of them, and none twice."""
    return Subset(dataset, range(dd.rank(), len(dataset), dd.size()))


def loading(workers: int, device: torch.device) -> dict[str, Any]:
    """Options of loaders; forked workers would inherit the threads and connections of MPI and Horovod."""
    pinned = {"pin_memory": device.type == "cuda"}
    if workers == 0:
        return pinned
    return {**pinned, "num_workers": workers, "multiprocessing_context": "forkserver", "persistent_workers": True}


def cores_of_rank() -> int:
    """This rank's share of the cores: of its host's, or of those that its launcher has bound it to."""
    own = dd.node_rank(), sorted(os.sched_getaffinity(0))
    return max(1, usable_cores() // dd.allgather_object(own).count(own))


def not_empty(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader; where it has not one batch the program ends with a line."""
    if len(loader) == 0:
        count, ranks = len(loader.dataset), dd.size() if dd.is_initialized() else 1  # type: ignore[arg-type]
        fail(f"{count} samples do not fill a batch of {loader.batch_size} on each of {ranks} ranks")
    return loader


def once_a_node(work: Callable[[], object], what: str) -> None:
    """One rank of each node has done the work; where one could not, all ranks end and say why."""
    is_alone, error = not dd.is_initialized(), ""
    if is_alone or dd.local_rank() == 0:
        try:
            work()
        except (OSError, RuntimeError) as failure:
            error = f"could not {what}: {failure}"
    for failed in filter(None, [error] if is_alone else dd.allgather_object(error)):
        fail(failed)
