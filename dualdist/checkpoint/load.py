"""Load a job's state: rank 0 reads the newest valid checkpoint and broadcasts it; on error nothing changes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualdist.checkpoint import files as checkpoint_files
from dualdist.checkpoint.files import EXTRA, METADATA, FileProgress
from dualdist.checkpoint.save import (
    ROOT,
    CheckpointSaver,
    DiskTask,
    await_outcome,
    error_message,
    raise_problems,
    unwrap_outcome,
)
from dualdist.checkpoint.state import StateCopy, find_mismatch, load_state
from dualdist.collectives.broadcast_state import allgather_object, broadcast_all
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.group import Group
from dualdist.ddp.bucket_plan import dense_strides
from dualdist.ddp.optimizer import set_reduction_order
from dualdist.errors import CheckpointError, DualdistError, UsageError
from dualdist.utils import random_state
from dualdist.utils.nested_tensors import extract_tensors, insert_tensors
from dualdist.utils.random_state import RandomState

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


@dataclass(frozen=True)
class CheckpointHeader:
    """A file's structure, which all ranks get before its tensors."""

    path: str
    structure: Any  # of the requested parts
    specs: tuple[Spec, ...]
    names: tuple[str, ...]  # of all parts in the file
    refused: tuple[str, ...]  # why newer files were refused

    def content(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = insert_tensors(self.structure, tensors)
        return found


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
    run_agreed(group, "load_checkpoint", name, {"parts": sorted(parts), "required": required}, lambda channel: None)
    wrong = [part for part, value in parts.items() if not callable(getattr(value, "load_state_dict", None))]
    problem = f"{', '.join(wrong)} cannot be loaded into: plain data are in the returned dict" if wrong else ""
    _raise_problem(group, f"{name}.parts", problem, UsageError)
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
    _raise_problem(group, f"{name}.fit", problem and f"{header.path} does not fit: {problem}", CheckpointError)
    if group.rank != ROOT:
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype, device="cpu") for shape, strides, dtype in header.specs
        ]
    run_agreed(
        group,
        "broadcast",
        f"{name}.tensors",
        {},
        lambda channel: broadcast_all(channel, tensors, ROOT, f"op.{name}"),
    )
    content = header.content(tensors)
    _load_all_or_nothing(group, device, name, content, parts, content[METADATA].get("random") if random else None)
    for part, order in _reduction_orders(content[METADATA].get("orders"), parts):
        set_reduction_order(part, order)
    saver.skip(newer)
    if header.refused and group.rank == ROOT:  # last, as warnings may be errors
        warnings.warn(f"took {header.path}, for {'; '.join(header.refused)}", RuntimeWarning, stacklevel=4)
    extra: dict[str, Any] = content[EXTRA]
    return extra


def _read(
    path: Path, parts: Mapping[str, Any], tensors: list[torch.Tensor], newer: list[Path], progress: FileProgress
) -> CheckpointHeader | None:
    """Read the newest valid file on rank 0; fill `tensors` and `newer`, and return the header."""
    found = checkpoint_files.read_newest(path, progress)
    if found is None:
        return None
    newer += found.newer
    requested = {name: found.content[name] for name in (*parts, METADATA, EXTRA) if name in found.content}
    structure = extract_tensors(requested, tensors)
    specs = tuple((tuple(tensor.shape), dense_strides(tensor), tensor.dtype) for tensor in tensors)
    return CheckpointHeader(str(found.path), structure, specs, tuple(map(str, found.content)), found.refused)


def _find_mismatch(header: CheckpointHeader, parts: Mapping[str, Any]) -> str:
    """Describe what does not fit on this rank, or return ""; needs no tensor data."""
    content = header.content([torch.empty(shape, dtype=dtype, device="meta") for shape, _, dtype in header.specs])
    try:
        return find_mismatch(parts, content, header.names)
    except Exception as error:  # a foreign file may hold anything, and the program's objects run their own code
        return error_message(error)


def _load_all_or_nothing(
    group: Group, device: torch.device, name: str, content: dict[str, Any], parts: Mapping[str, Any], random: Any
) -> None:
    """Load the objects' states and, unless None, the random state; undo it on all ranks if an object refuses on one.

    An object whose present state cannot be copied, such as a sampler between a draw and its record or a module with
    uninitialized parameters, is loaded after all ranks have loaded the others.
    """
    before = random_state.get_random_state(device)
    copies: dict[str, StateCopy] = {}
    for part_name, part in parts.items():
        with contextlib.suppress(Exception):  # state_dict() is the object's own code
            copies[part_name] = StateCopy.create({part_name: part}, device)
    with contextlib.ExitStack() as undo:
        undo.callback(random_state.set_random_state, before, device)
        for part_name, copy in copies.items():
            undo.callback(copy.load, {part_name: parts[part_name]}, device)
        for stage, has_copy in (("undoable", True), ("others", False)):
            cause: Exception | None = None
            try:
                load_state({each: part for each, part in parts.items() if (each in copies) is has_copy}, content)
                if has_copy and random is not None:
                    _load_random_state(random, group, device)
            except Exception as error:  # raised on all ranks
                cause = error
            _raise_problem(group, f"{name}.{stage}", error_message(cause) if cause else "", CheckpointError, cause)
        undo.pop_all()


def _reduction_orders(found: Any, parts: Mapping[str, Any]) -> list[tuple[torch.optim.Optimizer, list[int]]]:
    """Return the optimizers with their saved reduction orders, in the same order on every rank."""
    orders = found if isinstance(found, dict) else {}
    return [
        (part, orders[name])
        for name, part in sorted(parts.items())
        if isinstance(part, torch.optim.Optimizer)
        and isinstance(orders.get(name), list)
        and all(type(number) is int for number in orders[name])
    ]


def _load_random_state(states: list[RandomState], group: Group, device: torch.device) -> None:
    """Set this rank's random state; for another number of ranks derive new, distinct ones from all saved states."""
    if not states:
        raise CheckpointError("it holds no random state")
    if len(states) == group.size:
        random_state.set_random_state(states[group.rank], device)
    else:
        saved = [state["torch"].numpy().tobytes() for state in states]
        random_state.seed_generators(random_state.derive_seed(saved, group.rank, group.size), device)


def _raise_problem(
    group: Group, name: str, problem: str, kind: type[DualdistError], cause: Exception | None = None
) -> None:
    """Raise on every rank if any rank has a problem."""
    try:
        raise_problems(allgather_object(group, problem, name), group.ranks, kind)
    except kind as error:
        raise error from cause
