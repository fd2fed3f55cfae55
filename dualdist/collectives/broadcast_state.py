"""Root's parameters and optimizer state on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import allgather_object, as_bytes, broadcast_object, check_same_tensors
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.group import Group
from dualdist.errors import MismatchError, UsageError
from dualdist.utils.nested_tensors import extract_tensors, insert_tensors

Parameters = torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]]


def broadcast_parameters(group: Group, params: Parameters, root: int) -> None:
    """Give every rank root's values, in place; MismatchError on every rank where names, shapes or dtypes differ."""
    place = group.group_rank_of(root)
    tensors = named_tensors(params)
    name = group.next_name("broadcast_parameters")

    def perform(line: Backend) -> None:
        check_same_tensors(line, tensors, place, f"{name}.check")
        broadcast_all(line, [tensor for _, tensor in tensors], place, name)

    run_agreed(group, "broadcast_parameters", name, {"root": root}, perform)


def named_tensors(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a module, a state_dict or named parameters, sorted by name."""
    if isinstance(params, torch.nn.Module):
        # Not the state_dict: it leaves out buffers that are not saved, and may hold what is no tensor.
        pairs = [*params.named_parameters(remove_duplicate=False), *params.named_buffers(remove_duplicate=False)]
    elif isinstance(params, Mapping):
        pairs = list(params.items())
    else:
        pairs = list(params) if isinstance(params, Iterable) else [params]
        if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
            raise UsageError(
                "broadcast_parameters takes a module, a state_dict or named parameters: pass model or "
                "model.named_parameters(), not model.parameters()"
            )
    wrong = [name for name, value in pairs if value is not None and not isinstance(value, torch.Tensor)]
    if wrong:
        raise UsageError(
            f"broadcast_parameters moves tensors only, but {wrong} are not: use dd.broadcast_object for them"
        )
    return sorted(((name, value) for name, value in pairs if value is not None), key=itemgetter(0))


def broadcast_optimizer_state(group: Group, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Give every rank root's optimizer state and hyperparameters as they are; root's own optimizer is left alone.

    Not by load_state_dict(), which would cast state to the dtype of its parameter, and put other dicts in the place of
    the parameter groups that schedulers and programs hold.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"broadcast_optimizer_state takes a torch optimizer, not a {type(optimizer).__name__}")
    place = group.group_rank_of(root)
    name = group.next_name("broadcast_optimizer_state")

    def perform(line: Backend) -> None:
        _broadcast_state(line, optimizer, place, name)

    run_agreed(group, "broadcast_optimizer_state", name, {"root": root}, perform)


def _broadcast_state(line: Backend, optimizer: torch.optim.Optimizer, root: int, name: str) -> None:
    mine = type(optimizer).__name__, [len(group["params"]) for group in optimizer.param_groups]
    kinds = allgather_object(line, mine, f"{name}.groups")
    if any(kind != kinds[0] for kind in kinds):
        raise MismatchError(
            f"the optimizers differ: class and parameters in each group, by rank: {kinds}; build the same optimizer on "
            "every rank"
        )
    tensors: list[torch.Tensor] = []
    skeleton = extract_tensors(_state_of(optimizer), tensors)
    specs = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    skeleton, specs = broadcast_object(line, (skeleton, specs), root, f"{name}.skeleton")
    if line.rank != root:
        device = _device_of(optimizer)
        tensors = [
            torch.empty(shape, dtype=dtype, device=device if kind != "cpu" else "cpu") for shape, dtype, kind in specs
        ]
    broadcast_all(line, tensors, root, name)
    if line.rank != root:
        _set_state(optimizer, *insert_tensors(skeleton, tensors))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[int, Any], dict[Any, Any]]:
    """The options of each group, the state of each parameter by its number, and any other state."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    numbered = enumerate(_parameters(optimizer))
    state = {number: optimizer.state[param] for number, param in numbered if param in optimizer.state}
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return options, state, others


def _set_state(
    optimizer: torch.optim.Optimizer,
    options: Sequence[dict[str, Any]],
    state: Mapping[int, Any],
    others: Mapping[Any, Any],
) -> None:
    """Put what _state_of() took from another rank's optimizer in the place of this one's."""
    for group, given in zip(optimizer.param_groups, options, strict=True):
        for key in group.keys() - given.keys() - {"params"}:
            del group[key]
        group.update(given)
    params = _parameters(optimizer)
    optimizer.state.clear()
    optimizer.state.update(others)
    optimizer.state.update({params[number]: _beside(params[number], value) for number, value in state.items()})


def _beside(param: torch.Tensor, value: Any) -> Any:
    """A parameter's state, on the parameter's device; what lay on the CPU, as counts of steps may, stays there."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value.to(param.device)
    if isinstance(value, dict):
        return {key: _beside(param, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_beside(param, item) for item in value])
    return value


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    devices = {p.device for group in optimizer.param_groups for p in group["params"] if p.device.type != "cpu"}
    return next(iter(devices), torch.device("cpu"))


def broadcast_all(line: Backend, tensors: Sequence[torch.Tensor], root: int, name: str) -> None:
    """Broadcast many tensors in one flat buffer for each device and dtype."""

    def kind(tensor: torch.Tensor) -> tuple[str, str]:
        return str(tensor.dtype), str(tensor.device)

    with torch.no_grad():
        for number, (_, members) in enumerate(groupby(sorted(tensors, key=kind), key=kind)):
            group = [tensor.detach() for tensor in members if tensor.numel()]
            if not group:
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            line.broadcast_(as_bytes(flat), root, f"{name}.{number}").wait()
            pieces = flat.split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [piece.view(tensor.shape) for piece, tensor in zip(pieces, group, strict=True)])
