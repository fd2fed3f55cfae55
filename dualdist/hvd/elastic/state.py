"""The state of a training in PyTorch, and who saves, restores and synchronizes which kind of value in it."""

from __future__ import annotations

import copy
from typing import Any

import torch

from dualdist import session
from dualdist.ddp.optimizer import move_to_group
from dualdist.hvd.elastic.common import ObjectState
from dualdist.hvd.elastic.sampler import ElasticSampler
from dualdist.hvd.functions import allgather_object as allgather_object
from dualdist.hvd.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from dualdist.hvd.mpi_ops import rank


class TorchState(ObjectState):
    """A model, an optimizer and whatever else is given by name, kept as attributes of those names.

    A value of a kind that has a handler (modules, optimizers, an ElasticSampler) is saved and synchronized by that,
    anything else is pickled.
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
        """Optimizers and samplers are those of the ranks that there are now, as of ranks that were just started.

        Where hosts were only removed no sync() follows, in which samplers would share out anew what is left.
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
        """Keep a copy for restore()."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what the last save() kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Every rank has rank 0's value, and has saved it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle this value from now on, and save it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """For what has a state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Of a copy: optimizers go on to change the very tensors that they are given.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """For a torch.nn.Module."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """For a torch.optim.Optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_StateDictHandler):
    """For an ElasticSampler."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


Registry = list[tuple[type, Any]]


class _Handlers:
    """Which handler a value of which type gets, the first that fits; programs may replace it."""

    registry: Registry


_handlers = _Handlers()
_handlers.registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Pairs of a type and its handler; the first that fits is taken."""
    return _handlers.registry


def set_handler_registry(registry: Registry) -> None:
    """Take these pairs from now on."""
    _handlers.registry = registry


def _get_handler(value: Any) -> StateHandler | None:
    for kind, handler in _handlers.registry:
        if isinstance(value, kind):
            made: StateHandler = handler(value)
            return made
    return None
