"""Save a job's state: all ranks take part, rank 0 writes, and every rank gets the path or the error."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import unpickle
from dualdist.backends.operation import Stages
from dualdist.checkpoint import files as checkpoint_files
from dualdist.checkpoint.disk_task import (
    ROOT,
    DiskOutcome,
    DiskTask,
    await_outcome,
    error_message,
    raise_problems,
    unwrap_outcome,
)
from dualdist.checkpoint.files import FORMAT, METADATA
from dualdist.checkpoint.state import (
    check_part_names,
    collect_state,
    dtypes_of,
    gather_sharded,
    shapes_of,
)
from dualdist.collectives.consistency import Options, differing_options, options_of
from dualdist.collectives.group import Group
from dualdist.collectives.handle import Collective
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.data import random_state
from dualdist.data.random_state import RandomState
from dualdist.data.sampler import Sampler
from dualdist.ddp.optimizer import gather_residuals, get_wrapper, is_sharded
from dualdist.errors import DriftError, MismatchError, UsageError

Positions = Mapping[str, Sequence[Sequence[int]]]  # Sampler.possible_positions by the sampler's name
Report = tuple[str, Positions, Mapping[str, Options]]  # one rank's problem, or "", and what all ranks must share


class PendingSave:
    """A checkpoint that is being written, as returned by save_checkpoint(async_op=True)."""

    def __init__(self, group: Group, name: str, task: DiskTask | None, *, is_copy: bool) -> None:
        self._group = group
        self._is_copy = is_copy  # the data are a copy, which the program does not modify
        self._name = name
        self._task = task  # None but on rank 0
        self._outcome: DiskOutcome | None = None

    def wait(self) -> str:
        """Wait until the checkpoint is on disk; every rank calls this.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: the write failed; raised on every rank.
        """
        if self._outcome is None:
            try:
                self._outcome = await_outcome(self._group, self._name, self._task)
            except BaseException:
                if not self._is_copy:
                    self._outcome = DiskOutcome(error="the checkpoint was abandoned: the wait for it was interrupted")
                    if self._task is not None:
                        self._task.abandon()
                raise
        return str(unwrap_outcome(self._outcome, self._task))

    def finish(self) -> None:
        """Call wait() once, or where collectives no longer work wait on rank 0 alone."""
        if self._outcome is not None:
            return
        if self._group.is_usable:
            self.wait()
        elif self._task is not None:
            while self._outcome is None:
                self._outcome = self._task.outcome()
            unwrap_outcome(self._outcome, self._task)


class CheckpointSaver:
    """Write a session's checkpoints, one at a time."""

    def __init__(self, group: Group, device: torch.device, timeout_s: float) -> None:
        self._group = group
        self._device = device
        self._timeout_s = timeout_s
        self._last: PendingSave | None = None
        self._uncounted: set[Path] = set()  # on rank 0: files that a load skipped for an older one

    def finish(self) -> None:
        """Wait for the last save, and raise its error once."""
        last, self._last = self._last, None
        if last is not None:
            last.finish()

    def skip(self, newer: Sequence[Path]) -> None:
        """Do not count these files towards `keep`: the program went back behind them, or they are damaged."""
        self._uncounted.update(map(checkpoint_files.real_path, newer))

    def save(self, path: Path, parts: Mapping[str, Any], keep: int | None, *, async_op: bool) -> PendingSave:
        """Begin a checkpoint; see dualdist.api.save_checkpoint. The caller waits, unless async_op."""
        group = self._group
        group.require_usable()
        self.finish()
        name = group.next_name("save_checkpoint")
        content: dict[str, Any] = {}
        cause: Exception | None = None
        gathered = gather_sharded(parts)
        try:
            if keep is not None and (not isinstance(keep, int) or keep < 1):
                raise UsageError(
                    f"keep={keep!r}: expected the number of checkpoints to keep, 1 or more, or None for all"
                )
            check_part_names(parts)
            if group.rank == ROOT:
                content = collect_state(parts, copy=async_op, gathered=gathered)
        except Exception as error:  # the program's own objects may raise any; the other ranks must not wait
            cause = error
        shared_args = {"parts": sorted(parts), "async_op": async_op}
        positions = {name: sorted(part.possible_positions) for name, part in parts.items() if isinstance(part, Sampler)}
        problem = "" if cause is None else error_message(cause)
        try:
            report = problem, positions, _options_of(parts)
            states = _gather_random_states(group, name, shared_args, report, self._device)
        except UsageError as error:
            raise error from cause
        task = None
        optimizers = {name: part for name, part in sorted(parts.items()) if isinstance(part, torch.optim.Optimizer)}
        residuals = {name: found for name, part in optimizers.items() if (found := gather_residuals(part)) is not None}
        if group.rank == ROOT:
            wrappers = {name: each for name, part in optimizers.items() if (each := get_wrapper(part)) is not None}
            content[METADATA] = {
                "format": FORMAT,
                "random": states,
                "orders": {name: order for name, each in wrappers.items() if (order := each.reducer.registry.order)},
                "dtypes": {name: dtypes_of(part) for name, part in optimizers.items()},
                "shapes": {name: shapes_of(part) for name, part in optimizers.items()},
                "residuals": residuals,
            }
            uncounted = frozenset(self._uncounted)
            task = DiskTask(
                lambda progress: str(checkpoint_files.write(path, content, keep, progress, uncounted)),
                self._timeout_s,
            )
        self._last = PendingSave(group, name, task, is_copy=async_op)
        return self._last


def _gather_random_states(
    group: Group, name: str, shared_args: dict[str, Any], report: Report, device: torch.device
) -> list[RandomState]:
    """Gather all random states to rank 0 if no rank reports a problem.

    Raises:
        UsageError: a rank reports a problem; raised on every rank.
        DriftError: the ranks' optimizers have different options; raised on every rank.
        MismatchError: the ranks' samplers are at different positions; raised on every rank.
    """
    state = torch.frombuffer(bytearray(pickle.dumps(random_state.get_random_state(device))), dtype=torch.uint8)

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[list[RandomState]]:
        problems, positions, options = zip(*(report for _, report in rank_args), strict=True)
        raise_problems(problems, backend.ranks, UsageError)
        _require_same_positions(positions, backend.ranks)
        for part in options[ROOT]:
            if clause := differing_options([each[part] for each in options], backend.ranks):
                raise DriftError(f"{part}: {clause}; nothing was saved")
        sent = [len(state) if rank == ROOT else 0 for rank in range(backend.size)]
        sizes = [nbytes if backend.rank == ROOT else 0 for nbytes, _ in rank_args]
        received = yield backend.alltoall(state, sent, sizes, f"op.{name}")
        return [unpickle(piece) for piece in received.split(sizes)] if backend.rank == ROOT else []

    request = CollectiveRequest("save_checkpoint", name, shared_args, (len(state), report))
    return Collective(group, request, perform).run()


def _options_of(parts: Mapping[str, Any]) -> dict[str, Options]:
    """Return what must be the same on all ranks of optimizers and of loss scalers."""
    found = {}
    for name, part in sorted(parts.items()):
        if isinstance(part, torch.optim.Optimizer):
            found[name] = options_of(part, has_all_state=not is_sharded(part))
        elif isinstance(part, torch.amp.GradScaler):
            found[name] = {"the loss scale": f"{part.get_scale()}"}
    return found


def _require_same_positions(found: Sequence[Positions], ranks: Sequence[int]) -> None:
    """Raise MismatchError unless each sampler has a position that all ranks may be at; rank 0's is saved."""
    for name in sorted(found[ROOT]):
        if not set.intersection(*({(epoch, position) for epoch, position in each[name]} for each in found)):
            descriptions = (
                "rank {}: epoch {}, position {}".format(rank, *min(map(tuple, each[name])))
                for rank, each in zip(ranks, found, strict=True)
            )
            raise MismatchError(
                f"{name}: the ranks are at different positions of the data, {'; '.join(descriptions)}: call "
                "save_checkpoint between two steps, and give all ranks batches of the same size"
            )
