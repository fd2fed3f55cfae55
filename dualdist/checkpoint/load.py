"""Loading a job's state: rank 0 reads the newest good checkpoint, and it reaches all ranks, or changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualdist.checkpoint import files as checkpoint_files
from dualdist.checkpoint.files import EXTRA, METADATA, ReadProgress
from dualdist.checkpoint.save import (
    ROOT,
    CheckpointSaver,
    DiskTask,
    await_outcome,
    error_message,
    raise_problems,
    unwrap_outcome,
)
from dualdist.checkpoint.state import find_mismatch, load_state
from dualdist.collectives.broadcast_state import broadcast_all
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.group import Group
from dualdist.collectives.objects import allgather_object
from dualdist.ddp.bucket_plan import dense_strides
from dualdist.ddp.optimizer import set_reduction_order
from dualdist.errors import CheckpointError, DualdistError, UsageError
from dualdist.utils import random_state
from dualdist.utils.nested_tensors import extract_tensors, insert_tensors
from dualdist.utils.random_state import RandomState

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides


@dataclass(frozen=True)
class CheckpointHeader:
    """What all ranks learn of a file before its tensors."""

    path: str
    structure: Any  # of what is wanted of it
    specs: tuple[Spec, ...]
    names: tuple[str, ...]  # of all that it holds
    refused: tuple[str, ...]  # why newer files were not taken

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
    """See dualdist.api.load_checkpoint; the saver keeps what was loaded until there is more to keep."""
    name = group.next_name("load_checkpoint")
    # The ranks agree on what is wanted before rank 0 reads it.
    run_agreed(group, "load_checkpoint", name, {"parts": sorted(parts), "required": required}, lambda line: None)
    wrong = [part for part, value in parts.items() if not callable(getattr(value, "load_state_dict", None))]
    words = f"{', '.join(wrong)} cannot be loaded into: plain data come back as the result" if wrong else ""
    _require_none(group, f"{name}.parts", words, UsageError)
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
    words = _misfit(header, parts)
    _require_none(group, f"{name}.fit", words and f"{header.path} does not fit: {words}", CheckpointError)
    if group.rank != ROOT:
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype, device="cpu") for shape, strides, dtype in header.specs
        ]
    run_agreed(group, "broadcast", f"{name}.tensors", {}, lambda line: broadcast_all(line, tensors, ROOT, f"op.{name}"))
    content = header.content(tensors)
    cause = _restore(content, parts, group, device if random else None)
    _require_none(group, f"{name}.restored", error_message(cause) if cause else "", CheckpointError, cause)
    for part, order in _orders(content[METADATA].get("orders"), parts):
        set_reduction_order(part, order)
    saver.pass_over(newer)
    if header.refused and group.rank == ROOT:  # at the end, for a warning may be an error
        warnings.warn(f"took {header.path}, for {'; '.join(header.refused)}", RuntimeWarning, stacklevel=4)
    extra: dict[str, Any] = content[EXTRA]
    return extra


def _read(
    path: Path, parts: Mapping[str, Any], tensors: list[torch.Tensor], newer: list[Path], progress: ReadProgress
) -> CheckpointHeader | None:
    """On rank 0: the newest good file's header; its tensors, and the files that are newer, in the lists."""
    found = checkpoint_files.read_newest(path, progress)
    if found is None:
        return None
    newer += found.newer
    wanted = {name: found.content[name] for name in (*parts, METADATA, EXTRA) if name in found.content}
    structure = extract_tensors(wanted, tensors)
    specs = tuple((tuple(tensor.shape), dense_strides(tensor), tensor.dtype) for tensor in tensors)
    return CheckpointHeader(str(found.path), structure, specs, tuple(map(str, found.content)), found.refused)


def _misfit(header: CheckpointHeader, parts: Mapping[str, Any]) -> str:
    """What does not fit on this rank, in words, or nothing; known before a tensor is there."""
    content = header.content([torch.empty(shape, dtype=dtype, device="meta") for shape, _, dtype in header.specs])
    try:
        return find_mismatch(parts, content, header.names)
    except Exception as error:  # a stranger's file may hold anything, and the program's objects run their own code
        return error_message(error)


def _restore(
    content: dict[str, Any], parts: Mapping[str, Any], group: Group, device: torch.device | None
) -> Exception | None:
    """The objects, and with a device the random generators, are as they were; or why not."""
    try:
        load_state(parts, content)
        if device is not None:
            _restore_random(content[METADATA]["random"], group, device)
    except Exception as error:  # reported to all ranks
        return error
    return None


def _orders(found: Any, parts: Mapping[str, Any]) -> list[tuple[torch.optim.Optimizer, list[int]]]:
    """The optimizers among the parts, and in which order their gradients travelled; alike on every rank."""
    orders = found if isinstance(found, dict) else {}
    return [
        (part, orders[name])
        for name, part in sorted(parts.items())
        if isinstance(part, torch.optim.Optimizer)
        and isinstance(orders.get(name), list)
        and all(type(number) is int for number in orders[name])
    ]


def _restore_random(states: list[RandomState], group: Group, device: torch.device) -> None:
    """Each rank goes on with its own state; on another number of ranks each with one that none of them has had."""
    if not states:
        raise CheckpointError("it holds no random state")
    if len(states) == group.size:
        random_state.set_random_state(states[group.rank], device)
    else:
        was = [state["torch"].numpy().tobytes() for state in states]
        random_state.seed_generators(random_state.derive_seed(was, group.rank, group.size), device)


def _require_none(
    group: Group, name: str, problem: str, kind: type[DualdistError], cause: Exception | None = None
) -> None:
    """An error on every rank where a rank has a problem."""
    try:
        raise_problems(allgather_object(group, problem, name), group.ranks, kind)
    except kind as error:
        raise error from cause
