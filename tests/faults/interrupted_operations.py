"""The operations that interrupted_rank.py interrupts, by the three faces of dualdist; each checks its own result.

All values are whole numbers, whose sums are exact, and differ from name to name: what belongs to another operation is
found.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from faults.interrupts import OWN_COMPRESSOR, TIMEOUT_S, CompressorTrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dualdist as dd
from dualdist.errors import DualdistError

Call = Callable[[str], str]
"""Performs an operation of this name; returns what is wrong with its result, or ""."""
MIB = 1 << 18  # elements of float32
ROWS = 1 << 14
BUCKET_MB = 0.008  # a third of the model
LR = 0.1


def values(name: str, rank: int, count: int) -> torch.Tensor:
    """Return a rank's tensor for an operation."""
    return torch.arange(count, dtype=torch.float32) % 113 + zlib.crc32(name.encode()) % 89 + 5 * rank


def total(name: str, size: int, count: int) -> torch.Tensor:
    return torch.stack([values(name, rank, count) for rank in range(size)]).sum(0)


def compare(found: torch.Tensor, right: torch.Tensor) -> str:
    """Return "" if the tensors are equal, else where they differ."""
    if found.shape != right.shape:
        return f"shape {tuple(found.shape)}, not {tuple(right.shape)}"
    places = (found != right).nonzero().flatten()
    if not len(places):
        return ""
    first = int(places[0])
    return f"{len(places)} of {len(right)} differ, element {first} is {found[first].item()}, not {right[first].item()}"


@dataclass(frozen=True)
class Operation:
    """An operation in one session."""

    call: Call
    training: Training | None = None


class Training:
    """A training whose steps have names; a step's batch depends on its name and the rank."""

    def __init__(self, rank: int, size: int, wrap: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]):
        self._rank, self._size = rank, size
        self._model = make_model()
        self._wrapped, self._optimizer = wrap(self._model)
        self.has_reference = True
        self._done: list[str] = []

    def step(self, name: str) -> str:
        self._done.append(name)
        self._optimizer.zero_grad()
        loss_of(self._wrapped, name, self._rank).backward()
        self._optimizer.step()
        return ""

    def state(self) -> str:
        return f"{zlib.crc32(nn.utils.parameters_to_vector(self._model.parameters()).detach().numpy().tobytes()):08x}"

    def is_expected(self, interrupted: str) -> bool:
        """Return True if the parameters are those of one process after all steps, or all but the interrupted one."""
        if not self.has_reference:
            return True
        steps = list(dict.fromkeys(self._done))
        found = nn.utils.parameters_to_vector(self._model.parameters())
        # Far above the rounding of sums in another order, and far below a step.
        return any(
            torch.allclose(found, trained_alone(names, self._size), rtol=1e-4, atol=1e-5)
            for names in (steps, [name for name in steps if name != interrupted])
        )


def make_model() -> nn.Module:
    """Return the same model everywhere, of 6 parameters and 26 KB."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def loss_of(model: nn.Module, name: str, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + rank)
    result: torch.Tensor = model(torch.randn(8, 32, generator=generator)).square().mean()
    return result


def trained_alone(names: Iterable[str], size: int) -> torch.Tensor:
    """Return the parameters after these steps of one process, on the batches of all ranks."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for name in names:
        optimizer.zero_grad()
        sum(loss_of(model, name, rank) / size for rank in range(size)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters())


class Doubling:
    """A compressor of the program, without loss; it may raise in any call."""

    def __init__(self, trap: CompressorTrap) -> None:
        self._trap = trap

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        self._trap.passes("compress")
        return tensor * 2, None

    def decompress(self, tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        self._trap.passes("decompress")
        return tensor / 2


class DualdistFace:
    """import dualdist as dd."""

    name = "dd"
    errors: tuple[type[Exception], ...] = (DualdistError,)

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def open(self) -> None:
        dd.init(self._backend, timeout_s=TIMEOUT_S)

    def close(self) -> None:
        dd.shutdown()

    def ranks(self) -> tuple[int, int]:
        return dd.rank(), dd.size()

    def share(self, text: str) -> str:
        """Return rank 0's text."""
        return dd.broadcast_object(text)

    def prepare(self, operation: str, trap: CompressorTrap) -> Operation:
        """Return an operation of the open session."""
        if "training" not in operation:
            return Operation(collectives(*self.ranks())[operation])
        options: dict[str, Any] = {
            "ordered training": {"reduction": "ordered"},
            "training with PowerSGD": {"compression": "powersgd:1"},
            OWN_COMPRESSOR: {"compression": Doubling(trap)},
        }.get(operation, {})
        options |= {"bucket_cap_mb": BUCKET_MB, "first_bucket_mb": BUCKET_MB}

        def wrap(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            return model, dd.wrap_optimizer(optimizer, model.named_parameters(), **options)

        training = Training(*self.ranks(), wrap)
        training.has_reference = "PowerSGD" not in operation
        return Operation(training.step, training)

    def after(self) -> Sequence[Call]:
        """Return the operations of which some follow a collective."""
        known = collectives(*self.ranks())
        return known["allreduce of 8 bytes"], known["allgather"], known["allreduce of 1 MiB"]


def collectives(rank: int, size: int) -> Mapping[str, Call]:
    """Return the collectives of dd by name; what is interrupted in them is dualdist's call alone."""

    def allreduce(count: int) -> Call:
        return lambda name: compare(dd.allreduce(values(name, rank, count), "sum", name=name), total(name, size, count))

    def allreduce_in_place(name: str) -> str:
        given = values(name, rank, MIB)
        dd.allreduce_(given, "sum", name=name)
        return compare(given, total(name, size, MIB))

    def allgather(name: str) -> str:
        found = dd.allgather(values(name, rank, ROWS), name=name)
        return compare(found, torch.cat([values(name, other, ROWS) for other in range(size)]))

    def broadcast(name: str) -> str:
        root = size - 1
        return compare(dd.broadcast(values(name, rank, ROWS), root, name=name), values(name, root, ROWS))

    def alltoall(name: str) -> str:
        found = dd.alltoall(values(name, rank, ROWS * size), name=name)
        return compare(found, torch.cat([values(name, other, ROWS * size).chunk(size)[rank] for other in range(size)]))

    def grouped_allreduce(name: str) -> str:
        counts = (3, 5000, 40000)
        found = dd.grouped_allreduce([values(name, rank, count) for count in counts], "sum", name=name)
        return compare(torch.cat(list(found)), torch.cat([total(name, size, count) for count in counts]))

    def async_allreduces(name: str) -> str:
        counts = {f"{name}.a": 4, f"{name}.b": ROWS}
        given = {each: values(each, rank, count) for each, count in counts.items()}
        handles = [dd.allreduce(tensor, "sum", name=each, async_op=True) for each, tensor in given.items()]
        found = [handle.wait() for handle in handles]
        return compare(torch.cat(found), torch.cat([total(each, size, count) for each, count in counts.items()]))

    def broadcast_object(name: str) -> str:
        found = dd.broadcast_object({"name": name, "rank": rank, "numbers": list(range(500))})
        return "" if found == {"name": name, "rank": 0, "numbers": list(range(500))} else f"{found}"

    def barrier(name: str) -> str:
        dd.barrier()
        return ""

    return {
        "allreduce of 8 bytes": allreduce(2),
        "allreduce of 1 MiB": allreduce(MIB),
        "allreduce of 8 MiB": allreduce(8 * MIB),
        "allreduce in place": allreduce_in_place,
        "allgather": allgather,
        "broadcast": broadcast,
        "alltoall": alltoall,
        "grouped allreduce": grouped_allreduce,
        "async allreduces": async_allreduces,
        "broadcast_object": broadcast_object,
        "barrier": barrier,
    }


class HorovodFace(DualdistFace):
    """import dualdist.hvd as hvd, in a session whose operations have a short time limit."""

    name = "hvd"

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        import dualdist.hvd as hvd

        self._hvd: Any = hvd
        self.errors = (DualdistError, hvd.HorovodInternalError)

    def open(self) -> None:
        super().open()
        self._hvd.init()

    def close(self) -> None:
        self._hvd.shutdown()

    def share(self, text: str) -> str:
        return str(self._hvd.broadcast_object(text, root_rank=0))

    def prepare(self, operation: str, trap: CompressorTrap) -> Operation:
        if operation != "training":
            return Operation(self._collectives()[operation])

        def wrap(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            return model, self._hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=3)

        training = Training(*self.ranks(), wrap)
        return Operation(training.step, training)

    def after(self) -> Sequence[Call]:
        known = self._collectives()
        return known["allreduce"], known["allgather"], known["allreduce"]

    def _collectives(self) -> Mapping[str, Call]:
        hvd, (rank, size) = self._hvd, self.ranks()

        def reduce(name: str) -> str:
            found = hvd.allreduce(values(name, rank, MIB), op=hvd.Sum, name=name)
            return compare(found, total(name, size, MIB))

        def gather(name: str) -> str:
            found = hvd.allgather(values(name, rank, ROWS), name=name)
            return compare(found, torch.cat([values(name, other, ROWS) for other in range(size)]))

        def reduce_async(name: str) -> str:
            names = (f"{name}.a", f"{name}.b")
            handles = [hvd.allreduce_async(values(each, rank, ROWS), op=hvd.Sum, name=each) for each in names]
            found = [hvd.synchronize(handle) for handle in handles]
            return compare(torch.cat(found), torch.cat([total(each, size, ROWS) for each in names]))

        return {"allreduce": reduce, "allgather": gather, "async allreduces": reduce_async}


class TorchFace(DualdistFace):
    """torch.distributed over init_process_group("dualdist").

    Its operations have no names and are matched by their number, so that the program must know whether one that was
    interrupted has been performed: these are not performed again if their result is there.
    """

    name = "torch"

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        os.environ["DUALDIST_BACKEND"] = backend
        self._kept: dict[str, list[torch.Tensor]] = {}

    def open(self) -> None:
        self._kept.clear()
        self.errors = (DualdistError,)
        dist.init_process_group("dualdist", timeout=timedelta(seconds=TIMEOUT_S))

    def close(self) -> None:
        dist.destroy_process_group()

    def ranks(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def share(self, text: str) -> str:
        shared = [text]
        dist.broadcast_object_list(shared)
        return shared[0]

    def prepare(self, operation: str, trap: CompressorTrap) -> Operation:
        if operation != "training":
            return Operation(self._collectives()[operation])

        def wrap(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
            return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB), torch.optim.SGD(model.parameters(), lr=LR)

        # DDP refuses to go on after a backward that was left, and raises what its C++ code catches as RuntimeError.
        self.errors = (DualdistError, RuntimeError)
        training = Training(*self.ranks(), wrap)
        return Operation(training.step, training)

    def after(self) -> Sequence[Call]:
        known = self._collectives()
        return known["allreduce"], known["allgather"], known["allreduce"]

    def _collectives(self) -> Mapping[str, Call]:
        rank, size = self.ranks()

        def unless_there(name: str, right: torch.Tensor, perform: Callable[[], list[torch.Tensor]]) -> str:
            before = self._kept.get(name)
            found = before if before is not None and not compare(torch.cat(before), right) else perform()
            return compare(torch.cat(found), right)

        def keep(name: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
            self._kept[name] = list(tensors)
            return self._kept[name]

        def reduce(name: str) -> str:
            def perform() -> list[torch.Tensor]:
                (tensor,) = kept = keep(name, values(name, rank, MIB))
                dist.all_reduce(tensor)
                return kept

            return unless_there(name, total(name, size, MIB), perform)

        def gather(name: str) -> str:
            def perform() -> list[torch.Tensor]:
                kept = keep(name, *(torch.zeros(ROWS) for _ in range(size)))
                dist.all_gather(kept, values(name, rank, ROWS))
                return kept

            return unless_there(name, torch.cat([values(name, other, ROWS) for other in range(size)]), perform)

        def reduce_async(name: str) -> str:
            def perform() -> list[torch.Tensor]:
                kept = keep(name, values(name, rank, ROWS))
                work = dist.all_reduce(kept[0], async_op=True)
                assert work is not None
                work.wait()
                return kept

            return unless_there(name, total(name, size, ROWS), perform)

        return {"allreduce": reduce, "allgather": gather, "async allreduces": reduce_async}


FACES: Mapping[str, type[DualdistFace]] = {face.name: face for face in (DualdistFace, HorovodFace, TorchFace)}
