"""Save a job's state: every rank takes part, rank 0 alone touches the disk, and all learn what goes wrong there.

Note [patience]: a large file takes longer than ranks may wait for each other. So rank 0 writes and reads in a thread,
and tells the others every BEAT_S seconds that it moves on: the disk takes or gives something, or the thread computes,
as torch does in between. When it has done neither for as long as a wait may take, that is the error. The thread may
hang for ever, or go on when the disk is back, and the program's tensors are others by then, and newer checkpoints
there: a file that nobody waits for any more is given up, and never appears.
"""

from __future__ import annotations

import atexit
import contextlib
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import unpickle
from dualdist.checkpoint import writer as checkpoint_writing
from dualdist.checkpoint.files import FORMAT, METADATA, ReadProgress
from dualdist.checkpoint.state import check_part_names, collect_state, dtypes_of, shapes_of
from dualdist.collectives.group import Group
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.collectives.objects import broadcast_object
from dualdist.collectives.work import PendingOperation
from dualdist.data.sampler import Sampler
from dualdist.ddp.optimizer import get_reduction_order
from dualdist.errors import CheckpointError, DualdistError, MismatchError, UsageError
from dualdist.utils import random_state
from dualdist.utils.random_state import RandomState

Places = Mapping[str, Sequence[Sequence[int]]]  # of each sampler, see Sampler.places
BEAT_S = 10.0
ROOT = 0


@dataclass(frozen=True)
class DiskOutcome:
    """How something ended on rank 0, as all ranks are told."""

    value: Any = None
    error: str = ""


class DiskTask:
    """Something that rank 0 does with the disk, in a thread of its own."""

    def __init__(self, call: Callable[[ReadProgress], Any], limit_s: float) -> None:
        self.beat_s = min(BEAT_S, limit_s / 4)
        self.progress = ReadProgress()
        self.value: Any = None
        self.error: Exception | None = None
        self._limit_s = limit_s
        self._thread = threading.Thread(target=self._run, args=(call,), name="dualdist-checkpoint", daemon=True)
        self._clock: int | None = None
        self._thread.start()
        self._seen = (0, 0.0), time.monotonic()
        atexit.register(self._finish)  # a program that ends does not cut a checkpoint short

    def _run(self, call: Callable[[ReadProgress], Any]) -> None:
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self.value = call(self.progress)
        except Exception as error:  # reported to all ranks
            self.error = error

    def outcome(self) -> DiskOutcome | None:
        """How it ended; None where it has not within a beat, but moves on."""
        self._thread.join(self.beat_s)
        if not self._thread.is_alive():
            atexit.unregister(self._finish)
            return DiskOutcome(self.value) if self.error is None else DiskOutcome(error=error_message(self.error))
        if (moved := (self.progress.nbytes, self._computed_s())) != self._seen[0]:
            self._seen = moved, time.monotonic()
        if time.monotonic() - self._seen[1] > self._limit_s:
            self.give_up()
            return DiskOutcome(error=f"the disk has taken or given nothing for {self._limit_s:g} s: is it still there?")
        return None

    def _computed_s(self) -> float:
        """What the thread has used of a processor, in tenths of a second: nothing while it waits for the disk."""
        with contextlib.suppress(OSError):  # it has just ended
            return 0.0 if self._clock is None else round(time.clock_gettime(self._clock), 1)
        return -1.0

    def give_up(self) -> None:
        """What is not on the disk yet never will be: Note [patience]."""
        self.progress.is_abandoned = True
        atexit.unregister(self._finish)

    def _finish(self) -> None:
        while (outcome := self.outcome()) is None:
            pass
        if outcome.error:
            print(f"dualdist: {outcome.error}", file=sys.stderr, flush=True)


class PendingSave:
    """A checkpoint under way."""

    def __init__(self, group: Group, name: str, task: DiskTask | None, *, is_copy: bool) -> None:
        self._group = group
        self._is_copy = is_copy  # what is written is not what the program goes on to change
        self._name = name
        self._task = task  # on rank 0
        self._outcome: DiskOutcome | None = None

    def wait(self) -> str:
        """The path of the checkpoint, which is on the disk now; every rank calls this. CheckpointError on all ranks."""
        if self._outcome is None:
            try:
                self._outcome = await_outcome(self._group, self._name, self._task)
            except BaseException:
                if not self._is_copy:
                    self._give_up()
                raise
        return str(unwrap_outcome(self._outcome, self._task))

    def settle(self) -> None:
        """wait(), also where the ranks cannot talk to each other any more; once, nothing afterwards."""
        if self._outcome is not None:
            return
        if self._group.is_usable:
            self.wait()
        elif self._task is not None:
            while self._outcome is None:
                self._outcome = self._task.outcome()
            unwrap_outcome(self._outcome, self._task)

    def _give_up(self) -> None:
        self._outcome = DiskOutcome(error="the checkpoint was given up: the wait for it was cut short")
        if self._task is not None:
            self._task.give_up()


class CheckpointSaver:
    """The checkpoints of a session, one at a time."""

    def __init__(self, group: Group, device: torch.device, timeout_s: float) -> None:
        self._group = group
        self._device = device
        self._timeout_s = timeout_s
        self._last: PendingSave | None = None
        self._passed_over: set[Path] = set()  # on rank 0: files that a load has not taken, for an older one

    def settle(self) -> None:
        """What was begun is on the disk; raises once what went wrong there."""
        last, self._last = self._last, None
        if last is not None:
            last.settle()

    def pass_over(self, newer: Sequence[Path]) -> None:
        """The files do not count among those to keep: the program went back behind them, or they are damaged."""
        self._passed_over.update(path.resolve() for path in newer)

    def save(self, path: Path, parts: Mapping[str, Any], keep: int | None, *, async_op: bool) -> PendingSave:
        """See dualdist.api.save_checkpoint; the caller waits, unless async_op."""
        group = self._group
        group.require_usable()
        self.settle()
        name = group.next_name("save_checkpoint")
        content: dict[str, Any] = {}
        cause: Exception | None = None
        try:
            _check(parts, keep)
            if group.rank == ROOT:
                content = collect_state(parts, copy=async_op)
        except Exception as error:  # of the program's own objects, too: the others must not wait for this rank
            cause = error
        terms = {"parts": sorted(parts), "async_op": async_op}
        places = {name: sorted(part.places) for name, part in parts.items() if isinstance(part, Sampler)}
        problem = "" if cause is None else error_message(cause)
        try:
            states = _gathered_states(group, name, terms, (problem, places), self._device)
        except UsageError as error:
            raise error from cause
        task = None
        if group.rank == ROOT:
            optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
            orders = {name: order for name, part in optimizers.items() if (order := get_reduction_order(part))}
            dtypes = {name: dtypes_of(part) for name, part in optimizers.items()}
            shapes = {name: shapes_of(part) for name, part in optimizers.items()}
            content[METADATA] = {
                "format": FORMAT,
                "random": states,
                "orders": orders,
                "dtypes": dtypes,
                "shapes": shapes,
            }
            passed_over = frozenset(self._passed_over)
            task = DiskTask(
                lambda progress: str(checkpoint_writing.write(path, content, keep, progress, passed_over)),
                self._timeout_s,
            )
        self._last = PendingSave(group, name, task, is_copy=async_op)
        return self._last


def _check(parts: Mapping[str, Any], keep: int | None) -> None:
    """UsageError where the arguments cannot be saved, whatever they hold."""
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise UsageError(f"keep={keep!r}: expected the number of checkpoints to keep, 1 or more, or None for all")
    check_part_names(parts)


def _gathered_states(
    group: Group, name: str, terms: dict[str, Any], report: tuple[str, Places], device: torch.device
) -> list[RandomState]:
    """Everybody's random state on rank 0, once all ranks are there without a problem; UsageError on all otherwise.

    MismatchError on all where their samplers stand at different places.
    """
    mine = torch.frombuffer(bytearray(pickle.dumps(random_state.get_random_state(device))), dtype=torch.uint8)

    def perform(line: Backend, own: Sequence[Any]) -> list[RandomState]:
        raise_problems([problem for _, (problem, _) in own], line.ranks, UsageError)
        _require_same_places([places for _, (_, places) in own], line.ranks)
        sent = [len(mine) if rank == ROOT else 0 for rank in range(line.size)]
        sizes = [nbytes if line.rank == ROOT else 0 for nbytes, _ in own]
        came = line.alltoall(mine, sent, sizes, f"op.{name}").wait()
        return [unpickle(piece) for piece in came.split(sizes)] if line.rank == ROOT else []

    return group.submit(
        PendingOperation(CollectiveRequest("save_checkpoint", name, terms, (len(mine), report)), perform)
    ).wait()


def _require_same_places(found: Sequence[Places], ranks: Sequence[int]) -> None:
    """MismatchError unless there is a place for each sampler at which all ranks may be; rank 0's is what is saved."""
    for name in sorted(found[ROOT]):
        if not set.intersection(*({(epoch, position) for epoch, position in places[name]} for places in found)):
            words = (
                "rank {}: epoch {}, position {}".format(rank, *min(map(tuple, places[name])))
                for rank, places in zip(ranks, found, strict=True)
            )
            raise MismatchError(
                f"{name}: the ranks are at different places of the data, {'; '.join(words)}: call save_checkpoint "
                "between two steps, and give all ranks batches of the same size"
            )


def error_message(error: Exception) -> str:
    """An error as the other ranks are told of it; what is not ours comes with its name."""
    return str(error) if isinstance(error, DualdistError) else f"{type(error).__name__}: {error}"


def raise_problems(problems: Sequence[str], ranks: Sequence[int], kind: type[DualdistError]) -> None:
    """An error of this kind where a rank has a problem, with the rank unless all have the same."""
    if not any(problems):
        return
    if len(set(problems)) == 1:
        raise kind(problems[0])
    raise kind("; ".join(f"rank {rank}: {problem}" for rank, problem in zip(ranks, problems, strict=True) if problem))


def await_outcome(group: Group, name: str, task: DiskTask | None) -> DiskOutcome:
    """How rank 0's task ended, on every rank: Note [patience]."""
    beat = 0
    while True:
        beat += 1
        mine = None if task is None else task.outcome()
        outcome = broadcast_object(group, mine, group.ranks[ROOT], f"{name}.{beat}")
        if outcome is not None:
            return outcome


def unwrap_outcome(outcome: DiskOutcome, task: DiskTask | None) -> Any:
    """What the task returned; CheckpointError where it failed."""
    if outcome.error:
        raise CheckpointError(outcome.error) from (None if task is None else task.error)
    return outcome.value
