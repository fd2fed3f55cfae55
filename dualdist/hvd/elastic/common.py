"""Horovod's elastic training without a framework (horovod.common.elastic): states, and the loop that recovers."""

from __future__ import annotations

import copy
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any, Protocol, TypeVar

from dualdist import session
from dualdist.backends.horovod.driver import HOSTNAME, INTERFACE, LOCAL_RANK, is_elastic, watch_hosts
from dualdist.elastic import run_loop
from dualdist.environments.horovodrun import STORE_ADDRESS, STORE_PORT
from dualdist.errors import CollectiveError, MismatchError
from dualdist.hvd.common import HorovodInternalError, HostsUpdatedInterrupt

R = TypeVar("R")
Broadcast = Callable[[Any], Any]


class HostUpdateResult(IntFlag):
    """A change of a job's hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class Listener(Protocol):
    """An object that is notified of changed hosts, such as a State."""

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Called from any thread; a later change has a greater timestamp."""


class WorkerNotificationManager:
    """Notifies listeners of the host changes that horovodrun's elastic driver reports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[Listener] = set()
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
            if self._hears or not is_elastic(environ):
                return
            watch_hosts(environ, lambda timestamp, how: self.handle_hosts_updated(timestamp, HostUpdateResult(how)))
            self._hears = True

    def register_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Notify every listener."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()


class State:
    """The state that all ranks of a job share; subclasses implement save, restore and sync.

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

    def _forget_host_updates(self) -> None:
        """Drop the changes reported before a new rendezvous, which takes them into account.

        Horovod 0.28.1 drops them after the rendezvous, and so loses a host that came back during it.
        """
        self._host_messages = queue.Queue()

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


class ObjectState(State):
    """A state of picklable objects, which are attributes."""

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._bcast_object = bcast_object
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
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        notification_manager.init()
        notification_manager.register_listener(state)
        in_sync = False
        try:
            while True:
                try:
                    if not in_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except (HorovodInternalError, CollectiveError) as error:  # the latter from autograd hooks
                    if isinstance(error, MismatchError) or isinstance(error.__cause__, MismatchError):
                        raise
                    why = str(error)
                    state.restore()
                    in_sync = False
                except HostsUpdatedInterrupt as update:
                    why = "hosts were lost" if update.skip_sync else "hosts came or went"
                    in_sync = update.skip_sync
                if session.is_open():
                    run_loop.print_on_rank_0(f"{why}; the remaining ranks initialize again")
                state._forget_host_updates()
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper
