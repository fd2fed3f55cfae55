"""Objects between ranks: whatever pickles."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import allgather_bytes, unpickle
from dualdist.collectives.arguments import name_of, root_of
from dualdist.collectives.group import Group
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.collectives.work import PendingOperation
from dualdist.errors import UsageError

T = TypeVar("T")
Dumps = Callable[[Any], bytes]


def broadcast_object(group: Group, obj: T, root: int, name: str | None = None, dumps: Dumps = pickle.dumps) -> T:
    """Root's object, pickled, on every rank; UsageError on every rank where it does not pickle."""
    root, place = root_of(group, root)
    name = name_of(group, "broadcast_object", name)
    reason, payload = _pickled(obj, dumps) if group.rank == place else ("", _room(0))

    def perform(backend: Backend, own: Sequence[Any]) -> T:
        length, problem = own[place]
        _require_pickled([problem], name)
        received = payload if backend.rank == place else _room(length)
        backend.broadcast_(received, place, f"op.{name}").wait()
        return obj if backend.rank == place else unpickle(received)

    offer = CollectiveRequest("broadcast_object", name, {"root": root}, (payload.numel(), reason))
    return group.submit(PendingOperation(offer, perform)).wait()


def allgather_object(group: Group, obj: T, name: str | None = None, dumps: Dumps = pickle.dumps) -> list[T]:
    """Everybody's object, pickled, in rank order; UsageError on every rank where one does not pickle."""
    name = name_of(group, "allgather_object", name)
    reason, payload = _pickled(obj, dumps)

    def perform(backend: Backend, own: Sequence[Any]) -> list[T]:
        _require_pickled([problem for _, problem in own], name)
        sizes = [length for length, _ in own]
        blocks = allgather_bytes(backend, payload, sizes, f"op.{name}").split(sizes)
        return [obj if rank == backend.rank else unpickle(block) for rank, block in enumerate(blocks)]

    offer = CollectiveRequest("allgather_object", name, {}, (payload.numel(), reason))
    return group.submit(PendingOperation(offer, perform)).wait()


def _room(count: int) -> torch.Tensor:
    """Room for bytes; they lie on the CPU, whatever device the program has made its default."""
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def _pickled(obj: object, dumps: Dumps) -> tuple[str, torch.Tensor]:
    """The reason why the object does not pickle, or none and its bytes."""
    try:
        data = dumps(obj)
    except Exception as error:  # pickling runs the object's own code
        return f"a {type(obj).__name__} does not pickle ({error})", _room(0)
    return "", torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _require_pickled(problems: Sequence[str], name: str) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            where = f" on rank {rank}" if len(problems) > 1 else ""
            raise UsageError(f"{name}: {problem}{where}")
