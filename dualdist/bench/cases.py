"""What can be measured: models, contenders, and the options of a measurement, known without torch."""

from __future__ import annotations

from dataclasses import dataclass

# The images of the ResNets: at 64 a step of ResNet-18 takes about as long as two ranks on two cores need to exchange
# its gradients, where overlap shows most. At 32 communication drowns all else.
IMAGE_SIZE = 64
BATCH = 8


@dataclass(frozen=True)
class ModelChoice:
    """A model that a step is measured with; `full` ones are measured only where they are asked for."""

    what: str
    batch: int = BATCH
    full: bool = False
    steps: int = 20  # that a launch of `dualdist compare` times


MODELS = {
    "resnet18": ModelChoice("ResNet-18 of torchvision, 11.7 million parameters in 62 tensors", steps=15),
    "mlp": ModelChoice(
        "100 residual linear layers 64 wide, 0.4 million parameters in 200 tensors", batch=32, steps=100
    ),
    "transformer": ModelChoice("5 encoder layers 384 wide on 32 tokens, 9.6 million parameters in 63 tensors", batch=4),
    "resnet50": ModelChoice("ResNet-50 of torchvision, 25.6 million parameters in 161 tensors", full=True, steps=8),
    "transformer100m": ModelChoice(
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
HOROVODS = "hvd"  # needs a session on Horovod
WITH_TORCH = ("ddp", "ddp_view", "ddp_best", "naive")  # move gradients by torch's default process group
COMMUNICATING = tuple(name for name in CONTENDERS if name != "none")
DEFAULT = ("none", "ddp", "ddp_view", "dualdist", "naive")
DEFAULT_BESIDE_HOROVOD = ("none", "ddp", "dualdist", "hvd")
# What the others are held against, where they are there.
REFERENCES = ("ddp", "ddp_view", "hvd", "none")


def default_contenders(backend: str) -> tuple[str, ...]:
    """An idle Horovod slows whatever else communicates in its process: its jobs hold fewer references."""
    return DEFAULT_BESIDE_HOROVOD if backend == "horovod" else DEFAULT


@dataclass(frozen=True)
class StepOptions:
    """How one training step is measured. `steps` is how many make up a timing, 0 to fill `block_s` seconds."""

    model: str
    contenders: tuple[str, ...]
    rounds: int = 15
    steps: int = 0
    block_s: float = 0.4
    warmup: int = 3
    batch: int = 0  # of each rank; 0 for the model's own
    image_size: int = IMAGE_SIZE
    device: str = "auto"
    timeout_s: float = 300.0
    seed: int = 0

    @property
    def batch_size(self) -> int:
        return self.batch or MODELS[self.model].batch


@dataclass(frozen=True)
class TrainOptions:
    """How one contender trains in a launch of its own: the same for all, so that all train the same model.

    `batch` is that of all ranks together. `slow` stretches every step, to see whether a comparison finds it. Of
    `sizes`, in bytes, allreduces are timed afterwards.
    """

    model: str
    contender: str
    batch: int
    warmup: int
    steps: int
    image_size: int = IMAGE_SIZE
    slow: float = 1.0
    sizes: tuple[int, ...] = ()
    device: str = "auto"
    timeout_s: float = 300.0
    seed: int = 0

    @property
    def as_step(self) -> StepOptions:
        """The same model and batch, for what makes models."""
        return StepOptions(self.model, (self.contender,), batch=self.batch, image_size=self.image_size, seed=self.seed)


@dataclass(frozen=True)
class AllreduceOptions:
    """How allreduces are measured: sizes in bytes, each repeated to fill `block_s` seconds."""

    sizes: tuple[int, ...]
    rounds: int = 15
    block_s: float = 0.03
    device: str = "auto"
    timeout_s: float = 300.0


# Sizes that figures are asked for by name.
NAMED_SIZES = (8, 65536, 1 << 20, 25 << 20)


def sizes_up_to(max_bytes: int, factor: int = 4) -> tuple[int, ...]:
    """8 bytes, times `factor` again and again, the named sizes, and max_bytes itself."""
    sizes, size = {max_bytes, *(named for named in NAMED_SIZES if named <= max_bytes)}, 8
    while size < max_bytes:
        sizes.add(size)
        size *= factor
    return tuple(sorted(sizes))
