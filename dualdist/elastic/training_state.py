"""The state of an elastic training: committed, restored, synchronized, and saved when the job must stop."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from dualdist import api, logging, session
from dualdist.checkpoint.disk_task import ROOT, raised_on_all_ranks
from dualdist.checkpoint.state import StateCopy, check_part_names, has_state
from dualdist.collectives.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    optimizer_params,
)
from dualdist.collectives.dynamo import disable_compile
from dualdist.collectives.group import Group
from dualdist.collectives.tensor_utils import forget_names
from dualdist.data.sampler import Sampler
from dualdist.ddp.optimizer import get_wrapper, move_to_group
from dualdist.elastic.preemption import CHANGE, STOP, LastStep, PreemptionNotice, parse_notice_file
from dualdist.errors import CheckpointError, UsageError
from dualdist.utils.variables import NOTICE, REQUEUE

LAST_STEP = "last-step"  # key in a session's extras
SYNC = "elastic.sync"


class Stopped(SystemExit):
    """The job was asked to stop and has saved its state; exits with code REQUEUE (75)."""

    def __init__(self, reason: str) -> None:
        super().__init__(REQUEUE)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class RanksChanged(Exception):
    """Ranks were added or removed; handled by dd.elastic.run."""


@disable_compile
def should_stop() -> bool:
    """Return True if the job was asked to stop after this step; the same answer on every rank.

    Every rank calls this after every step. From the first call on SIGTERM and SIGUSR1, sent to any rank, no longer end
    the process but request a stop; so does the file that DUALDIST_NOTICE names, when it appears on rank 0's host. When
    this returns True, save a checkpoint and call ``sys.exit(dd.elastic.REQUEUE)``; State.commit() does all of that.
    """
    last = last_step()
    last.notice.install_handlers()
    if last.after_step()[0] != STOP:
        return False
    last.notice.acknowledge()  # now, as a launcher may kill rank 0 once another rank has exited with REQUEUE
    return True


def request_stop() -> None:
    """Request a stop after one of the next steps, as SIGTERM does.

    For programs that learn in another way that their time is up. Any rank and any thread may call this, between init()
    and shutdown().
    """
    last_step().notice.request(STOP, "dd.elastic.request_stop()")


class State:
    """The state of a training: everything it needs to continue, as attributes with the names given here.

    Every rank creates one, after init(). Objects with a state_dict() are saved and loaded by it; everything else is
    plain data: numbers, strings, tensors, and dicts and lists of them.

    Args:
        path: a folder; commits are checkpoints in it, written by rank 0. If None, commits are copies in every rank's
            memory, which survive the loss of a rank where the launcher keeps the others, but no restart of the job.
        every: save on every `every`-th commit; the other commits cost nothing.
        keep: the number of checkpoints to keep, or None for all.
        model: a torch.nn.Module.
        optimizer: a torch optimizer, wrapped or not.
        scheduler: a learning rate scheduler, or any object with a state_dict().
        scaler: a GradScaler.
        sampler: a dd.Sampler.
        **values: further objects with a state_dict(), or plain data such as ``epoch=0``.

    Raises:
        UsageError: an argument is out of range, or a name is reserved.

    Example::

        state = dd.elastic.State("checkpoints", every=100, model=model, optimizer=optimizer, sampler=sampler, epoch=0)
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
            raise UsageError(f"every={every!r}: expected the number of commits per save, 1 or more")
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
        parts = {name: part for name, part in given.items() if part is not None} | values
        taken = [name for name in parts if hasattr(type(self), name) or name.startswith("_")]
        if taken:
            raise UsageError(f"{', '.join(taken)}: reserved for a State's own attributes; choose another name")
        check_part_names([*parts])
        samplers = [part for part in parts.values() if isinstance(part, Sampler)]
        if any(each.count is None and each.remainder == "uneven" for each in samplers):
            raise UsageError(
                'for an iterable data set without a length and remainder="uneven" no rank knows whether all have the '
                'batch after which it commits: give it a __len__(), or pass remainder="drop" or "pad"'
            )
        self._path = path
        self._every = every
        self._keep = keep
        self._names = tuple(parts)
        self._commits = 0
        # Whether sync() saves what it broadcasts: those that lose a rank before the first commit begin with that again.
        self._saves_start = path is None
        self._copy: StateCopy | None = None
        self._callbacks: list[Callable[[], Any]] = []
        for name, part in parts.items():
            setattr(self, name, part)
        self._listen()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions that are called, in order, after the set of ranks has changed."""
        self._callbacks.extend(callbacks)

    @disable_compile
    def commit(self) -> None:
        """Mark the end of a step: save if due, and stop if requested; every rank calls this after every step.

        If the job was asked to stop (see should_stop), all ranks save after the same step and raise Stopped, a
        SystemExit with code 75, and a later job can resume. While some ranks have no batch left (Sampler with
        remainder="uneven"), this does nothing.

        Raises:
            Stopped: the job was asked to stop, and the state has been saved.
            CheckpointError: saving failed; raised on every rank.
        """
        if any(isinstance(part, Sampler) and not part.all_ranks_had_batch for part in self._parts().values()):
            return  # the ranks without a batch wait in join()
        self._commits += 1
        kind, reason = last_step().after_step()
        must_save = self._path is not None and kind in (STOP, CHANGE)
        if must_save or self._commits % self._every == 0:
            self.save()
        if kind == STOP and self._path is not None:
            message = (
                f"stopped after a step, as requested by {reason}; a job that loads {self._path} resumes from there"
            )
            if session.current().topology.rank == 0:
                last_step().notice.acknowledge()
            logging.print(f"dualdist: {message} (exit code {REQUEUE})", file=sys.stderr)
            raise Stopped(message)
        if kind == CHANGE:
            self._gather_sharded_state()
            raise RanksChanged(reason)

    def save(self) -> None:
        """Save now; every rank calls this."""
        if self._path is not None:
            api.save_checkpoint(self._path, keep=self._keep, **self._parts())
        else:
            self._copy = StateCopy.create(self._parts(), session.current().device)

    def restore(self) -> None:
        """Load what was saved last; every rank calls this.

        Raises:
            CheckpointError: nothing was saved.
        """
        if self._path is not None:
            self._set_values(api.load_checkpoint(self._path, required=True, **self._objects()) or {})
        elif self._copy is not None:
            self._set_values(self._copy.load(self._objects(), session.current().device))
        else:
            raise CheckpointError("nothing to restore: nothing was committed yet")

    def sync(self) -> None:
        """Load the newest valid checkpoint on all ranks, or else broadcast rank 0's state; every rank calls this."""
        self._commits = 0  # as on a rank that has just started
        values = None if self._path is None else api.load_checkpoint(self._path, **self._objects())
        is_start = values is None
        if values is None:
            values = broadcast_state(session.current().world, self._parts())
        self._set_values(values)
        if is_start and self._saves_start:
            self.save()

    def on_reset(self) -> None:
        """Call the reset callbacks."""
        for callback in self._callbacks:
            callback()

    def _gather_sharded_state(self) -> None:
        """Give every rank all of the optimizers' state before the ranks change; with a path it was saved."""
        if self._path is not None:
            return
        for optimizer in self._optimizers():
            wrapper = get_wrapper(optimizer)
            if wrapper is not None and wrapper.sharding is not None:
                copy = StateCopy.create({"optimizer": optimizer}, session.current().device)
                wrapper.sharding.loads_all = True
                try:
                    copy.load({"optimizer": optimizer}, session.current().device)
                finally:
                    wrapper.sharding.loads_all = False

    def _rebind_optimizers(self) -> None:
        """Let the wrapped optimizers reduce in the new world group."""
        for optimizer in self._optimizers():
            forget_names(optimizer_params(optimizer))  # until sync()
        move_to_group(self._optimizers(), session.current().world)

    def _listen(self) -> None:
        """Handle stop signals if a later job can resume."""
        if self._path is not None:
            last_step().notice.install_handlers()

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [part for part in self._parts().values() if isinstance(part, torch.optim.Optimizer)]

    def _objects(self) -> dict[str, Any]:
        return {name: part for name, part in self._parts().items() if has_state(part)}

    def _set_values(self, found: Mapping[str, Any]) -> None:
        plain = set(self._names) - set(self._objects())
        missing = [name for name in sorted(plain) if name not in found]
        if missing:
            raise CheckpointError(
                f"the checkpoint in {self._path} holds no {' and no '.join(missing)}: it was saved by another program"
            )
        for name in plain:
            setattr(self, name, found[name])


def broadcast_state(group: Group, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Broadcast rank 0's state into all ranks' objects, and return its plain data; every rank calls this."""
    kinds = allgather_object(
        group, {name: type(part).__name__ if has_state(part) else "plain data" for name, part in parts.items()}
    )
    if any(each != kinds[ROOT] for each in kinds):
        raise UsageError(f"the ranks' states have different parts: {'; '.join(map(str, kinds))}")
    for name in sorted(parts):
        part = parts[name]
        if isinstance(part, torch.nn.Module):
            broadcast_parameters(group, part, ROOT)
        elif isinstance(part, torch.optim.Optimizer):
            broadcast_optimizer_state(group, part, ROOT)
        elif has_state(part):
            with raised_on_all_ranks(group, group.next_name(SYNC), UsageError, f"{name}: "):
                state = part.state_dict() if group.rank == ROOT else None
            state = broadcast_object(group, state, ROOT)
            with raised_on_all_ranks(group, group.next_name(SYNC), UsageError, f"{name}: "):
                if group.rank != ROOT or isinstance(part, Sampler):  # a sampler splits the rest among the new ranks
                    part.load_state_dict(state)
    plain = {name: part for name, part in parts.items() if not has_state(part)}
    return broadcast_object(group, plain, ROOT)


def last_step() -> LastStep:
    """Return the open session's LastStep, started on first use."""
    here = session.current()
    found: LastStep | None = here.extras.get(LAST_STEP)
    if found is None:
        rank = here.topology.rank
        file = parse_notice_file(os.environ.get(NOTICE))
        notice = PreemptionNotice(file if rank == 0 else None)
        made = LastStep(notice, here.store, here.key, here.world.ranks, rank)
        found = here.extras.setdefault(LAST_STEP, made)  # another thread, or a signal handler, may have been first
        if found is made:
            made.start()
            here.close_callbacks.extend([made.close, notice.close])
    return found
