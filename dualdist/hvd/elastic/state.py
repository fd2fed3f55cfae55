"""TorchState, the elastic state of a training in PyTorch, its handlers per type, and ElasticSampler."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch
import torch.utils.data

from dualdist import session
from dualdist.ddp.optimizer import move_to_group
from dualdist.hvd.elastic.common import ObjectState
from dualdist.hvd.functions import allgather_object as allgather_object
from dualdist.hvd.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from dualdist.hvd.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank as many of the indices that no rank has processed yet in this epoch.

    Every rank calls record_batch() after each batch, and set_epoch() at the end of an epoch. In a TorchState, the
    indices that are left are shared out again after a reset.

    Args:
        dataset: anything with a length.
        shuffle: draw the indices in a random order, another one in each epoch.
        seed: of the random order; the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed `batch_size` samples more."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, on the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of its samples that all ranks together have processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Share out the rest of the epoch between the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # Repeats the first indices where the rest does not divide evenly.
        padded = list(islice(cycle(self.remaining_indices), self.total_size))
        self.indices = padded[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """A state whose values are attributes.

    Args:
        model: a module.
        optimizer: a torch optimizer.
        kwargs: other values by name. Modules, optimizers and ElasticSamplers are saved and synchronized by their
            handlers, anything else is pickled.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        found = {name: _get_handler(value) for name, value in given.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name, handler in self._handlers.items():
            setattr(self, name, handler.value)
        others = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **others)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Prepare optimizers and samplers for the current ranks.

        If hosts were only removed no sync() follows, in which samplers would share out the rest.
        """
        handled = [handler.value for handler in self._handlers.values()]
        for value in handled:
            if isinstance(value, ElasticSampler):
                value.reset()
        move_to_group([value for value in handled if isinstance(value, torch.optim.Optimizer)], session.current().world)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name) and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Saves, restores and synchronizes one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save a copy for restore()."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore what save() saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank rank 0's value, and save it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the value, and save it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handles a value with a state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy, since optimizers change the tensors that they load.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """Handles a torch.nn.Module."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """Handles a torch.optim.Optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_StateDictHandler):
    """Handles an ElasticSampler."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


Registry = list[tuple[type, Any]]


class _Handlers:
    """Holds the registry, which programs may replace."""

    registry: Registry


_handlers = _Handlers()
_handlers.registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return pairs of a type and its handler; the first that fits a value is used."""
    return _handlers.registry


def set_handler_registry(registry: Registry) -> None:
    """Use these pairs of a type and its handler."""
    _handlers.registry = registry


def _get_handler(value: Any) -> StateHandler | None:
    for kind, handler in _handlers.registry:
        if isinstance(value, kind):
            made: StateHandler = handler(value)
            return made
    return None
