"""Training that goes on: a state that a restarted job takes up by itself, and a stop that all ranks make together."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch

from dualdist import api, session
from dualdist.backends.horovod.driver import is_elastic
from dualdist.checkpoint.state import check_part_names, has_state
from dualdist.collectives.compile import disable_compile
from dualdist.data.sampler import Sampler
from dualdist.elastic import recovery
from dualdist.elastic.state_copy import StateCopy, broadcast_state
from dualdist.errors import CheckpointError, CollectiveError, MismatchError, UsageError
from dualdist.monitoring.preemption import CHANGE, STOP, LastStep, PreemptionNotice, parse_notice_file
from dualdist.utils.exit_codes import NOTICE, REQUEUE

P = ParamSpec("P")
R = TypeVar("R")

LAST_STEP = "last-step"  # of a session's extras
OWN_PARTS = ("model", "optimizer", "scheduler", "scaler", "sampler")

__all__ = ["REQUEUE", "State", "Stopped", "request_stop", "run", "should_stop"]


class Stopped(SystemExit):
    """The job was told to stop, and has saved its state; ends the program with the exit code REQUEUE, 75."""

    def __init__(self, words: str) -> None:
        super().__init__(REQUEUE)
        self.words = words

    def __str__(self) -> str:
        return self.words


class RanksChanged(Exception):
    """Ranks come or go: run() has those that are there meet anew."""


@disable_compile
def should_stop() -> bool:
    """Whether the job was told to stop, which it does after this step; the same answer on every rank.

    Every rank calls this after every step. From the first call on SIGTERM and SIGUSR1, to any rank, no longer end the
    process, but tell the job to stop; so does the file that DUALDIST_NOTICE names, when it appears where rank 0 runs.
    Where it is True save a checkpoint, and end by sys.exit(dd.elastic.REQUEUE): State.commit() does all that.
    """
    last = _last_step()
    last.notice.install_handlers()
    return last.after_step()[0] == STOP


def request_stop() -> None:
    """Tell the job to stop after a step soon, as SIGTERM does; for any rank and any thread, between init and shutdown.

    For programs that know by other means that their time is up.
    """
    _last_step().notice.request(STOP, "dd.elastic.request_stop()")


class State:
    """What a training is made of, and goes on from: attributes of the names that are given here.

    Every rank makes one, after init(). `model`, `optimizer`, `scheduler`, `scaler`, `sampler` and further objects with
    a state_dict() are handled by that; anything else is plain data: numbers, texts, tensors, dicts and lists of them.

    With a `path` commits are checkpoints in that folder, of which the last `keep` stay; only rank 0 touches the disk.
    Without one they are copies in every rank's memory, which outlive a lost rank where the launcher keeps the others,
    but no restart of the job. Of `every` so many commits one is kept: the others cost nothing.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        every: int = 1,
        keep: int | None = 3,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        sampler: Sampler | None = None,
        **values: Any,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r}: expected the number of commits of which one is kept, 1 or more")
        given = dict(zip(OWN_PARTS, (model, optimizer, scheduler, scaler, sampler), strict=True))
        parts = {name: part for name, part in given.items() if part is not None} | values
        taken = [name for name in parts if hasattr(type(self), name) or name.startswith("_")]
        if taken:
            raise UsageError(f"{', '.join(taken)}: a State has attributes of its own of that name; choose another one")
        check_part_names([*parts])
        samplers = [part for part in parts.values() if isinstance(part, Sampler)]
        if any(each.count is None and each.remainder == "uneven" for each in samplers):
            raise UsageError(
                'of an iterable data set without a length, shared out by remainder="uneven", no rank knows whether '
                'all have the batch after which it commits: give it a __len__(), or pass remainder="drop" or "pad"'
            )
        self._path = path
        self._every = every
        self._keep = keep
        self._names = tuple(parts)
        self._commits = 0
        self._copy: StateCopy | None = None
        self._callbacks: list[Callable[[], Any]] = []
        for name, part in parts.items():
            setattr(self, name, part)
        self._listen()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """These are called, in order, when the ranks have met anew: their number may be another then."""
        self._callbacks.extend(callbacks)

    @disable_compile
    def commit(self) -> None:
        """A step is done. Every rank calls this after every step; it saves what is due, and stops where that is due.

        Where the job was told to stop (see should_stop) all ranks save, and raise Stopped, after the same step. That
        is a SystemExit, which ends the program with the exit code 75: the job can go on from there.
        """
        if any(isinstance(part, Sampler) and not part.was_everybodys for part in self._parts().values()):
            return  # the ranks that have no batch here wait in join() for the others
        self._commits += 1
        kind, words = _last_step().after_step()
        must_save = self._path is not None and kind in (STOP, CHANGE)
        if must_save or self._commits % self._every == 0:
            self.save()
        if kind == STOP and self._path is not None:
            _stop(words, self._path)
        if kind == CHANGE:
            raise RanksChanged(words)

    def save(self) -> None:
        """Save now; every rank calls this."""
        if self._path is not None:
            api.save_checkpoint(self._path, keep=self._keep, **self._parts())
        else:
            self._copy = StateCopy.of(self._parts(), session.current().device)

    def restore(self) -> None:
        """Go back to what was saved last; every rank calls this. CheckpointError where nothing was."""
        if self._path is not None:
            self._take(api.load_checkpoint(self._path, required=True, **self._objects()) or {})
        elif self._copy is not None:
            self._take(self._copy.put_back(self._objects(), session.current().device))
        else:
            raise CheckpointError("nothing was committed yet to which the state could go back")

    def sync(self) -> None:
        """All ranks have one state: that of the newest good checkpoint, or else rank 0's; every rank calls this."""
        self._commits = 0  # as of a rank that was started just now
        found = None if self._path is None else api.load_checkpoint(self._path, **self._objects())
        if found is None:
            found = broadcast_state(session.current().world, self._parts())
        self._take(found)
        if self._path is None:
            self.save()

    def on_reset(self) -> None:
        """The ranks have met anew: call the callbacks."""
        for callback in self._callbacks:
            callback()

    def _go_back(self) -> None:
        """A rank was lost: this one's own state is that of the last commit; sync() makes all alike."""
        if self._path is None:
            self.restore()

    def _follow(self) -> None:
        """The wrapped optimizers reduce between the ranks that there are now."""
        from dualdist.ddp.optimizer import move_to_group

        optimizers = [part for part in self._objects().values() if isinstance(part, torch.optim.Optimizer)]
        move_to_group(optimizers, session.current().world)

    def _listen(self) -> None:
        """A notice tells the job to stop, where it can go on from what is saved."""
        if self._path is not None:
            _last_step().notice.install_handlers()

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _objects(self) -> dict[str, Any]:
        """Those with a state of their own."""
        return {name: part for name, part in self._parts().items() if has_state(part)}

    def _take(self, found: Mapping[str, Any]) -> None:
        """The plain data are those that were found."""
        plain = set(self._names) - set(self._objects())
        missing = [name for name in sorted(plain) if name not in found]
        if missing:
            raise CheckpointError(
                f"the checkpoint in {self._path} holds no {' and no '.join(missing)}: it was saved by another program"
            )
        for name in plain:
            setattr(self, name, found[name])


def run(func: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R]:
    """A decorator: func(state, ...) begins with state.sync(), from the newest checkpoint or else rank 0's state.

    Every rank calls the function, and before it does nothing with the others but init() and wrap_optimizer(). Where it
    raises Stopped, this leaves the job before the program ends.

    Where the launcher keeps ranks when another one is lost (horovodrun with --min-np), func begins anew, in the same
    process, when a rank was lost, from what was committed last, and when ranks came. The state's optimizers reduce
    between the new ranks, and the reset callbacks are called. Everywhere else the error ends the program, and the
    launcher starts all ranks anew.
    """

    @functools.wraps(func)
    def wrapper(state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
        pending: list[str] = []  # what the launcher has told of its hosts
        with recovery.notify_host_changes(os.environ, pending.append):
            while True:
                _last_step().notice.launcher_requests = pending
                state._listen()
                try:
                    state.sync()
                    return func(state, *args, **kwargs)
                except Stopped:
                    session.shutdown()
                    raise
                except RanksChanged as change:
                    why = str(change)
                except CollectiveError as error:
                    if isinstance(error, MismatchError) or not is_elastic(os.environ):
                        raise
                    why = str(error)
                    state._go_back()
                pending.clear()  # what comes from here on may not be known where the ranks meet
                recovery.reinitialize(why)
                state._follow()
                state.on_reset()

    return wrapper


def _stop(words: str, path: str | PathLike[str] | None) -> NoReturn:
    here = session.current()
    told = f"stopped after a step, as told by {words}; what is saved in {path} goes on from there"
    if here.topology.rank == 0:
        _last_step().notice.acknowledge()
        print(f"dualdist: {told} (exit code {REQUEUE})", file=sys.stderr, flush=True)
    raise Stopped(told)


def _last_step() -> LastStep:
    """That of the open session."""
    here = session.current()
    found: LastStep | None = here.extras.get(LAST_STEP)
    if found is None:
        rank = here.topology.rank
        notice = PreemptionNotice(parse_notice_file(os.environ.get(NOTICE)) if rank == 0 else None)
        made = LastStep(notice, here.store, here.key, here.world.ranks, rank)
        found = here.extras.setdefault(LAST_STEP, made)  # another thread, or a signal handler, may have come first
        if found is made:
            made.start()
            here.close_callbacks.extend([made.close, notice.close])
    return found
