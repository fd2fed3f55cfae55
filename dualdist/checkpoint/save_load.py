"""Save and load a job's state: all ranks take part, rank 0 reads and writes, and every rank gets its result or error.

Note [disk progress]: writing a large file takes longer than a collective may wait. So rank 0 reads and writes in a
thread, and broadcasts every BEAT_S seconds that it makes progress: bytes went to or from the disk, or the thread used
the CPU. Without either for the length of a timeout, the file is abandoned: a thread that hangs may resume when the
disk is back, when the program's tensors and the newer checkpoints are different, so its file must never appear.
"""

import atexit
import contextlib
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import unpickle
from dualdist.backends.operation import Stages
from dualdist.checkpoint import files as checkpoint_files
from dualdist.checkpoint.files import EXTRA, FORMAT, METADATA, FileProgress, Identity
from dualdist.checkpoint.state import (
    StateCopy,
    check_part_names,
    collect_state,
    copies_its_state,
    copy_mapped,
    dtypes_of,
    find_mismatch,
    gather_sharded,
    load_state,
    replaces_its_state,
    shapes_of,
)
from dualdist.collectives.broadcast_state import allgather_object, broadcast_all, broadcast_object
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.consistency import Options, differing_options, options_of
from dualdist.collectives.group import Group
from dualdist.collectives.handle import Collective
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.collectives.tensor_utils import extract_tensors, insert_tensors
from dualdist.data import random_state
from dualdist.data.random_state import RandomState
from dualdist.data.sampler import Sampler
from dualdist.ddp.bucket_plan import dense_strides
from dualdist.ddp.optimizer import gather_residuals, get_wrapper, is_sharded
from dualdist.errors import CheckpointError, DriftError, DualdistError, MismatchError, UsageError

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype
Positions = Mapping[str, Sequence[Sequence[int]]]  # of each sampler, see Sampler.possible_positions
Report = tuple[str, Positions, Mapping[str, Options]]  # of one rank: a problem, or "", and what must be the same
BEAT_S = 10.0
ROOT = 0


@dataclass(frozen=True)
class DiskOutcome:
    """The result or error of a DiskTask, as broadcast to all ranks."""

    value: Any = None
    error: str = ""


class DiskTask:
    """A read or write that rank 0 runs in a thread."""

    def __init__(self, call: Callable[[FileProgress], Any], limit_s: float) -> None:
        self.beat_s = min(BEAT_S, limit_s / 4)
        self.progress = FileProgress()
        self.value: Any = None
        self.error: BaseException | None = None
        self._limit_s = limit_s
        self._thread = threading.Thread(target=self._run, args=(call,), name="dualdist-checkpoint", daemon=True)
        self._clock: int | None = None
        self._last_progress = (0, 0.0), time.monotonic()
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread is left: raised on all ranks
            self.error = error
        atexit.register(self._finish)  # a program that ends does not truncate a checkpoint

    def _run(self, call: Callable[[FileProgress], Any]) -> None:
        try:
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self.value = call(self.progress)
        except BaseException as error:  # raised on all ranks
            self.error = error

    def outcome(self) -> DiskOutcome | None:
        """Wait for one beat; return the outcome, or None while the task makes progress."""
        if self._thread.ident is not None:
            self._thread.join(self.beat_s)
        if not self._thread.is_alive():
            atexit.unregister(self._finish)
            return DiskOutcome(self.value) if self.error is None else DiskOutcome(error=error_message(self.error))
        if (progress := (self.progress.nbytes, self._cpu_s())) != self._last_progress[0]:
            self._last_progress = progress, time.monotonic()
        if time.monotonic() - self._last_progress[1] > self._limit_s:
            self.abandon()
            return DiskOutcome(error=f"no byte went to or from the disk for {self._limit_s:g} s: is it still there?")
        return None

    def _cpu_s(self) -> float:
        """Return the thread's CPU time, rounded to 0.1 s."""
        with contextlib.suppress(OSError):  # it has just ended
            return 0.0 if self._clock is None else round(time.clock_gettime(self._clock), 1)
        return -1.0

    def abandon(self) -> None:
        """Keep the file from ever appearing: Note [disk progress]."""
        self.progress.is_abandoned = True
        atexit.unregister(self._finish)

    def _finish(self) -> None:
        while (outcome := self.outcome()) is None:
            pass
        if outcome.error:
            print(f"dualdist: {outcome.error}", file=sys.stderr, flush=True)


class PendingSave:
    """A checkpoint that is being written, as returned by save_checkpoint(async_op=True)."""

    def __init__(self, group: Group, name: str, task: DiskTask | None, *, is_copy: bool) -> None:
        self._group = group
        self._is_copy = is_copy  # the data are a copy, which the program does not modify
        self._name = name
        self._task = task  # on rank 0
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
        except Exception as error:  # from the program's own objects, too: the other ranks must not wait for this one
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
                "orders": {name: order for name, each in wrappers.items() if (order := each.reducer.order)},
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


@dataclass(frozen=True)
class CheckpointHeader:
    """A file's structure, which all ranks get before its tensors."""

    path: str
    identity: Identity
    structure: Any  # of the requested parts
    specs: tuple[Spec, ...]
    names: tuple[str, ...]  # of all parts in the file
    refused: tuple[str, ...]  # why newer files were refused

    def content(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = insert_tensors(self.structure, tensors)
        return found


class LoadedData(dict[str, Any]):
    """The plain data of a checkpoint; true even where there are none, as something was loaded."""

    def __bool__(self) -> bool:
        return True


def load(
    group: Group,
    device: torch.device,
    timeout_s: float,
    path: Path,
    parts: Mapping[str, Any],
    saver: CheckpointSaver,
    *,
    required: bool,
    random: bool,
) -> dict[str, Any] | None:
    """Load a checkpoint; see dualdist.api.load_checkpoint. The saver will keep the file that was loaded."""
    name = group.next_name("load_checkpoint")
    # The ranks agree on the parts before rank 0 reads them.
    run_agreed(group, "load_checkpoint", name, {"parts": sorted(parts), "required": required}, lambda backend: None)
    wrong = [part for part, value in parts.items() if not callable(getattr(value, "load_state_dict", None))]
    problem = f"{', '.join(wrong)} cannot be loaded into: plain data are in the returned dict" if wrong else ""
    raise_problem(group, f"{name}.parts", problem, UsageError)
    tensors: list[torch.Tensor] = []
    newer: list[Path] = []  # on rank 0, as the tensors
    task = (
        DiskTask(lambda progress: _read(path, parts, tensors, newer, progress), timeout_s)
        if group.rank == ROOT
        else None
    )
    header: CheckpointHeader | None = unwrap_outcome(await_outcome(group, f"{name}.header", task), task)
    if header is None:
        if required:
            raise CheckpointError(f"there is no checkpoint in {path}")
        return None
    problem = _find_mismatch(header, parts)
    raise_problem(group, f"{name}.fit", problem and f"{header.path} does not fit: {problem}", CheckpointError)
    try:
        content, is_mapped = _share_content(group, name, header, tensors, parts)
    finally:
        tensors.clear()  # extract_tensors() and insert_tensors() leave cycles of references behind, with the list
    _load_all_or_nothing(group, device, name, content, parts, is_mapped=is_mapped, random=random)
    _set_reduction_orders(content[METADATA].get("orders"), parts)
    saver.skip(newer)
    if header.refused:  # last, and on all ranks, as warnings may be errors
        with contextlib.nullcontext() if group.rank == ROOT else warnings.catch_warnings(record=True):
            warnings.warn(f"took {header.path}, for {'; '.join(header.refused)}", RuntimeWarning, stacklevel=4)
    return LoadedData(content[EXTRA])


def _read(
    path: Path, parts: Mapping[str, Any], tensors: list[torch.Tensor], newer: list[Path], progress: FileProgress
) -> CheckpointHeader | None:
    """Read the newest valid file on rank 0; fill `tensors` and `newer`, and return the header."""
    found = checkpoint_files.read_newest(path, progress)
    if found is None:
        return None
    newer += found.newer
    structure = extract_tensors(_requested(found.content, parts), tensors)
    specs = tuple((tuple(tensor.shape), dense_strides(tensor), tensor.dtype) for tensor in tensors)
    names = tuple(map(str, found.content))
    return CheckpointHeader(str(found.path), found.identity, structure, specs, names, found.refused)


def _requested(content: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: content[name] for name in (*parts, METADATA, EXTRA) if name in content}


def _share_content(
    group: Group, name: str, header: CheckpointHeader, tensors: list[torch.Tensor], parts: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Return the content on all ranks, and whether modules' states are mapped: Note [mapped tensors].

    Ranks of one machine map the file that rank 0 has verified. Where one of them does not find it, rank 0 sends all.
    """
    mapped = None
    if group.rank == ROOT:
        mapped = header.content(tensors)
    elif (found := checkpoint_files.read_again(header.path, header.identity)) is not None:
        mapped = _requested(found, parts)
    if not all(allgather_object(group, mapped is not None, f"{name}.mapped")):
        if group.rank != ROOT:
            mapped = None
            tensors += [
                torch.empty_strided(shape, strides, dtype=dtype, device="cpu") for shape, strides, dtype in header.specs
            ]
        broadcast = lambda backend: broadcast_all(backend, tensors, ROOT, f"op.{name}")  # noqa: E731
        run_agreed(group, "broadcast", f"{name}.tensors", {}, broadcast)
    return (header.content(tensors), False) if mapped is None else (copy_mapped(mapped, parts), True)


def _find_mismatch(header: CheckpointHeader, parts: Mapping[str, Any]) -> str:
    """Describe what does not fit on this rank, or return ""; needs no tensor data."""
    content = header.content([torch.empty(shape, dtype=dtype, device="meta") for shape, _, dtype in header.specs])
    try:
        return find_mismatch(parts, content, header.names)
    except Exception as error:  # a foreign file may hold anything, and the program's objects run their own code
        return error_message(error)


def _load_all_or_nothing(
    group: Group,
    device: torch.device,
    name: str,
    content: dict[str, Any],
    parts: Mapping[str, Any],
    *,
    is_mapped: bool,
    random: bool,
) -> None:
    """Load the objects' states and the random state; undo it on all ranks if an object refuses on one.

    An object whose present state cannot be copied, such as a sampler between a draw and its record or a module with
    uninitialized parameters, is loaded after all ranks have loaded the others. Modules that refuse nothing are loaded
    last: no copy of what they had is needed.
    """
    before = random_state.get_random_state(device)
    copies: dict[str, StateCopy] = {}
    last = {part_name for part_name, part in parts.items() if copies_its_state(part)}
    for part_name, part in parts.items():
        if part_name not in last:
            with contextlib.suppress(Exception):  # state_dict() is the object's own code
                copies[part_name] = StateCopy.create({part_name: part}, device, copy=not replaces_its_state(part))
    stages = {
        "undoable": set(copies),
        "others": set(parts) - set(copies) - last,
        "modules": last,
    }
    with contextlib.ExitStack() as undo:
        undo.callback(random_state.set_random_state, before, device)
        for part_name, copy in copies.items():
            undo.callback(copy.load, {part_name: parts[part_name]}, device)
        for stage, names in stages.items():
            cause: Exception | None = None
            try:
                loaded = {each: part for each, part in parts.items() if each in names}
                load_state(loaded, content, is_mapped=is_mapped)
                if stage == "undoable" and random:
                    _load_random_state(content[METADATA].get("random", []), group, device)
            except Exception as error:  # raised on all ranks
                cause = error
            raise_problem(group, f"{name}.{stage}", error_message(cause) if cause else "", CheckpointError, cause)
        undo.pop_all()


def _set_reduction_orders(orders: Any, parts: Mapping[str, Any]) -> None:
    """Reduce the optimizers' buckets in the saved orders; a collective, for which the parts are sorted."""
    for name, part in sorted(parts.items()):
        order = orders.get(name) if isinstance(orders, dict) else None
        wrapper = get_wrapper(part)
        if wrapper is not None and isinstance(order, list) and all(type(number) is int for number in order):
            wrapper.reducer.set_order(order)


def _load_random_state(states: list[RandomState], group: Group, device: torch.device) -> None:
    """Set this rank's random state; for another number of ranks derive new, distinct ones from all saved states."""
    if not states:
        raise CheckpointError("it holds no random state")
    if len(states) == group.size:
        random_state.set_random_state(states[group.rank], device)
    else:
        saved = [state["torch"].numpy().tobytes() for state in states]
        random_state.seed_generators(random_state.derive_seed(saved, group.rank, group.size), device)


def raise_problem(
    group: Group, name: str, problem: str, kind: type[DualdistError], cause: Exception | None = None
) -> None:
    """Raise on every rank if any rank has a problem."""
    try:
        raise_problems(allgather_object(group, problem, name), group.ranks, kind)
    except kind as error:
        raise error from cause


def error_message(error: BaseException) -> str:
    """Return an error's text for the other ranks; foreign errors with the name of their class."""
    return str(error) if isinstance(error, DualdistError) else f"{type(error).__name__}: {error}"


def raise_problems(problems: Sequence[str], ranks: Sequence[int], kind: type[DualdistError]) -> None:
    """Raise an error of this kind if a rank has a problem; the message names ranks unless all have the same."""
    if not any(problems):
        return
    if len(set(problems)) == 1:
        raise kind(problems[0])
    raise kind("; ".join(f"rank {rank}: {problem}" for rank, problem in zip(ranks, problems, strict=True) if problem))


def await_outcome(group: Group, name: str, task: DiskTask | None) -> DiskOutcome:
    """Wait for rank 0's task and return its outcome on every rank: Note [disk progress]."""
    beat = 0
    while True:
        beat += 1
        local = None if task is None else task.outcome()
        outcome = broadcast_object(group, local, group.ranks[ROOT], f"{name}.{beat}")
        if outcome is not None:
            return outcome


def unwrap_outcome(outcome: DiskOutcome, task: DiskTask | None) -> Any:
    """Return the task's result, or raise CheckpointError if it failed."""
    if outcome.error:
        raise CheckpointError(outcome.error) from (None if task is None else task.error)
    return outcome.value
