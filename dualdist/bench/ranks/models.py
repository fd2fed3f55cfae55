"""The models that a step is measured with, their batches, and their loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dualdist.bench.cases import StepOptions

CLASSES = 10
MLP_LAYERS, MLP_WIDTH = 100, 64


@dataclass(frozen=True)
class ModelFactory:
    """A model in the making: build() gives one with the same parameters every time, whoever calls it."""

    build: Callable[[], nn.Module]
    inputs: torch.Tensor
    targets: torch.Tensor

    def loss(self, model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(self.inputs), self.targets)

    def part(self, rank: int, ranks: int) -> ModelFactory:
        """One rank's rows of this batch."""
        rows = slice(rank * len(self.inputs) // ranks, (rank + 1) * len(self.inputs) // ranks)
        return ModelFactory(self.build, self.inputs[rows], self.targets[rows])


class ResidualMlp(nn.Module):
    """Layers that add to what they are given, so that gradients stay normal numbers all the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(MLP_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.relu(layer(x))
        return x


class Encoder(nn.Module):
    """Embedding, encoder layers without dropout, and a class for each sequence."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return classes


def case_of(options: StepOptions, device: torch.device, rank: int) -> ModelFactory:
    """The case of these options on this rank; each rank has a batch of its own."""
    make, inputs, classes = MAKERS[options.model](options, torch.Generator().manual_seed(options.seed + 1 + rank))

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            return make().to(device).train()

    targets = torch.arange(options.batch_size) % classes
    return ModelFactory(build, inputs.to(device), targets.to(device))


Maker = Callable[[StepOptions, torch.Generator], "tuple[Callable[[], nn.Module], torch.Tensor, int]"]


def _resnet(name: str) -> Maker:
    def make(options: StepOptions, random: torch.Generator) -> tuple[Callable[[], nn.Module], torch.Tensor, int]:
        from dualdist.utils.torchvision_import import load_torchvision

        builder = getattr(load_torchvision().models, name)
        images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, generator=random)
        return builder, images, 1000

    return make


def _mlp(options: StepOptions, random: torch.Generator) -> tuple[Callable[[], nn.Module], torch.Tensor, int]:
    return ResidualMlp, torch.randn(options.batch_size, MLP_WIDTH, generator=random), MLP_WIDTH


def _transformer(layers: int, width: int, heads: int, vocabulary: int, length: int) -> Maker:
    def make(options: StepOptions, random: torch.Generator) -> tuple[Callable[[], nn.Module], torch.Tensor, int]:
        tokens = torch.randint(vocabulary, (options.batch_size, length), generator=random)
        return lambda: Encoder(layers, width, heads, vocabulary), tokens, CLASSES

    return make


MAKERS: dict[str, Maker] = {
    "resnet18": _resnet("resnet18"),
    "resnet50": _resnet("resnet50"),
    "mlp": _mlp,
    "transformer": _transformer(layers=5, width=384, heads=6, vocabulary=2000, length=32),
    "transformer100m": _transformer(layers=16, width=768, heads=12, vocabulary=16384, length=128),
}
