"""Models, contenders and options of a benchmark; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dualdist.backends import registry

# Image size of the ResNets. At 64 a step of ResNet-18 takes about as long as two ranks on two cores need to exchange
# its gradients, where overlap matters most; at 32 communication dominates.
IMAGE_SIZE = 64
BATCH = 8


@dataclass(frozen=True)
class BenchmarkModel:
    """A model to train; `full` ones run only on request. `batch` is per rank, `steps` per launch of a comparison."""

    description: str
    batch: int = BATCH
    full: bool = False
    steps: int = 20


MODELS = {
    "resnet18": BenchmarkModel("ResNet-18 of torchvision, 11.7 million parameters in 62 tensors", steps=15),
    "mlp": BenchmarkModel(
        "100 residual linear layers 64 wide, 0.4 million parameters in 200 tensors", batch=32, steps=100
    ),
    "transformer": BenchmarkModel(
        "5 encoder layers 384 wide on 32 tokens, 9.6 million parameters in 63 tensors", batch=4
    ),
    "resnet50": BenchmarkModel("ResNet-50 of torchvision, 25.6 million parameters in 161 tensors", full=True, steps=8),
    "transformer100m": BenchmarkModel(
        "16 encoder layers 768 wide on 128 tokens, 126 million parameters", batch=8, full=True, steps=5
    ),
}

# In the order of the first round.
CONTENDERS = {
    "none": "no communication (the limit)",
    "ddp": "DDP default",
    "ddp_view": "DDP gradient_as_bucket_view",
    "ddp_best": "DDP as bucket views, buffers not broadcast",
    "dualdist": "dualdist",
    "hvd": "hvd.DistributedOptimizer",
    "naive": "allreduce per parameter",
}
TORCH_CONTENDERS = ("ddp", "ddp_view", "ddp_best", "naive")  # reduce gradients on torch's default process group
COMMUNICATING = tuple(name for name in CONTENDERS if name != "none")
DEFAULT_CONTENDERS = ("none", "ddp", "ddp_view", "dualdist", "naive")
DEFAULT_ON_HOROVOD = ("none", "ddp", "dualdist", "hvd")
BASELINES = ("ddp", "ddp_view", "hvd", "none")  # step times are given as ratios to these


def default_contenders(backend: str) -> tuple[str, ...]:
    """Return fewer baselines on Horovod: its idle engine slows other communication in the same process."""
    return DEFAULT_ON_HOROVOD if registry.uses_library(backend, registry.HOROVOD_LIBRARY) else DEFAULT_CONTENDERS


@dataclass(frozen=True)
class StepOptions:
    """Options of a step measurement: `steps` per sample, 0 for as many as fill `block_s` seconds."""

    model: str
    contenders: tuple[str, ...]
    rounds: int = 15
    steps: int = 0
    block_s: float = 0.4
    warmup: int = 3
    batch: int = 0  # per rank; 0 for the model's default
    image_size: int = IMAGE_SIZE
    device: str = "auto"
    timeout_s: float = 300.0
    seed: int = 0

    @property
    def batch_size(self) -> int:
        return self.batch or MODELS[self.model].batch


@dataclass(frozen=True)
class TrainOptions:
    """Training options of a launch of `dualdist compare`, equal for all so that all train the same model.

    `batch` is the global batch size. `slowdown` stretches every step, to check that a comparison detects it.
    Afterwards allreduces of `sizes` bytes are timed.
    """

    model: str
    contender: str
    batch: int
    warmup: int
    steps: int
    image_size: int = IMAGE_SIZE
    slowdown: float = 1.0
    sizes: tuple[int, ...] = ()
    device: str = "auto"
    timeout_s: float = 300.0
    seed: int = 0


@dataclass(frozen=True)
class AllreduceOptions:
    """Options of an allreduce sweep: sizes in bytes, each repeated to fill `block_s` seconds."""

    sizes: tuple[int, ...]
    rounds: int = 15
    block_s: float = 0.03
    device: str = "auto"
    timeout_s: float = 300.0


def to_arguments(options: StepOptions | TrainOptions | AllreduceOptions) -> list[str]:
    """Return the worker's arguments for the options that are not at their defaults."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    changed = [each.name for each in fields(options) if values[each.name] != each.default]
    return [f"--{name.replace('_', '-')}={_to_argument(values[name])}" for name in changed]


def _to_argument(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"


COMMON_SIZES = (8, 65536, 1 << 20, 25 << 20)  # latency to DDP's bucket size: part of every default sweep


def sizes_up_to(max_bytes: int, factor: int = 4) -> tuple[int, ...]:
    """Return 8 bytes times powers of `factor`, the common sizes and `max_bytes`, in ascending order."""
    sizes, size = {max_bytes, *(common for common in COMMON_SIZES if common <= max_bytes)}, 8
    while size < max_bytes:
        sizes.add(size)
        size *= factor
    return tuple(sorted(sizes))
