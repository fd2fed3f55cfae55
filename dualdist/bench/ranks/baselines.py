"""The libraries below dualdist, used as a program without dualdist uses them: what we are held against."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dualdist.errors import UnsupportedError

T = TypeVar("T")
Ended = Callable[[], None]


@dataclass(frozen=True)
class BaselineAllreduce:
    """One library's allreduce by sum: into the tensor itself, and into a new one. Both return when it is done."""

    name: str
    in_place: Callable[[torch.Tensor], None]
    out_of_place: Callable[[torch.Tensor], torch.Tensor]


def start_torch(
    rank: int, size: int, nodes: int, share: Callable[[Any], Any], device: torch.device, timeout_s: float
) -> Ended:
    """torch's default process group exists; returns what ends it, where it was made here.

    `share` gives every rank what rank 0 passes. A running session on torch.distributed has made the group already.
    """
    if dist.is_initialized():
        return _nothing
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        host = "127.0.0.1" if nodes == 1 else socket.getfqdn()
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timeout)
        share((host, store.port))
    else:
        host, port = share(None)
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
    return _start_torch(store, rank, size, device, timeout)


def start_torch_by_file(path: Path, rank: int, size: int, device: torch.device, timeout_s: float) -> Ended:
    """The same without a session: the ranks meet in a file that is new for every job."""
    return _start_torch(dist.FileStore(str(path), size), rank, size, device, timedelta(seconds=timeout_s))


def _start_torch(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Ended:
    kinds = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(kinds, store=store, rank=rank, world_size=size, timeout=timeout)
    return dist.destroy_process_group


def _nothing() -> None: ...


def ddp(model: nn.Module, device: torch.device, **flags: bool) -> nn.Module:
    """The model in torch's DistributedDataParallel, on the default process group."""
    ids = [device.index] if device.type == "cuda" else None
    options: dict[str, Any] = {"device_ids": ids, **flags}
    with warnings.catch_warnings():  # torch 2.13 is about to rename broadcast_buffers
        warnings.simplefilter("ignore", FutureWarning)
        return nn.parallel.DistributedDataParallel(model, **options)


def average_each(parameters: Iterable[nn.Parameter]) -> None:
    """Every gradient becomes the mean over all ranks, by an allreduce of its own after backward."""
    size = dist.get_world_size()
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(size)


def horovod_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    """The optimizer in Horovod's DistributedOptimizer, on the engine that a session of dualdist has started."""
    from dualdist.backends.horovod import backend as horovod

    return horovod.import_horovod().DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def collective_of(backend: str) -> BaselineAllreduce:
    """The allreduce of the library below a backend of dualdist, on which a session is open."""
    return {"native": _of_torch, "single": _of_torch, "horovod": _of_horovod, "mpi": _of_mpi}[backend]()


def _of_torch() -> BaselineAllreduce:
    def out_of_place(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        dist.all_reduce(result)
        return result

    return BaselineAllreduce("torch.distributed", lambda tensor: _drop(dist.all_reduce(tensor)), out_of_place)


def _of_horovod() -> BaselineAllreduce:
    from dualdist.backends.horovod import backend as horovod

    hvd = horovod.import_horovod()

    def in_place(tensor: torch.Tensor) -> None:
        hvd.allreduce_(tensor, name=f"raw.in_place.{tensor.numel()}", op=hvd.Sum)

    def out_of_place(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hvd.allreduce(tensor, name=f"raw.{tensor.numel()}", op=hvd.Sum)
        return result

    return BaselineAllreduce("horovod", in_place, out_of_place)


def _of_mpi() -> BaselineAllreduce:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def in_place(tensor: torch.Tensor) -> None:
        world.Allreduce(MPI.IN_PLACE, _array(tensor), MPI.SUM)

    def out_of_place(tensor: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(tensor)
        world.Allreduce(_array(tensor), _array(result), MPI.SUM)
        return result

    return BaselineAllreduce("mpi4py", in_place, out_of_place)


def _array(tensor: torch.Tensor) -> Any:
    if tensor.is_cuda:
        raise UnsupportedError("raw mpi4py is measured on CPU tensors only: add --device cpu")
    return tensor.numpy()


def _drop(result: object) -> None: ...
