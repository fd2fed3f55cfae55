"""Training of a benchmark: models, and the methods that reduce their gradients, with and without dualdist."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dualdist as dd
from dualdist import c10d, session
from dualdist.backends.native.libraries import both
from dualdist.bench.jobs import COMPRESSED, DUALDIST, OPTIMIZERS, SHARDED_DUALDIST, StepOptions, TrainOptions
from dualdist.ddp.optimizer import get_sent_bytes
from dualdist.launch.exec_env import GLOO_INTERFACE
from dualdist.utils.network_interfaces import LOOPBACK, interface_towards
from dualdist.utils.variables import temporary_variables

CLASSES = 10
MLP_LAYERS, MLP_WIDTH = 100, 64
# Layers, width, heads, vocabulary, and length of a sequence.
TRANSFORMERS = {"transformer": (5, 384, 6, 2000, 32), "transformer100m": (16, 768, 12, 16384, 128)}
OPTIMIZER_CLASSES: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
}
DDP_FLAGS: dict[str, dict[str, bool]] = {
    "ddp": {},
    "ddp_view": {"gradient_as_bucket_view": True},
    "ddp_best": {"gradient_as_bucket_view": True, "broadcast_buffers": False},
    "ddp_dualdist": {},
    "zero": {},
}


class ResidualMlp(nn.Module):
    """Residual linear layers, whose gradients neither vanish nor explode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(MLP_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.relu(layer(x))
        return x


class Encoder(nn.Module):
    """A transformer encoder without dropout that classifies sequences."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return classes


@dataclass(frozen=True)
class TrainingCase:
    """A batch, and `build()`, which returns a model with the same initial parameters every time and on every rank."""

    build: Callable[[], nn.Module]
    inputs: torch.Tensor
    targets: torch.Tensor

    def loss(self, model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(self.inputs), self.targets)

    def shard(self, rank: int, ranks: int) -> TrainingCase:
        rows = slice(rank * len(self.inputs) // ranks, (rank + 1) * len(self.inputs) // ranks)
        return TrainingCase(self.build, self.inputs[rows], self.targets[rows])


def make_case(options: StepOptions | TrainOptions, batch: int, device: torch.device, seed: int) -> TrainingCase:
    """Build the model of these options, with a batch drawn by `seed`."""
    random = torch.Generator().manual_seed(seed)
    make, inputs, classes = _model(options.model, batch, options.image_size, random)

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            return make().to(device).train()

    return TrainingCase(build, inputs.to(device), (torch.arange(batch) % classes).to(device))


def step_case(options: StepOptions, device: torch.device, rank: int) -> TrainingCase:
    """Build the case of `dualdist bench step` on this rank; each rank has a different batch."""
    return make_case(options, options.batch_size, device, options.seed + 1 + rank)


def _model(
    name: str, batch: int, image_size: int, random: torch.Generator
) -> tuple[Callable[[], nn.Module], torch.Tensor, int]:
    """Return what makes the model, random inputs, and the number of classes."""
    if name == "mlp":
        return ResidualMlp, torch.randn(batch, MLP_WIDTH, generator=random), MLP_WIDTH
    if name in TRANSFORMERS:
        layers, width, heads, vocabulary, length = TRANSFORMERS[name]
        tokens = torch.randint(vocabulary, (batch, length), generator=random)
        return lambda: Encoder(layers, width, heads, vocabulary), tokens, CLASSES
    from dualdist.utils.torchvision_import import load_torchvision

    inputs = torch.randn(batch, 3, image_size, image_size, generator=random)
    return getattr(load_torchvision().models, name), inputs, 1000


@dataclass(frozen=True)
class Trainer:
    """A model that is trained by a method, and `step`, which trains it on a batch and returns the loss.

    `sent_bytes` returns how many bytes of gradients this rank gave to the reduction in the last step.
    """

    method: str
    model: nn.Module
    step: Callable[[TrainingCase], torch.Tensor]
    sent_bytes: Callable[[], int]


def make_trainer(method: str, case: TrainingCase, device: torch.device, optimizer_name: str = OPTIMIZERS[0]) -> Trainer:
    """Build a trainer; all start with the same parameters and use the same optimizer class."""
    module = case.build()
    model = _ddp(module, device, method) if method in DDP_FLAGS else module
    if method in ("fsdp2", "fsdp2_dualdist"):
        _fully_shard(module, device, method)
    kind, options = OPTIMIZER_CLASSES[optimizer_name]
    if method == "zero":
        optimizer: Any = load_torch_sharding()[0](module.parameters(), kind, **options)
    else:
        optimizer = kind(module.parameters(), **options)
    if is_by_dualdist(method):
        compression = method if COMPRESSED.fullmatch(method) else None
        named, shard = module.named_parameters(), method == SHARDED_DUALDIST
        dd.wrap_optimizer(optimizer, named, compression=compression, shard=shard)
    elif method == "hvd":
        optimizer = load_horovod().DistributedOptimizer(optimizer, named_parameters=module.named_parameters())

    def step(case: TrainingCase) -> torch.Tensor:
        optimizer.zero_grad()
        loss = case.loss(model)
        loss.backward()
        if method == "naive":
            _average_gradients(module)
        optimizer.step()
        return loss.detach()

    def sent_bytes() -> int:
        if is_by_dualdist(method):
            return get_sent_bytes([optimizer])
        return 0 if method == "none" else sum(each.nbytes for each in module.parameters() if each.requires_grad)

    return Trainer(method, module, step, sent_bytes)


def is_by_dualdist(method: str) -> bool:
    return method in (DUALDIST, SHARDED_DUALDIST) or COMPRESSED.fullmatch(method) is not None


def _ddp(model: nn.Module, device: torch.device, method: str) -> nn.Module:
    options: dict[str, Any] = {"device_ids": None if device.type == "cpu" else [device.index], **DDP_FLAGS[method]}
    if method == "ddp_dualdist":
        options["process_group"] = dist.new_group(backend=c10d.NAME)
    with warnings.catch_warnings():  # torch 2.13 announces the renaming of broadcast_buffers
        warnings.simplefilter("ignore", FutureWarning)
        return nn.parallel.DistributedDataParallel(model, **options)


def _fully_shard(model: nn.Module, device: torch.device, method: str) -> None:
    """Shard each layer, and the rest of the model, as FSDP2's tutorial does."""
    if method == "fsdp2_dualdist":
        group: Any = dist.new_group(backend=c10d.NAME)
        mesh = dist.DeviceMesh.from_group(group, device.type)
    else:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    layers = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    for module in (*layers, model):
        load_torch_sharding()[1](module, mesh=mesh)


def whole_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters, gathered where FSDP2 has them in parts; every rank calls this."""
    return [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]


def _average_gradients(model: nn.Module) -> None:
    size = dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(size)


def load_torch_sharding() -> tuple[Any, Any]:
    """Import ZeroRedundancyOptimizer and fully_shard, which take a second."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer, fully_shard


def load_horovod() -> Any:
    """Import Horovod; its engine is the one that a dualdist session has started."""
    from dualdist.backends.horovod import backend as horovod

    return horovod.import_horovod()


@contextmanager
def torch_group(device: torch.device, timeout_s: float, *, is_needed: bool) -> Iterator[None]:
    """Provide torch's default process group within a session, unless the session has created it."""
    if not is_needed or dist.is_initialized():
        yield
        return
    rank, size, timeout = dd.rank(), dd.size(), timedelta(seconds=timeout_s)
    if rank == 0:
        address = session.current().topology.address
        host = LOOPBACK if dd.num_nodes() == 1 else address or socket.getfqdn()
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timeout)
        dd.broadcast_object((host, store.port))
    else:
        store_address: Any = dd.broadcast_object(None)
        host, port = store_address
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
    # Gloo's own choice is the interface of the host name, which both ends of a slow link share.
    interface = {GLOO_INTERFACE: os.environ.get(GLOO_INTERFACE) or interface_towards(host)}
    with temporary_variables(os.environ, interface), _open_torch_group(store, rank, size, device, timeout):
        yield


def torch_group_by_file(
    path: Path, rank: int, size: int, device: torch.device, timeout_s: float
) -> AbstractContextManager[None]:
    """Provide torch's default process group without a session, through a file that does not exist yet."""
    return _open_torch_group(dist.FileStore(str(path), size), rank, size, device, timedelta(seconds=timeout_s))


@contextmanager
def _open_torch_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> Iterator[None]:
    dist.init_process_group(both(device.type), store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
