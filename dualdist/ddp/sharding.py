"""shard=True: every rank keeps the optimizer state of its own parameters only (ZeRO stage 1, Rajbhandari et al. 2020).

Note [sharded steps]: whole parameters are assigned to ranks. Gradients are reduced as without sharding, so every rank
has all of them until the step, and clipping, loss scaling and checks need no change. For the step a rank hides the
gradients of the others' parameters, which torch's optimizers skip then; afterwards each rank sends its parameters.
In training no state is moved between ranks: a parameter keeps its owner for as long as the group exists. state_dict()
gathers all of it on every rank, and load_state_dict() keeps what this rank owns: the number of ranks may differ.

Note [cut parameters]: a parameter that is too large for one rank is cut, if the optimizer's step on a part has the bits
of that part of a step on the whole. For the step a flat view of this rank's part takes the parameter's place in the
optimizer's groups and in its state; the model keeps the parameter. So the state has the part's shape.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import as_bytes
from dualdist.backends.operation import Stages
from dualdist.collectives.broadcast_state import broadcast_nested, optimizer_params
from dualdist.collectives.group import Group
from dualdist.collectives.handle import Collective
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.collectives.tensor_utils import map_nested
from dualdist.ddp.layout import dense_strides
from dualdist.ddp.reducer import Reducer
from dualdist.errors import UsageError
from dualdist.utils.suggest import type_name

# Optimizers, by the names of their classes, whose step for one parameter depends on the others.
MIXING = frozenset({"LBFGS", "SAM", "Lamb", "FusedLAMB", "Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptLion"})
REGISTER, STEP = "register_step_pre_hook", "step"

# Optimizers that treat each element separately: Note [cut parameters]; tests/unit/test_sharding.py compares the bits.
# Classes derived from them may do something else in their steps.
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
        *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta, torch.optim.ASGD),
        torch.optim.Rprop,
    }
)
# On CPUs: a kernel rounds 16 bits once in its vectorised loop and several times at its end, which a cut would move.
EXACT = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
# Elements between which parameters are cut: whole vectors and cache lines, at which torch's fused kernels split, too.
BLOCK = 16
# Parameters are cut until no rank has more than this many times its part.
BALANCED = 1.03

Chunk = tuple[torch.device, list[list[torch.Tensor]]]  # bytes of parameters that each rank sends in one allgather
# Of a chunk on all ranks: its buffers stay in the processor's cache. And of one rank's part, where there are many.
CHUNK_BYTES, LEAST_PART_BYTES = 4 << 20, 512 << 10


def require_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if a rank cannot step on some of the parameters alone."""
    if not MIXING.isdisjoint(each.__name__ for each in type(optimizer).__mro__):
        raise UsageError(
            f"shard=True: {type_name(optimizer)} steps on all parameters together, and a rank has the state of a part: "
            "leave shard out, or take an optimizer that treats each parameter separately"
        )
    if hasattr(optimizer, "eval"):  # as in the package schedulefree
        raise UsageError(
            f"shard=True: {type_name(optimizer)} changes the parameters in eval() and train(), for which every rank "
            "needs the state of all: leave shard out"
        )


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the closure among the arguments of a step hook, of which the first is the optimizer."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


class StateSharding:
    """The parameters of one optimizer that each rank owns: Note [sharded steps]. Note [ownership] holds here, too."""

    def __init__(self, reducer: Reducer, optimizer: torch.optim.Optimizer) -> None:
        self._reducer = reducer
        self._can_cut = type(optimizer) in ELEMENTWISE and not optimizer.defaults.get("differentiable")
        # None: each rank has a part. All ranks have the state of parameters that are missing here.
        self._owners: dict[torch.Tensor, int | None] = {}
        self._loads: list[int] = []  # bytes of each rank's parameters
        self._chunks: list[Chunk] = []
        self._pointers: list[int] = []  # where the parameters of the chunks are
        self._owners_digest = ""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters with their gradients
        self._replaced: list[tuple[list[torch.Tensor], int, torch.Tensor]] = []  # in a group's parameters, at an index
        self._owners_group: Group | None = None  # the group of the owners
        self._state_group: Group | None = (
            None  # the group whose ranks have the state together; None: this rank has it all
        )
        self._is_stepping = False
        self._must_send = False  # the result of the step
        self._num_inside = 0  # steps of base classes that one step calls
        self.loads_all = False  # load_state_dict() keeps all state, until the next step

    @property
    def is_partial(self) -> bool:
        """Return True if this rank has the state of a part of the parameters only."""
        return self._state_group is not None and self._state_group.size > 1

    def attach(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Hook the sharding to the optimizer, and return a function that unhooks it."""
        self.assign()
        self._drop_others_state(optimizer)
        hide = optimizer.register_step_pre_hook(self._before_step)
        handles = [
            hide,
            optimizer.register_state_dict_post_hook(self._gather_state, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._select_state),
        ]
        reference = weakref.ref(optimizer)

        def register_before_ours(hook: Any) -> Any:
            """Register a hook that sees all gradients, as without sharding."""
            found: Any = reference()
            handle = type(found).register_step_pre_hook(found, hook)
            # Private to torch: tests/unit/test_torch_private_names.py.
            found._optimizer_step_pre_hooks.move_to_end(hide.id)
            return handle

        setattr(optimizer, REGISTER, register_before_ours)  # on this object, not on its class

        own_step = self._wrap_step(optimizer)

        def detach() -> None:
            delattr(reference(), REGISTER)
            if vars(reference())[STEP] is own_step:  # else it is in another that wraps it, and has no effect
                delattr(reference(), STEP)
            for handle in handles:
                handle.remove()

        return detach

    def _wrap_step(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        """Let step() also end where it raises, for which torch has no hook."""
        reference, function = weakref.ref(optimizer), cast(Any, optimizer.step)  # Note [ownership]
        is_method = getattr(function, "__self__", None) is optimizer
        if is_method:
            function = function.__func__

        @functools.wraps(function)
        def run(_: object, *args: Any, **kwargs: Any) -> Any:
            found: Any = reference()
            self._is_stepping, self._num_inside = True, 0
            try:
                result = function(found, *args, **kwargs) if is_method else function(*args, **kwargs)
                if (
                    self._must_send
                ):  # the step of a base class raised, so that its post hook did not run, and was caught
                    self._send_parameters(found)
                return result
            finally:
                self._is_stepping = self._must_send = False
                self.end_step(found)

        @functools.wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            return run(None, *args, **kwargs)

        vars(step)["__func__"] = run  # LRScheduler calls step.__func__ with the optimizer
        setattr(optimizer, STEP, step)  # on this object, not on its class
        return step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._num_inside += 1
        self._must_send = True
        if closure_of(args, kwargs) is None:  # else the gradients come with the closure, which hides them
            self.begin_step(optimizer)

    def assign(self) -> None:
        """Assign the parameters that the reducer has registered since the last call; alike on every rank.

        Those of the beginning together; later ones as they come, so that it does not matter when a rank calls this.
        """
        group, is_first = self._reducer.group, self._reducer.group is not self._owners_group
        if is_first:
            self._owners_group, self._loads = group, [0] * group.size
            self._owners.clear()
        known = self._reducer.registry.owned_params()
        # A parameter with gaps in its memory cannot be sent as bytes.
        new = [each for each in known if each not in self._owners and dense_strides(each) == each.stride()]
        if not new and not is_first:
            return
        for params in [new] if is_first else [[each] for each in new]:
            self._owners |= zip(params, assign_owners(params, self._loads, self._is_cuttable), strict=True)
        self._owners_digest = hashlib.sha256(repr([*self._owners.values()]).encode()).hexdigest()[:16]
        self._pointers = []

    def _is_cuttable(self, param: torch.Tensor) -> bool:
        return (
            self._can_cut
            and param.numel() >= BLOCK * self._reducer.group.size
            and type(param) in (torch.Tensor, torch.nn.Parameter)
            and (param.device.type != "cpu" or param.dtype in EXACT)
        )

    def _drop_others_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Delete the state of what other ranks own."""
        group = self._reducer.group
        if self.is_partial and self._state_group is not group:
            raise UsageError(
                "the ranks have changed, and each had a part of this optimizer's state: load a checkpoint, or call "
                "load_state_dict() with the full state on every rank"
            )
        for param, owner in self._owners.items():
            if owner is None:
                self._cut_state(param, optimizer.state.get(param, {}))
            elif owner != group.rank:
                optimizer.state.pop(param, None)
        self._state_group = group

    def _cut_state(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        """Leave this rank's part in the state of a cut parameter, which may be that already."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                state[key] = self._part(value, param).clone()

    def _part(self, tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a cut parameter, or of a tensor of its shape, in the order of its memory."""
        if tensor.stride() != param.stride():
            empty = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device)
            tensor = empty.copy_(tensor)
        group = self._reducer.group
        return tensor.as_strided((tensor.numel(),), (1,))[part_of(tensor.numel(), group.rank, group.size)]

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the step skip what other ranks own."""
        self.end_step(optimizer)
        self.assign()
        self._drop_others_state(optimizer)
        rank = self._reducer.group.rank
        for param, owner in self._owners.items():
            if param.grad is None or owner == rank:
                continue
            if owner is not None:
                self._hidden.append((param, param.grad))
                param.grad = None
            elif param.grad.is_sparse:
                raise UsageError(
                    f"shard=True has cut a parameter of shape {tuple(param.shape)}, as it is too large for one rank, "
                    "and its gradient is sparse: pass sparse=False to its nn.Embedding, or leave shard out"
                )
        if None in self._owners.values():
            self._replace_by_parts(optimizer)

    def _replace_by_parts(self, optimizer: torch.optim.Optimizer) -> None:
        """Put this rank's parts in the place of the parameters that are cut."""
        parts: dict[torch.Tensor, torch.Tensor] = {}  # one of a parameter that is there twice
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if param.grad is None or self._owners.get(param, 0) is not None:
                    continue
                if param not in parts:
                    part = parts[param] = torch.nn.Parameter(self._part(param.detach(), param))
                    part.grad = self._part(param.grad, param)
                    if param in optimizer.state:
                        optimizer.state[part] = optimizer.state.pop(param)
                self._replaced.append((group["params"], index, param))
                group["params"][index] = parts[param]

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo begin_step()."""
        for param, grad in self._hidden:
            if param.grad is None:
                param.grad = grad
        self._hidden.clear()
        for params, index, param in self._replaced:
            part, params[index] = params[index], param
            if part in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(part)
        self._replaced.clear()

    def finish_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every rank the new parameters of all owners, unless this is the base class's step inside of a step."""
        self._num_inside -= 1
        if self._is_stepping and self._num_inside > 0:
            return
        self._send_parameters(optimizer)

    def _send_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        self._must_send = False
        self.end_step(optimizer)
        if self._reducer.group.size > 1:
            name = f"{self._reducer.name}.parameters"
            self._run("step of a sharded optimizer", name, lambda backend: self._exchange(backend, name))

    def _run(self, kind: str, name: str, perform: Callable[[Backend], Any]) -> Any:
        """Run `perform` once all ranks agree on the owners."""
        request = CollectiveRequest(kind, name, {"owners": self._owners_digest})
        return Collective(self._reducer.group, request, lambda backend, _: perform(backend), self._device).run()

    @property
    def _device(self) -> torch.device:
        """The first parameter's device that is not the CPU, if there is one."""
        devices = (param.device for param in self._owners if param.device.type != "cpu")
        return next(devices, torch.device("cpu"))

    def _exchange(self, backend: Backend, name: str) -> Stages[None]:
        """Send the parameters of each rank to the others."""
        pointers = [param.data_ptr() for param in self._owners]
        if pointers != self._pointers:  # else none has moved
            self._pointers, self._chunks = pointers, _plan_chunks(self._owners, backend.size)
        others = [rank for rank in range(backend.size) if rank != backend.rank]
        buffers: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        for number, (device, pieces) in enumerate(self._chunks):
            sizes = [[piece.nbytes for piece in each] for each in pieces]
            longest = max(map(sum, sizes))
            if (device, longest) not in buffers:
                counts = longest, longest * backend.size
                buffers[device, longest] = [torch.empty(each, dtype=torch.uint8, device=device) for each in counts]
            own, gathered = buffers[device, longest]
            with torch.no_grad():
                if pieces[backend.rank]:
                    torch.cat(pieces[backend.rank], out=own[: sum(sizes[backend.rank])])
            all_parts = yield backend.allgather(own, f"{name}.{number}", gathered)
            blocks = all_parts.split(longest)
            received = [value for rank in others for value in blocks[rank][: sum(sizes[rank])].split(sizes[rank])]
            if received:
                with torch.no_grad():
                    torch._foreach_copy_([piece for rank in others for piece in pieces[rank]], received)

    def _gather_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Put the state of all ranks in a state_dict, in CPU memory; every rank calls this."""
        if not self.is_partial:
            return None
        self._drop_others_state(optimizer)
        name, rank, params = f"{self._reducer.name}.state", self._reducer.group.rank, optimizer_params(optimizer)
        # By the parameter's number in a state_dict; 0 if all ranks have its state.
        owners = {number: self._owners.get(param, 0) for number, param in enumerate(params)}
        own = {key: value for key, value in state_dict["state"].items() if owners.get(key, 0) in (rank, None)}

        def perform(backend: Backend) -> Stages[list[dict[Any, Any]]]:
            states = []
            for root in range(backend.size):
                received = yield from broadcast_nested(backend, own, root, self._device, f"{name}.{root}")
                states.append(map_nested(received, torch.Tensor, lambda value: value.to("cpu", copy=True)))
            return states

        states = self._run("state_dict of a sharded optimizer", name, perform)
        found = {key: value for each in states for key, value in each.items()}
        for number, param in enumerate(params):
            if number in found and owners[number] is None:
                found[number] = _join([each[number] for each in states], param)
        state = {number: found.pop(number) for number in sorted(number for number in found if number in owners)}
        return {**state_dict, "state": state | found}

    def _select_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Leave what this rank owns in a state_dict that is about to be loaded; all of it if the session has ended."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        if len(numbers) != len(optimizer_params(optimizer)):
            return None  # the optimizer will refuse it
        if self.loads_all or not self._reducer.group.is_usable:
            self._state_group = None
            return None
        self.assign()
        state, rank = dict(state_dict["state"]), self._reducer.group.rank
        for number, param in zip(numbers, optimizer_params(optimizer), strict=True):
            owner = self._owners.get(param, rank)
            if owner is None and number in state:
                state[number] = dict(state[number])
                self._cut_state(param, state[number])
            elif owner != rank:
                state.pop(number, None)
        self._state_group = self._reducer.group
        return {**state_dict, "state": state}


def part_of(count: int, rank: int, size: int) -> slice:
    """Return the elements of a cut parameter that a rank has."""
    blocks = -(-count // BLOCK)
    return slice(blocks * rank // size * BLOCK, min(count, blocks * (rank + 1) // size * BLOCK))


def assign_owners(
    params: Sequence[torch.Tensor], loads: list[int], is_cuttable: Callable[[torch.Tensor], bool]
) -> list[int | None]:
    """Return the rank of each parameter, None where it is cut, and add their bytes to the ranks' loads.

    The largest go first, each to the rank with the fewest bytes. If one rank has too many then, its largest parameter
    is cut and all are assigned again.
    """
    size, before = len(loads), list(loads)
    largest_first = sorted(range(len(params)), key=lambda number: -params[number].nbytes)
    owners: list[int | None] = [0] * len(params)
    while True:
        loads[:] = before
        for number in largest_first:
            param, owner = params[number], min(range(size), key=loads.__getitem__)
            if owners[number] is not None:
                owners[number] = owner
                loads[owner] += param.nbytes
                continue
            for rank in range(size):
                part = part_of(param.numel(), rank, size)
                loads[rank] += (part.stop - part.start) * param.element_size()
        heaviest = max(range(size), key=loads.__getitem__)
        largest = next((number for number in largest_first if owners[number] == heaviest), None)
        if largest is None or loads[heaviest] * size <= BALANCED * sum(loads) or not is_cuttable(params[largest]):
            return owners
        owners[largest] = None


def _join(states: Sequence[Mapping[str, Any]], param: torch.Tensor) -> dict[str, Any]:
    """Return a cut parameter's state on all ranks as that of the whole; what has no dimensions is alike on all."""
    return {
        key: torch.cat([state[key] for state in states]).as_strided(param.shape, param.stride())
        if isinstance(value, torch.Tensor) and value.dim()
        else value
        for key, value in states[0].items()
    }


def _plan_chunks(owners: Mapping[torch.Tensor, int | None], size: int) -> list[Chunk]:
    """Cut what each rank sends into the parts of chunks."""
    chunks: list[Chunk] = []
    limit = max(CHUNK_BYTES // size, LEAST_PART_BYTES)
    for device in dict.fromkeys(param.device for param in owners):
        here = [(param, owner) for param, owner in owners.items() if param.device == device]
        parts = [_cut(_own_bytes(here, rank, size), limit) for rank in range(size)]
        chunks += [(device, list(each)) for each in itertools.zip_longest(*parts, fillvalue=[])]
    return chunks


def _own_bytes(owners: Iterable[tuple[torch.Tensor, int | None]], rank: int, size: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of parameters, or of parts of them, that a rank has."""
    for param, owner in owners:
        if owner is None:
            part, width = part_of(param.numel(), rank, size), param.element_size()
            yield as_bytes(param.detach())[part.start * width : part.stop * width]
        elif owner == rank:
            yield as_bytes(param.detach())


def _cut(tensors: Iterable[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Cut bytes into lists of pieces, each but the last of `limit` bytes."""
    parts: list[list[torch.Tensor]] = []
    room = 0
    for rest in tensors:
        while len(rest):
            if room == 0:
                parts.append([])
                room = limit
            parts[-1].append(rest[:room])
            taken = len(parts[-1][-1])
            rest = rest[taken:]
            room -= taken
    return parts
