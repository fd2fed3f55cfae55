"""shard=True: every rank keeps the optimizer state of its own parameters only (ZeRO stage 1, Rajbhandari et al. 2020).

Note [sharded steps]: whole parameters are assigned to ranks. Gradients are reduced as without sharding, so every rank
has all of them until the step, and clipping, loss scaling and checks need no change. For the step a rank hides the
gradients of the others' parameters, which torch's optimizers skip then; afterwards each rank sends its parameters.
State is never moved between ranks: a parameter keeps its owner for as long as the group exists.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import as_bytes
from dualdist.collectives.broadcast_state import broadcast_nested
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.collectives.nested_tensors import map_nested
from dualdist.collectives.work import Collective
from dualdist.ddp.adasum import closure_of
from dualdist.ddp.bucket_plan import dense_strides
from dualdist.errors import UsageError
from dualdist.utils.suggest import type_name

if TYPE_CHECKING:
    from dualdist.collectives.group import Group
    from dualdist.ddp.reducer import Reducer

T = TypeVar("T")

# Optimizers, by the names of their classes, whose step for one parameter depends on the others.
MIXING = frozenset({"LBFGS", "SAM", "Lamb", "FusedLAMB", "Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptLion"})
REGISTER = "register_step_pre_hook"
STEP_WITH_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__

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


class StateSharding:
    """The parameters of one optimizer that each rank owns: Note [sharded steps]. Note [ownership] holds here, too."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._owners: dict[torch.Tensor, int] = {}  # all ranks have the state of parameters that are missing here
        self._loads: list[int] = []  # bytes of each rank's parameters
        self._chunks: list[Chunk] = []
        self._pointers: list[int] = []  # where the parameters of the chunks are
        self._owners_digest = ""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters with their gradients
        self._assigned_in: Group | None = None  # the group of the owners
        self._state_in: Group | None = None  # the group whose ranks have the state together; None: this rank has it all
        self._loads_all = False

    @property
    def is_partial(self) -> bool:
        """Return True if this rank has the state of a part of the parameters only."""
        return self._state_in is not None

    def _whole_group(self) -> Group | None:
        """Return the group whose ranks have the state together from now on."""
        return self._reducer.group if self._reducer.group.size > 1 else None

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

        def detach() -> None:
            delattr(reference(), REGISTER)
            for handle in handles:
                handle.remove()

        return detach

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is None:  # else the gradients come with the closure, which hides them
            self.hide_gradients(optimizer)

    def assign(self) -> None:
        """Assign the parameters that the reducer has registered since the last call; alike on every rank.

        Those of the beginning largest first, and each to the rank with the fewest bytes; later ones as they come, so
        that it does not matter when a rank calls this.
        """
        group, is_first = self._reducer.group, self._reducer.group is not self._assigned_in
        if is_first:
            self._assigned_in, self._loads = group, [0] * group.size
            self._owners.clear()
        new = [each for each in self._reducer.registered_params() if each not in self._owners and _is_dense(each)]
        if not new and not is_first:
            return
        for param in sorted(new, key=lambda each: -each.nbytes) if is_first else new:
            owner = min(range(group.size), key=self._loads.__getitem__)
            self._owners[param] = owner
            self._loads[owner] += param.nbytes
        self._owners_digest = hashlib.sha256(repr([*self._owners.values()]).encode()).hexdigest()[:16]
        self._pointers = []

    def _drop_others_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Delete the state of the parameters that other ranks own."""
        group = self._reducer.group
        if self._state_in not in (None, group):
            raise UsageError(
                "the ranks have changed, and each had a part of this optimizer's state: load a checkpoint, or call "
                "load_state_dict() with the full state on every rank"
            )
        for param, owner in self._owners.items():
            if owner != group.rank:
                optimizer.state.pop(param, None)
        self._state_in = self._whole_group()

    def hide_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the step skip the parameters that other ranks own."""
        self.assign()
        self._drop_others_state(optimizer)
        rank = self._reducer.group.rank
        for param, owner in self._owners.items():
            if owner != rank and param.grad is not None:
                self._hidden.append((param, param.grad))
                param.grad = None

    def show_gradients(self) -> None:
        """Undo hide_gradients(), also after a step that raised."""
        for param, grad in self._hidden:
            if param.grad is None:
                param.grad = grad
        self._hidden.clear()

    def finish_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every rank the new parameters of all owners, unless this is the base class's step inside of a step."""
        if _count_running_steps(optimizer) > 1:
            return
        self.show_gradients()
        if self._reducer.group.size > 1:
            name = f"{self._reducer.name}.parameters"
            self._run("step of a sharded optimizer", name, lambda backend: self._exchange(backend, name))

    def _run(self, kind: str, name: str, perform: Callable[[Backend], T]) -> T:
        """Run `perform` once all ranks agree on the owners."""
        request = CollectiveRequest(kind, name, {"owners": self._owners_digest})
        return Collective(self._reducer.group, request, lambda backend, _: perform(backend), self._device).run()

    @property
    def _device(self) -> torch.device:
        """The first parameter's device that is not the CPU, if there is one."""
        devices = (param.device for param in self._owners if param.device.type != "cpu")
        return next(devices, torch.device("cpu"))

    @torch.no_grad()
    def _exchange(self, backend: Backend, name: str) -> None:
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
            if pieces[backend.rank]:
                torch.cat(pieces[backend.rank], out=own[: sum(sizes[backend.rank])])
            blocks = backend.allgather(own, f"{name}.{number}", gathered).wait().split(longest)
            received = [value for rank in others for value in blocks[rank][: sum(sizes[rank])].split(sizes[rank])]
            if received:
                torch._foreach_copy_([piece for rank in others for piece in pieces[rank]], received)

    def _gather_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Put the state of all ranks in a state_dict, in CPU memory; every rank calls this."""
        if not self.is_partial:
            return None
        self._drop_others_state(optimizer)
        name, owners = f"{self._reducer.name}.state", self._owners_by_number(optimizer)
        rank = self._reducer.group.rank
        own = {key: value for key, value in state_dict["state"].items() if owners.get(key, 0) == rank}

        def perform(backend: Backend) -> dict[Any, Any]:
            found: dict[Any, Any] = {}
            for root in range(backend.size):
                part = broadcast_nested(backend, own, root, self._device, f"{name}.{root}")
                found |= map_nested(part, torch.Tensor, lambda each: each.to("cpu", copy=True))
            return found

        found = self._run("state_dict of a sharded optimizer", name, perform)
        state = {number: found.pop(number) for number in sorted(number for number in found if number in owners)}
        return {**state_dict, "state": state | found}

    def _select_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Leave what this rank owns in a state_dict that is about to be loaded; all of it if the session has ended."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        if len(numbers) != len(_params(optimizer)):
            return None  # the optimizer will refuse it
        if self._loads_all or not self._reducer.group.is_usable:
            self._state_in = None
            return None
        self.assign()
        rank = self._reducer.group.rank
        others = {
            number
            for number, param in zip(numbers, _params(optimizer), strict=True)
            if self._owners.get(param, rank) != rank
        }
        self._state_in = self._whole_group()
        return {**state_dict, "state": {key: value for key, value in state_dict["state"].items() if key not in others}}

    @contextlib.contextmanager
    def loading_all(self) -> Iterator[None]:
        """In the block load_state_dict() keeps all state, until the next step."""
        self._loads_all = True
        try:
            yield
        finally:
            self._loads_all = False

    def _owners_by_number(self, optimizer: torch.optim.Optimizer) -> dict[Any, int]:
        """Return the owner of each parameter's state by the parameter's number in a state_dict; 0 if all have it."""
        return {number: self._owners.get(param, 0) for number, param in enumerate(_params(optimizer))}


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_dense(param: torch.Tensor) -> bool:
    """Return True if the parameter's memory has no gaps, so that its bytes can be sent."""
    return dense_strides(param) == param.stride()


def _plan_chunks(owners: Mapping[torch.Tensor, int], size: int) -> list[Chunk]:
    """Cut what each rank sends into the parts of chunks."""
    chunks: list[Chunk] = []
    limit = max(CHUNK_BYTES // size, LEAST_PART_BYTES)
    for device in dict.fromkeys(param.device for param in owners):
        here = [(param, owner) for param, owner in owners.items() if param.device == device]
        parts = [_cut([param for param, owner in here if owner == rank], limit) for rank in range(size)]
        chunks += [(device, list(each)) for each in itertools.zip_longest(*parts, fillvalue=[])]
    return chunks


def _cut(params: Sequence[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Cut the parameters' bytes into lists of pieces, each but the last of `limit` bytes."""
    parts: list[list[torch.Tensor]] = []
    room = 0
    for param in params:
        rest = as_bytes(param.detach())
        while len(rest):
            if room == 0:
                parts.append([])
                room = limit
            parts[-1].append(rest[:room])
            rest, room = rest[room:], max(0, room - len(rest))
    return parts


def _count_running_steps(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps of the optimizer are inside of each other, as one that calls its base class's."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code is STEP_WITH_HOOKS and frame.f_locals["self"] is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return count
