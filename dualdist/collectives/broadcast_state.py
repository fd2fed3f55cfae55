"""Objects, parameters and optimizer state from one rank to the others; an optimizer's parameters and running steps."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from dualdist.backends import control_plane
from dualdist.backends.base import Backend
from dualdist.backends.control_plane import allgather_bytes, as_bytes, check_same_tensors, unpickle
from dualdist.backends.operation import Stages
from dualdist.collectives.arguments import name_of, root_of
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.group import Group
from dualdist.collectives.handle import Collective
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.collectives.refusals import refused_alike
from dualdist.collectives.tensor_utils import (
    NAME,
    check_tensor,
    copy_to_,
    extract_tensors,
    find_tensors,
    flatten,
    insert_tensors,
    map_nested,
    named_pairs,
    own_elements,
    remember_names,
    storage_key,
)
from dualdist.errors import MismatchError, UsageError
from dualdist.utils.suggest import type_name

T = TypeVar("T")
SHOWN = 3  # names, in an error
PIECE_BYTES = 1 << 24  # small tensors are copied into buffers of this size to be broadcast
STEP_WITH_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
Dumps = Callable[[Any], bytes]
Parameters = torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]]


def broadcast_object(group: Group, obj: T, root: int, name: str | None = None, dumps: Dumps = pickle.dumps) -> T:
    """Return root's object on every rank; raise UsageError on every rank if it cannot be pickled."""
    name = name_of(group, "broadcast_object", name)
    with refused_alike(group, "broadcast_object", name):
        root, root_index = root_of(group, root)
    problem, payload = _pickle(obj, dumps) if group.rank == root_index else ("", _byte_buffer(0))

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[T]:
        nbytes, problem = rank_args[root_index]
        _require_pickled([problem], name)
        received = payload if backend.rank == root_index else _byte_buffer(nbytes)
        yield backend.broadcast_(received, root_index, f"op.{name}")
        return obj if backend.rank == root_index else unpickle(received)

    request = CollectiveRequest("broadcast_object", name, {"root": root}, (payload.numel(), problem))
    return Collective(group, request, perform).run()


def allgather_object(group: Group, obj: T, name: str | None = None, dumps: Dumps = pickle.dumps) -> list[T]:
    """Return the objects of all ranks, in rank order; raise UsageError on every rank if one cannot be pickled."""
    name = name_of(group, "allgather_object", name)
    problem, payload = _pickle(obj, dumps)

    def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[list[T]]:
        _require_pickled([problem for _, problem in rank_args], name)
        sizes = [nbytes for nbytes, _ in rank_args]
        data = yield from allgather_bytes(backend, payload, sizes, f"op.{name}")
        return [obj if rank == backend.rank else unpickle(block) for rank, block in enumerate(data.split(sizes))]

    request = CollectiveRequest("allgather_object", name, {}, (payload.numel(), problem))
    return Collective(group, request, perform).run()


def _byte_buffer(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the default device is


def _pickle(obj: object, dumps: Dumps) -> tuple[str, torch.Tensor]:
    """Return why the object cannot be pickled, or "", and its bytes."""
    try:
        data = dumps(obj)
    except Exception as error:  # of any kind: pickling runs the object's code
        return f"{type_name(obj)} does not pickle ({error})", _byte_buffer(0)
    return "", torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _require_pickled(problems: Sequence[str], name: str) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            where = f" on rank {rank}" if len(problems) > 1 else ""
            raise UsageError(f"{name}: {problem}{where}")


def broadcast_parameters(group: Group, params: Parameters, root: int) -> None:
    """Give every rank root's values, in place; raise MismatchError on every rank if names, shapes or dtypes differ."""
    name = group.next_name("broadcast_parameters")
    with refused_alike(group, "broadcast_parameters", name):
        root_index = group.group_rank_of(root)
        tensors = named_tensors(params)
        sent = _distinct(tensors)

    def perform(backend: Backend) -> Stages[None]:
        yield from check_same_tensors(backend, sent, root_index, f"{name}.check")
        dense = [tensor for _, tensor in sent if tensor.layout is torch.strided]
        yield from broadcast_all(backend, dense, root_index, name)
        sparse = [tensor for _, tensor in sent if tensor.layout is not torch.strided]
        if sparse:
            found = yield from broadcast_nested(backend, sparse, root_index, sparse[0].device, f"{name}.sparse")
            for tensor, values in zip(sparse, found, strict=True):
                if backend.rank != root_index:
                    tensor.resize_as_sparse_(values).copy_(values)

    remember_names(tensors)
    run_agreed(group, "broadcast_parameters", name, {"root": root}, perform)


def _distinct(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return what is sent of the tensors: tied ones once, and the elements of expanded ones once.

    The names say so, since all ranks must send the same.
    """
    found: dict[object, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        is_sparse = check_tensor(tensor, name, takes_sparse=True).layout is not torch.strided
        own = tensor.detach() if is_sparse else own_elements(tensor)
        check_tensor(own, name, is_written=True, takes_sparse=True)
        if is_sparse:
            name = f"{name} of layout {tensor.layout}"
        elif own.shape != tensor.shape:
            name = f"{name} expanded from"
        key = storage_key(tensor)
        found[key] = (f"{found[key][0]}, tied to {name}", own) if key in found else (name, own)
    return [*found.values()]


def named_tensors(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a module, a state_dict or named parameters, sorted by name."""
    if isinstance(params, torch.nn.Module):
        # Not the state_dict, which lacks non-persistent buffers and may hold values that are no tensors.
        pairs = [*params.named_parameters(remove_duplicate=False), *params.named_buffers(remove_duplicate=False)]
    else:
        pairs = named_pairs(params, "broadcast_parameters")
    wrong = [name for name, value in pairs if value is not None and not isinstance(value, torch.Tensor)]
    if wrong:
        raise UsageError(
            f"broadcast_parameters moves tensors only, but {wrong} are not: use dd.broadcast_object for them"
        )
    return sorted(((name, value) for name, value in pairs if value is not None), key=itemgetter(0))


def broadcast_optimizer_state(group: Group, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Give every rank root's optimizer state and hyperparameters unchanged; root's optimizer is not touched.

    load_state_dict() would cast state to the dtype of its parameter, and replace the dicts of the parameter groups,
    which schedulers and programs hold.
    """
    name = group.next_name("broadcast_optimizer_state")
    with refused_alike(group, "broadcast_optimizer_state", name):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"broadcast_optimizer_state takes a torch optimizer, not {type_name(optimizer)}")
        root_index = group.group_rank_of(root)
        for part, tensor in find_tensors(_state_of(optimizer)[1:]):
            check_tensor(tensor, f"state {part}", takes_sparse=True)
    broadcast = partial(_broadcast_state, optimizer, root_index, name)
    run_agreed(group, "broadcast_optimizer_state", name, {"root": root}, broadcast)


def _broadcast_state(optimizer: torch.optim.Optimizer, root: int, name: str, backend: Backend) -> Stages[None]:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    layout = type(optimizer).__name__, sizes, sorted(name for name, _ in named_optimizer_params(optimizer))
    layouts = yield from control_plane.gather_unless_equal(backend, layout, f"{name}.groups")
    if layouts:
        raise MismatchError(
            "the optimizers differ: class, parameters in each group and their names, by rank: "
            f"{[(*first, names[:SHOWN]) for *first, names in layouts]}; build the same optimizer on every rank"
        )
    devices = (param.device for param in optimizer_params(optimizer) if param.device.type != "cpu")
    state = yield from broadcast_nested(backend, _state_of(optimizer), root, next(devices, torch.device("cpu")), name)
    if backend.rank != root:
        _set_state(optimizer, *state)


def broadcast_nested(backend: Backend, value: T, root: int, device: torch.device, name: str) -> Stages[T]:
    """Return root's structure of tensors and plain data on every rank, its tensors on the CPU or on this device."""
    tensors: list[torch.Tensor] = []
    skeleton = extract_tensors(value, tensors)
    specs = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    skeleton, specs = yield from control_plane.broadcast_object(backend, (skeleton, specs), root, f"{name}.skeleton")
    if backend.rank == root:  # from one GPU, as the others receive, so that all ranks make the same broadcasts
        tensors = [tensor if tensor.device.type == "cpu" else tensor.to(device) for tensor in tensors]
    else:
        tensors = [
            torch.empty(shape, dtype=dtype, device=device if kind != "cpu" else "cpu") for shape, dtype, kind in specs
        ]
    yield from broadcast_all(backend, tensors, root, name)
    found: T = insert_tensors(skeleton, tensors)
    return found


def optimizer_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def named_optimizer_params(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str] = MappingProxyType({})
) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters with their names; [] if it was deleted.

    A parameter that has no name, or that of another one, is named by its position in the groups.
    """
    found = [
        (f"group {group_number}, parameter {number}", names.get(id(param)) or getattr(param, NAME, None), param)
        for group_number, group in enumerate(optimizer.param_groups if optimizer is not None else [])
        for number, param in enumerate(group["params"])
    ]
    counts = Counter(name for _, name, _ in found)
    return [(name if name and counts[name] == 1 else position, param) for position, name, param in found]


def count_running_steps(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps of the optimizer are inside of each other, as one that calls its base class's."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code is STEP_WITH_HOOKS and frame.f_locals["self"] is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return count


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any], dict[Any, Any]]:
    """Return the options of each group, the state of each parameter by its name, and any other state."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    named = named_optimizer_params(optimizer)
    state = {name: optimizer.state[param] for name, param in named if param in optimizer.state}
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return options, state, others


def _set_state(
    optimizer: torch.optim.Optimizer,
    options: Sequence[dict[str, Any]],
    state: Mapping[str, Any],
    others: Mapping[Any, Any],
) -> None:
    """Set what _state_of() returned on another rank."""
    for group, given in zip(optimizer.param_groups, options, strict=True):
        for key in group.keys() - given.keys() - {"params"}:
            del group[key]
        group.update(given)
    params = dict(named_optimizer_params(optimizer))
    optimizer.state.clear()
    optimizer.state.update(others)
    optimizer.state.update({params[name]: _move_to(params[name].device, value) for name, value in state.items()})


def _move_to(device: torch.device, state: Any) -> Any:
    """Return a parameter's state on a device; what was on the CPU, such as step counts, stays there."""
    return map_nested(state, torch.Tensor, lambda each: each if each.device.type == "cpu" else each.to(device))


def broadcast_all(backend: Backend, tensors: Sequence[torch.Tensor], root: int, name: str) -> Stages[None]:
    """Broadcast many tensors, small ones together in a buffer, large ones where they are; root's are not written."""
    for number, piece in enumerate(_pieces(tensors)):
        flat = flatten(piece)
        yield backend.broadcast_(as_bytes(flat), root, f"{name}.{number}")
        if backend.rank != root:
            for tensor, values in zip(piece, flat.split([tensor.numel() for tensor in piece]), strict=True):
                copy_to_(tensor, values)


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in pieces of one device and dtype and of PIECE_BYTES or one tensor, the same on all ranks."""

    def kind(tensor: torch.Tensor) -> tuple[str, str]:
        return str(tensor.dtype), str(tensor.device)

    for _, members in groupby(sorted(tensors, key=kind), key=kind):
        piece: list[torch.Tensor] = []
        nbytes = 0
        for tensor in members:
            if piece and nbytes + tensor.nbytes > PIECE_BYTES:
                yield piece
                piece, nbytes = [], 0
            if tensor.numel():
                piece.append(tensor.detach())
                nbytes += tensor.nbytes
        if piece:
            yield piece
