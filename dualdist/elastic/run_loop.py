"""The elastic loop: run a training function again, in the same process, after ranks were lost or joined the job.

Only `dualdist run --min-ranks` and horovodrun's elastic driver keep the other ranks when one is lost; other launchers
end or restart the job.
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
from dualdist.elastic.preemption import STOP
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

    Under a launcher that keeps ranks when another rank is lost (`dualdist run --min-ranks`, `horovodrun --min-np`),
    func is called again in the same process. It continues from the last commit after a loss, and from the current
    state after ranks were added. The state's optimizers then reduce over the new ranks, and the reset callbacks are
    called. Under any other launcher the error ends the program, and the launcher restarts all ranks.

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
        changes: list[str] = []  # what an elastic launcher reports about the hosts; a thread appends to it
        with contextlib.ExitStack() as stack:
            keeps_ranks = _watch_ranks(changes.append, stack)
            state._saves_start = state._saves_start or keeps_ranks
            has_changed = False
            while True:
                last_step().notice.launcher_requests = changes
                state._listen()
                try:
                    if has_changed:
                        state._rebind_optimizers()
                        state.on_reset()
                    state.sync()
                    session.note_state()
                    return func(state, *args, **kwargs)
                except Stopped:
                    session.shutdown()
                    raise
                except RanksChanged as change:
                    reason = str(change)
                except CollectiveError as error:
                    if isinstance(error, MismatchError) or not keeps_ranks:
                        raise
                    reason = str(error)
                    session.note_timeout(error)
                    if state._path is None and state._copy is not None:
                        state.restore()  # this rank's last commit; sync() follows
                changes.clear()  # the next rendezvous accounts for these, but maybe not for later ones
                reinitialize(reason)
                has_changed = True

    return wrapper


def _watch_ranks(changed: Callable[[str], None], stack: contextlib.ExitStack) -> bool:
    """Call `changed` until the stack's end when ranks wait to join; return False if the launcher keeps no ranks."""
    if (agent := session.elastic_agent()) is not None:
        stack.callback(agent.watch(changed))
    elif is_elastic(os.environ):
        stack.callback(watch_hosts(os.environ, lambda timestamp, how: changed("hosts came or went")))
    else:
        return False
    return True


def reinitialize(reason: str) -> None:
    """Shut down and initialize again with the ranks that there are now; every remaining rank calls this.

    A request to stop that came before, or comes meanwhile, is one to the new session.
    """
    old, notice = session.current(), last_step().notice
    backend, timeout_s = old.backend.name, old.timeout_s
    logging.print(f"dualdist: {reason}; the remaining ranks initialize again", file=sys.stderr)
    old.close_callbacks.remove(notice.close)
    try:
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
    finally:
        notice.close()
    if notice.kind == STOP:
        last_step().notice.request(STOP, notice.reason)
    logging.print(f"dualdist: continuing with {session.current().topology.size} ranks", file=sys.stderr)
