"""Horovod's elastic training: a function that is run again after a failure, from a state that all ranks share.

Has the names of horovod.torch.elastic and its modules, and of horovod.common.elastic.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from enum import IntFlag
from typing import Any, ClassVar, TypeVar

import torch
import torch.utils.data

from dualdist import logging, session
from dualdist.backends.horovod.driver import HOSTNAME, INTERFACE, LOCAL_RANK, is_elastic, watch_hosts
from dualdist.data.sampler import EpochShare
from dualdist.ddp.optimizer import move_to_group
from dualdist.environments.horovodrun import STORE_ADDRESS, STORE_PORT
from dualdist.errors import CollectiveError, DualdistError, MismatchError
from dualdist.hvd.common import HorovodInternalError, HostsUpdatedInterrupt
from dualdist.hvd.functions import allgather_object as allgather_object
from dualdist.hvd.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from dualdist.hvd.mpi_ops import init, rank, shutdown, size

R = TypeVar("R")
Broadcast = Callable[[Any], Any]


class HostUpdateResult(IntFlag):
    """A change of a job's hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class WorkerNotificationManager:
    """Notifies states of the changes that `dualdist run` or horovodrun's elastic driver reports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[HorovodState] = set()
        self._hears = False

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Listen to the driver that started this rank, if it is an elastic one; arguments override the environment."""
        given = {STORE_ADDRESS: rendezvous_addr, STORE_PORT: rendezvous_port, INTERFACE: nic, HOSTNAME: hostname}
        given[LOCAL_RANK] = local_rank
        environ = {**os.environ, **{name: str(value) for name, value in given.items() if value is not None}}
        with self._lock:
            agent = session.elastic_agent()
            if self._hears or (agent is None and not is_elastic(environ)):
                return
            if agent is not None:
                agent.watch(lambda reason: self.handle_hosts_updated(time.time(), HostUpdateResult.added))
            else:
                watch_hosts(environ, lambda timestamp, how: self.handle_hosts_updated(timestamp, HostUpdateResult(how)))
            self._hears = True

    def register_listener(self, listener: HorovodState) -> None:
        with self._lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: HorovodState) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Notify every listener."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()


class HorovodState:
    """The state that all ranks of a job share, which Horovod calls State; subclasses implement save, restore and sync.

    Args:
        bcast_object: returns rank 0's object on every rank.
        get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, HostUpdateResult]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions to call, in order, after every reset, when the number of ranks may have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call reset() and the reset callbacks, after a new rendezvous."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Queue a change for the next check_host_updates(); called from any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, then check for changed hosts; every rank calls this."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on every rank if hosts have changed on rank 0 since the last call."""
        before = newest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > newest:
                newest = timestamp
                update |= result
        before, self._last_updated_timestamp, update = self._bcast_object((before, newest, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def save(self) -> None:
        """Save a copy for restore()."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore what save() saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank rank 0's state; every rank calls this."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for another set of ranks, before sync()."""


State = HorovodState


class ObjectState(HorovodState):
    """A state of picklable objects, which are attributes."""

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        self._set_attrs()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        self._saved_state = {name: _copy_container(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            # The current values, not those saved last: handlers sync current values too, so that all are of one step.
            self._saved_state = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, _copy_container(value))


def _copy_container(value: Any) -> Any:
    """Return a copy of a container, which the program may change; anything else itself."""
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


def run_fn(func: Callable[..., R], reset: Callable[[], Any]) -> Callable[..., R]:
    """Return a function that calls state.sync() and func(state, ...), again after each rendezvous.

    If a collective failed, the state is restored to its last commit; if hosts have changed, it is kept. Then reset()
    and state.on_reset() are called. A mismatch between the ranks' arguments would happen again, and is raised.
    """

    @functools.wraps(func)
    def wrapper(state: HorovodState, *args: Any, **kwargs: Any) -> R:
        notification_manager.init()
        notification_manager.register_listener(state)
        in_sync = has_changed = False
        try:
            while True:
                try:
                    if has_changed:
                        state.on_reset()
                    if not in_sync:
                        state.sync()
                    session.note_state()
                    return func(state, *args, **kwargs)
                except (HorovodInternalError, CollectiveError) as error:  # autograd hooks raise CollectiveError
                    if isinstance(error, MismatchError) or isinstance(error.__cause__, MismatchError):
                        raise
                    why = str(error)
                    session.note_timeout(error.__cause__ or error)
                    state.restore()
                    in_sync = False
                except HostsUpdatedInterrupt as update:
                    why = "hosts were lost" if update.skip_sync else "hosts came or went"
                    in_sync = update.skip_sync
                if session.is_open():
                    logging.print(f"dualdist: {why}; the remaining ranks initialize again", file=sys.stderr)
                # The rendezvous takes these into account; Horovod 0.28.1 drops changes after it, and so loses a host
                # that came back meanwhile.
                state._host_messages = queue.Queue()
                reset()
                has_changed = True
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate func(state, ...): it starts with state.sync(), and is run again after a collective has failed.

    Then the state is restored to its last commit(), and the remaining ranks initialize again by shutdown() and init().
    Every rank calls the function, before any other collective.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    with contextlib.suppress(DualdistError):  # the other ranks may be gone
        shutdown()
    init()


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
        self.num_samples = len(self._share())
        self.total_size = self.num_samples * self.num_replicas

    def _share(self) -> EpochShare:
        """Return this rank's share of the rest, whose first indices are repeated where it does not divide evenly."""
        return EpochShare(len(self.remaining_indices), 0, self.rank, self.num_replicas, "pad")

    def __iter__(self) -> Iterator[int]:
        rest = torch.tensor(self.remaining_indices, dtype=torch.int64, device="cpu")
        self.indices = self._share().indices(rest).tolist()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


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


class TorchState(ObjectState):
    """A state whose values are attributes.

    Args:
        model: a module.
        optimizer: a torch optimizer.
        kwargs: other values by name. Modules, optimizers and ElasticSamplers are saved and synchronized by their
            handlers, anything else is pickled.
    """

    _registry: ClassVar[Registry] = [  # set_handler_registry() replaces it
        (torch.nn.Module, ModelStateHandler),
        (torch.optim.Optimizer, OptimizerStateHandler),
        (ElasticSampler, SamplerStateHandler),
    ]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        others = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, StateHandler] = {}
        for name, value in list(others.items()):
            make = next((make for kind, make in self._registry if isinstance(value, kind)), None)
            if make is not None:
                handler = make(others.pop(name))
                setattr(self, name, handler.value)
                self._handlers[name] = handler
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


def get_handler_registry() -> Registry:
    """Return pairs of a type and its handler; the first that fits a value is used."""
    return TorchState._registry


def set_handler_registry(registry: Registry) -> None:
    """Use these pairs of a type and its handler."""
    TorchState._registry = registry
