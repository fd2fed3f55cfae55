"""What a checkpoint holds: the states of a program's objects as plain data, and whether they fit other objects."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from dualdist.checkpoint.files import EXTRA, METADATA, OPTIONS
from dualdist.data.sampler import Sampler
from dualdist.errors import CheckpointError, UsageError
from dualdist.utils.nested_tensors import map_nested

SHARDED = "FullyShardedDataParallel"
USE_DCP = "torch.distributed.checkpoint saves all parts"
SHOWN = 5  # names, at most, in an error


def has_state(part: object) -> bool:
    """Whether it is an object with a state, rather than plain data."""
    return callable(getattr(part, "state_dict", None))


def check_part_names(names: Iterable[str]) -> None:
    """UsageError where a part has a name that is not to be had."""
    for name in names:
        if name in (METADATA, EXTRA):
            raise UsageError(f"{name}= is a name that a checkpoint needs itself: choose another one")
        if name in OPTIONS:
            raise UsageError(f"{name}= says how to save or load a checkpoint: choose another name for a part of it")


def collect_state(parts: Mapping[str, Any], *, copy: bool) -> dict[str, Any]:
    """The states and the plain data, on the CPU, as torch loads them with weights_only=True.

    With `copy` nothing in it shares memory with the program.
    """
    for name, part in parts.items():
        # Their state_dict() waits for the other ranks, which are not asked for theirs.
        if isinstance(part, nn.Module) and SHARDED in {type(module).__name__ for module in part.modules()}:
            raise UsageError(f"{name} is sharded between ranks, of which {USE_DCP}")
    states = {name: unwrap_module(part).state_dict() for name, part in parts.items() if has_state(part)}
    extra = {name: part for name, part in parts.items() if not has_state(part)}
    found: dict[str, Any] = _on_cpu({**states, EXTRA: extra}, copy=copy)
    for name in parts:
        _require_plain(name, found[name] if name in states else found[EXTRA][name])
    return found


def unwrap_module(part: Any) -> Any:
    """The module within DistributedDataParallel, DataParallel or a compiled module, so that names are the model's."""
    while True:
        if isinstance(part, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            part = part.module
        elif isinstance(part, nn.Module) and "_orig_mod" in dict(part.named_children()):
            part = part._orig_mod
        else:
            return part


def find_mismatch(parts: Mapping[str, Any], found: Mapping[str, Any], names: Sequence[str]) -> str:
    """What of the states does not fit the objects, in words, or nothing; of tensors the shapes count.

    `names` are those of all that the file holds.
    """
    missing = [name for name in parts if name not in found]
    if missing:
        there = [name for name in names if name not in (METADATA, EXTRA)]
        return f"it holds no {' and no '.join(missing)}, only {', '.join(there) or 'plain data'}"
    for name, part in parts.items():
        part, state = unwrap_module(part), found[name]
        words = ""
        if not isinstance(state, dict):
            words = f"a {type(state).__name__} stands for its state"
        elif isinstance(part, nn.Module):
            words = _misfit_of_module(part, state)
        elif isinstance(part, torch.optim.Optimizer):
            words = _misfit_of_optimizer(part, state, found[METADATA].get("shapes", {}).get(name))
        elif isinstance(part, Sampler):
            words = part.misfit(state)
        if words:
            return f"{name}: {words}"
    return ""


def dtypes_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Those of its parameters, by which load_state() tells what was kept more precisely."""
    return [str(param.dtype) for group in optimizer.param_groups for param in group["params"]]


def shapes_of(optimizer: torch.optim.Optimizer) -> list[list[int] | None]:
    """Those of its parameters; None of those that have none yet."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [None if nn.parameter.is_lazy(param) else list(param.shape) for param in params]


def load_state(parts: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """The objects have the states."""
    dtypes = found[METADATA].get("dtypes", {})
    for name, part in parts.items():
        part = unwrap_module(part)
        try:
            part.load_state_dict(found[name])
            if isinstance(part, torch.optim.Optimizer):
                _restore_dtypes(part, found[name], dtypes.get(name))
        except Exception as error:  # whatever the object's own code raises
            raise CheckpointError(f"{name} refuses its state: {type(error).__name__}: {error}") from error


def _on_cpu(value: Any, *, copy: bool) -> Any:
    """The structure with its tensors on the CPU; what shared memory shares it still."""
    map_nested(value, (set, frozenset), _require_no_tensor)
    if copy:
        value = map_nested(value, (set, bytearray), lambda found: found.copy())
    copies: dict[object, torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise UsageError(
                f"a {type(tensor).__name__} cannot be saved here: where it is a part of what ranks share, {USE_DCP}"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UsageError("a sparse or quantized tensor cannot be saved here: convert it to a dense one")
        # What is resolved may be gone again, and its memory another one's.
        start, flags = tensor.data_ptr(), (tensor.is_conj(), tensor.is_neg())
        place = tensor.device, start, tensor.dtype, tensor.shape, tensor.stride(), flags
        if place not in copies:
            tensor = tensor.detach().resolve_conj().resolve_neg()
            # Of a view torch.save would write all the memory that it looks at.
            is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
            copies[place] = tensor.to("cpu", copy=copy or is_view)
        return copies[place]

    return map_nested(value, torch.Tensor, moved)


def _require_no_tensor(found: AbstractSet[Any]) -> None:
    """UsageError where the set holds tensors, which would neither be copied nor found again."""
    if any(isinstance(item, torch.Tensor) for item in found):
        raise UsageError("a tensor in a set cannot be saved here: put it in a list")


def _require_plain(name: str, value: Any) -> None:
    """UsageError unless torch itself can load it with weights_only=True; tried without the tensors' values."""
    tried = io.BytesIO()
    try:
        torch.save(map_nested(value, torch.Tensor, lambda tensor: torch.empty(0)), tried)
        tried.seek(0)
        torch.load(tried, weights_only=True)
    except Exception as error:  # pickling and loading run the objects' own code
        told = next(filter(None, re.findall(r"(?:Unsupported|Trying).*?GLOBAL [\w.]+", str(error))), str(error))
        raise UsageError(
            f"{name} cannot be saved: what it holds is not to be read without running code: pass numbers, texts, "
            f"tensors, and dicts and lists of them ({told})"
        ) from error


def _misfit_of_module(module: nn.Module, state: Mapping[str, Any]) -> str:
    own = module.state_dict()
    differing = [
        f"{name} is {tuple(state[name].shape)} in the file, {tuple(mine.shape)} in the program"
        for name, mine in own.items()
        if isinstance(mine, torch.Tensor)
        and isinstance(state.get(name), torch.Tensor)
        and not nn.parameter.is_lazy(mine)
        and mine.shape != state[name].shape
    ]
    return "; ".join(
        [
            *_listed("only in the file", [name for name in state if name not in own]),
            *_listed("only in the program", [name for name in own if name not in state]),
            *_listed("of another shape", differing),
        ]
    )


def _misfit_of_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], shapes: Any) -> str:
    """`shapes` are those of the parameters when they were saved, which older files do not tell."""
    mine = [len(group["params"]) for group in optimizer.param_groups]
    try:
        theirs = [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError):
        return "this is no optimizer's state"
    if mine != theirs:
        return f"groups of {theirs} parameters in the file, of {mine} in the program"
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
    """load_state_dict() casts state to the dtype of its parameter: what was kept in another one is so again.

    `dtypes` are those of the parameters when they were saved, which older files do not tell.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, param, dtype in zip(numbers, params, dtypes or [""] * len(params), strict=True):
        for key, value in saved["state"].get(number, {}).items():
            mine = optimizer.state[param].get(key)
            if not isinstance(value, torch.Tensor) or not isinstance(mine, torch.Tensor):
                continue
            if mine.dtype != value.dtype and str(value.dtype) != dtype:
                optimizer.state[param][key] = value.to(mine.device, copy=True)
