"""The content of a checkpoint: collect the state of objects as plain data, compare it and load it."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dualdist.checkpoint.files import EXTRA, METADATA, OPTIONS, release_pages
from dualdist.collectives.broadcast_state import optimizer_params
from dualdist.collectives.tensor_utils import PLAIN_TYPES, check_tensor, find_tensors, map_nested, remember_names
from dualdist.data import random_state
from dualdist.data.random_state import RandomState
from dualdist.data.sampler import Sampler
from dualdist.ddp.optimizer import get_residuals, is_sharded, set_residuals
from dualdist.errors import CheckpointError, UsageError
from dualdist.utils.suggest import type_name

SHARDED = "FullyShardedDataParallel"
USE_DCP = "save it with torch.distributed.checkpoint"
SHOWN = 5  # names, at most, in an error
# Methods of modules that a program's class or object may override.
OF_STATE = ("state_dict", "load_state_dict", "get_extra_state", "set_extra_state")


def has_state(part: object) -> bool:
    """Return True for an object with a state_dict(), False for plain data."""
    return callable(getattr(part, "state_dict", None))


def check_part_names(names: Iterable[str]) -> None:
    """Raise UsageError for a reserved name."""
    for name in names:
        if name in (METADATA, EXTRA):
            raise UsageError(f"{name}= is reserved in a checkpoint: choose another name")
        if name in OPTIONS:
            raise UsageError(f"{name}= is an option of save_checkpoint or load_checkpoint: rename the part")


def gather_sharded(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full states of optimizers of which each rank has a part; every rank calls this."""
    return {name: part.state_dict() for name, part in sorted(parts.items()) if is_sharded(part)}


def collect_state(parts: Mapping[str, Any], *, copy: bool, gathered: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return states and plain data on the CPU, loadable with weights_only=True; `copy`: share no memory.

    States that were `gathered` before are not asked for.

    Raises:
        UsageError: a part is sharded, or cannot be loaded without running code.
    """
    for name, part in parts.items():
        # Its state_dict() is collective, and only rank 0 would call it.
        if isinstance(part, nn.Module) and SHARDED in {type(module).__name__ for module in part.modules()}:
            raise UsageError(f"{name} is sharded between ranks: {USE_DCP}")
    gathered = gathered or {}
    states = {
        name: gathered[name] if name in gathered else unwrap_module(part).state_dict()
        for name, part in parts.items()
        if has_state(part)
    }
    extra = {name: part for name, part in parts.items() if not has_state(part)}
    for name, tensor in find_tensors({**states, **extra}):
        if type(check_tensor(tensor, name)) not in PLAIN_TYPES:
            raise UsageError(
                f"{name} is {type_name(tensor)}, which cannot be saved here: if it is sharded between ranks, {USE_DCP}"
            )
    found: dict[str, Any] = _on_cpu({**states, EXTRA: extra}, copy=copy)
    for name in parts:
        _require_plain(name, found[name] if name in states else found[EXTRA][name])
    return found


def unwrap_module(part: Any) -> Any:
    """Return the module inside DistributedDataParallel, DataParallel or torch.compile, whose names are the model's."""
    while True:
        if isinstance(part, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            part = part.module
        elif isinstance(part, nn.Module) and "_orig_mod" in dict(part.named_children()):
            part = part._orig_mod
        else:
            return part


def find_mismatch(parts: Mapping[str, Any], found: Mapping[str, Any], names: Sequence[str]) -> str:
    """Describe which state does not fit its object, or return ""; tensors are compared by shape.

    `names` are all parts in the file.
    """
    missing = [name for name in parts if name not in found]
    if missing:
        there = [name for name in names if name not in (METADATA, EXTRA)]
        return f"it holds no {' and no '.join(missing)}, only {', '.join(there) or 'plain data'}"
    for name, part in parts.items():
        part, state = unwrap_module(part), found[name]
        problem = ""
        if not isinstance(state, dict):
            problem = f"its state is {type_name(state)}, not a dict"
        elif isinstance(part, nn.Module):
            problem = _module_mismatch(part, state)
        elif isinstance(part, torch.optim.Optimizer):
            problem = _optimizer_mismatch(part, state, found[METADATA].get("shapes", {}).get(name))
        elif isinstance(part, Sampler):
            problem = part.find_mismatch(state)
        if problem:
            return f"{name}: {problem}"
    return ""


def dtypes_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the dtypes of its parameters, by which load_state() recognises state in a wider dtype."""
    return [str(param.dtype) for param in optimizer_params(optimizer)]


def shapes_of(optimizer: torch.optim.Optimizer) -> list[list[int] | None]:
    """Return the shapes of its parameters; None for uninitialized ones."""
    params = optimizer_params(optimizer)
    return [None if nn.parameter.is_lazy(param) else list(param.shape) for param in params]


def copies_its_state(part: object) -> bool:
    """Return True for a module of torch's own code only, which refuses no state of its names and shapes."""
    part = unwrap_module(part)
    if not isinstance(part, nn.Module):
        return False
    is_plain = all(type(tensor) in PLAIN_TYPES for tensor in (*part.parameters(), *part.buffers()))
    return is_plain and all(
        all(getattr(getattr(each, name), "__func__", None) is getattr(nn.Module, name) for name in OF_STATE)
        and type(each)._save_to_state_dict.__module__.startswith("torch.nn.modules.")
        and type(each)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and not (each._state_dict_pre_hooks or each._state_dict_hooks)
        and not (each._load_state_dict_pre_hooks or each._load_state_dict_post_hooks)
        for each in part.modules()
    )


def replaces_its_state(part: object) -> bool:
    """Return True for an optimizer with torch's load_state_dict(), which does not write to the tensors it had."""
    if not isinstance(part, torch.optim.Optimizer) or is_sharded(part):
        return False
    return type(part).load_state_dict is torch.optim.Optimizer.load_state_dict


def copy_mapped(content: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Copy mapped tensors, but not those of modules, which load_state() copies: Note [mapped tensors]."""
    mapped = {name: state for name, state in content.items() if name in parts and copies_its_state(parts[name])}
    copied: dict[str, Any] = _on_cpu(
        {name: state for name, state in content.items() if name not in mapped}, copy=True, is_mapped=True
    )
    return {**copied, **mapped}


def load_state(parts: Mapping[str, Any], found: Mapping[str, Any], *, is_mapped: bool = False) -> None:
    """Load the states into the objects; those of modules that copy theirs may be mapped."""
    dtypes = found[METADATA].get("dtypes", {})
    for name, part in parts.items():
        part = unwrap_module(part)
        try:
            with _released(part, found[name]) if is_mapped and copies_its_state(part) else contextlib.nullcontext():
                part.load_state_dict(found[name])
            if isinstance(part, nn.Module):
                remember_names(part.named_parameters())
            if isinstance(part, torch.optim.Optimizer):
                _restore_dtypes(part, found[name], dtypes.get(name))
                set_residuals(part, found[METADATA].get("residuals", {}).get(name))
        except Exception as error:  # whatever the object's own code raises
            raise CheckpointError(f"{name} refuses its state: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _released(module: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Release the mapped state of each module inside once it has loaded it: the memory of one is needed at a time."""
    by_owner: dict[str, list[torch.Tensor]] = {}
    for name, tensor in find_tensors(state):
        by_owner.setdefault(name.rpartition(".")[0], []).append(tensor)

    def release(name: str, *_: object) -> None:
        for tensor in by_owner.get(name, ()):
            release_pages(tensor)

    with contextlib.ExitStack() as hooks:
        for name, each in module.named_modules():
            hooks.callback(each.register_load_state_dict_post_hook(partial(release, name)).remove)
        yield


@dataclass(frozen=True)
class StateCopy:
    """A copy, in CPU memory, of objects' states, plain data and random state."""

    content: Mapping[str, Any]
    random: RandomState

    @staticmethod
    def create(parts: Mapping[str, Any], device: torch.device, *, copy: bool = True) -> StateCopy:
        """Copy the states; without `copy` keep tensors as they are, of objects that replace theirs."""
        content = collect_state(parts, copy=copy)
        optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        content[METADATA] = {
            "dtypes": {name: dtypes_of(part) for name, part in optimizers.items()},
            "residuals": {name: get_residuals(part) for name, part in optimizers.items()},
        }
        return StateCopy(content, random_state.get_random_state(device))

    def load(self, objects: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Load the states and the random state, and return a copy of the plain data."""
        content = deepcopy(dict(self.content))  # the objects will modify what they load
        load_state(objects, content)
        random_state.set_random_state(self.random, device)
        plain: dict[str, Any] = content[EXTRA]
        return plain


def _on_cpu(value: Any, *, copy: bool, is_mapped: bool = False) -> Any:
    """Move the structure's tensors to the CPU; tensors that share memory still share it."""
    map_nested(value, (set, frozenset), _require_no_tensor)
    if copy:
        value = map_nested(value, (set, bytearray), lambda found: found.copy())
    copies: dict[object, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # The resolved tensor may be freed and its address reused, so the key is the original's.
        start, flags = tensor.data_ptr(), (tensor.is_conj(), tensor.is_neg())
        key = tensor.device, start, tensor.dtype, tensor.shape, tensor.stride(), flags
        if key not in copies:
            tensor = tensor.detach().resolve_conj().resolve_neg()
            # torch.save would write the whole storage of a view.
            is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
            copies[key] = tensor.to("cpu", copy=copy or is_view)
            if is_mapped:
                release_pages(tensor)
        return copies[key]

    return map_nested(value, torch.Tensor, move)


def _require_no_tensor(found: AbstractSet[Any]) -> None:
    """Raise UsageError for a set of tensors, which would be neither copied nor restored."""
    if any(isinstance(item, torch.Tensor) for item in found):
        raise UsageError("a tensor in a set cannot be saved here: put it in a list")


def _require_plain(name: str, value: Any) -> None:
    """Raise UsageError unless torch.load(weights_only=True) reads it; tried with empty tensors."""
    buffer = io.BytesIO()
    try:
        torch.save(map_nested(value, torch.Tensor, lambda tensor: torch.empty(0)), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # pickling and loading run the objects' own code
        detail = next(filter(None, re.findall(r"(?:Unsupported|Trying).*?GLOBAL [\w.]+", str(error))), str(error))
        raise UsageError(
            f"{name} cannot be saved: it could not be loaded without running code: pass numbers, strings, "
            f"tensors, and dicts and lists of them ({detail})"
        ) from error


def _module_mismatch(module: nn.Module, state: Mapping[str, Any]) -> str:
    own = module.state_dict()
    differing = [
        f"{name} is {tuple(state[name].shape)} in the file, {tuple(value.shape)} in the program"
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
        and isinstance(state.get(name), torch.Tensor)
        and not nn.parameter.is_lazy(value)
        and value.shape != state[name].shape
    ]
    return "; ".join(
        [
            *_listed("only in the file", [name for name in state if name not in own]),
            *_listed("only in the program", [name for name in own if name not in state]),
            *_listed("of another shape", differing),
        ]
    )


def _optimizer_mismatch(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], shapes: Any) -> str:
    """`shapes` are those of the saved parameters; None in older files."""
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    try:
        saved_sizes = [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError):
        return "this is not an optimizer's state"
    if own_sizes != saved_sizes:
        return f"groups of {saved_sizes} parameters in the file, of {own_sizes} in the program"
    own = shapes_of(optimizer)
    differing = [
        f"parameter {number} is {tuple(then)} in the file, {tuple(now)} in the program"
        for number, (then, now) in enumerate(zip(shapes or own, own, strict=True))
        if then is not None and now is not None and then != now
    ]
    return "; ".join(_listed("of another shape", differing))


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{what}: {', '.join(names[:SHOWN])}{more}"]


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], dtypes: list[str] | None) -> None:
    """Undo load_state_dict()'s cast to the parameter's dtype where the saved state had another one.

    `dtypes` are those of the saved parameters; None in older files.
    """
    params = optimizer_params(optimizer)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, param, dtype in zip(numbers, params, dtypes or [""] * len(params), strict=True):
        for key, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state.get(param, {}).get(key)
            if not isinstance(value, torch.Tensor) or not isinstance(loaded, torch.Tensor):
                continue
            if loaded.dtype != value.dtype and str(value.dtype) != dtype:
                optimizer.state[param][key] = value.to(loaded.device, copy=True)
