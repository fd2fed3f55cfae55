"""Load a job's state: rank 0 reads and verifies the file, and every rank gets its result or error."""

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualdist.checkpoint import files as checkpoint_files
from dualdist.checkpoint.disk_task import (
    ROOT,
    DiskTask,
    await_outcome,
    error_message,
    raise_problem,
    raised_on_all_ranks,
    unwrap_outcome,
)
from dualdist.checkpoint.files import EXTRA, METADATA, FileProgress, Identity
from dualdist.checkpoint.save import CheckpointSaver
from dualdist.checkpoint.state import (
    StateCopy,
    copies_its_state,
    copy_mapped,
    find_mismatch,
    load_state,
    replaces_its_state,
)
from dualdist.collectives.broadcast_state import allgather_object, broadcast_all
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.group import Group
from dualdist.collectives.tensor_utils import extract_tensors, insert_tensors
from dualdist.data import random_state
from dualdist.data.random_state import RandomState
from dualdist.ddp.layout import dense_strides
from dualdist.ddp.optimizer import get_wrapper
from dualdist.errors import CheckpointError, UsageError

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


@dataclass(frozen=True)
class CheckpointHeader:
    """A file's structure, which all ranks get before its tensors."""

    path: str
    identity: Identity
    structure: Any  # the requested parts, without their tensors
    specs: tuple[Spec, ...]
    names: tuple[str, ...]  # all parts in the file
    refused: tuple[str, ...]  # the reasons why newer files were refused

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
    tensors: list[torch.Tensor] = []  # rank 0 fills this list and the next one
    newer: list[Path] = []
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
            with raised_on_all_ranks(group, f"{name}.{stage}", CheckpointError):
                loaded = {each: part for each, part in parts.items() if each in names}
                load_state(loaded, content, is_mapped=is_mapped)
                if stage == "undoable" and random:
                    _load_random_state(content[METADATA].get("random", []), group, device)
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
