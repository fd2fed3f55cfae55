"""The elastic loop: run a training function again, in the same process, after ranks were lost or joined the job.

Only horovodrun's elastic driver keeps the other ranks when one is lost; other launchers end or restart the job.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from dualdist import logging, session
from dualdist.backends import registry
from dualdist.backends.horovod.driver import is_elastic, watch_hosts
from dualdist.elastic.training_state import RanksChanged, State, Stopped, last_step
from dualdist.errors import CollectiveError, DualdistError, MismatchError, RendezvousError

P = ParamSpec("P")
R = TypeVar("R")

# Attempts at a rendezvous: a rank that was started for it may be lost, too.
ATTEMPTS = 3


def run(func: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R]:
    """Decorate a training function `func(state, ...)` so that it begins with state.sync() and survives lost ranks.

    Every rank calls the decorated function, and before it no collective but init() and wrap_optimizer(). If func
    raises Stopped, the job is shut down before the exception propagates.

    Under a launcher that keeps ranks when another one is lost (horovodrun with --min-np), func is called again in the
    same process: after a loss from the last commit, after ranks were added from the current state. The state's
    optimizers then reduce over the new ranks, and the reset callbacks are called. Under any other launcher the error
    ends the program, and the launcher restarts all ranks.

    Args:
        func: a function whose first argument is a State. It must continue from what the state says, such as
            ``for state.epoch in range(state.epoch, epochs)``, since it may be called several times.

    Returns:
        The decorated function, with the same arguments and result.

    Example::

        @dd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 90):
                for batch in loader:
                    ...
                    state.commit()
    """

    @functools.wraps(func)
    def wrapper(state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
        changes: list[str] = []  # of the hosts, as an elastic launcher reports them in a thread
        with contextlib.ExitStack() as stack:
            if is_elastic(os.environ):
                stop = watch_hosts(os.environ, lambda timestamp, how: changes.append("hosts came or went"))
                stack.callback(stop)
            while True:
                last_step().notice.launcher_requests = changes
                state._listen()
                try:
                    state.sync()
                    return func(state, *args, **kwargs)
                except Stopped:
                    session.shutdown()
                    raise
                except RanksChanged as change:
                    reason = str(change)
                    state._gather_sharded_state()
                except CollectiveError as error:
                    if isinstance(error, MismatchError) or not is_elastic(os.environ):
                        raise
                    reason = str(error)
                    if state._path is None:
                        state.restore()  # this rank's last commit; sync() follows
                changes.clear()  # the next rendezvous accounts for these, but maybe not for later ones
                reinitialize(reason)
                state._rebind_optimizers()
                state.on_reset()

    return wrapper


def reinitialize(reason: str) -> None:
    """Shut down and initialize again with the ranks that there are now; every remaining rank calls this."""
    old = session.current()
    backend, timeout_s = old.backend.name, old.timeout_s
    logging.print(f"dualdist: {reason}; the remaining ranks initialize again", file=sys.stderr)
    for attempt in range(ATTEMPTS):
        with contextlib.suppress(DualdistError):  # the peers may be gone
            if session.is_open():
                session.shutdown()
        try:
            session.init(backend if backend in registry.names() else None, timeout_s=timeout_s)
            break
        except (CollectiveError, RendezvousError):
            if attempt == ATTEMPTS - 1:
                raise
    logging.print(f"dualdist: continuing with {session.current().topology.size} ranks", file=sys.stderr)
