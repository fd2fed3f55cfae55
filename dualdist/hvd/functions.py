"""Parameters, optimizer state and objects from one rank to the others, by Horovod's names."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from dualdist.collectives import broadcast_state, objects
from dualdist.errors import UsageError
from dualdist.hvd.exceptions import horovods_errors
from dualdist.hvd.face import current
from dualdist.hvd.process_sets import ProcessSet, global_process_set, joined_group

T = TypeVar("T")


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor], root_rank: int
) -> None:
    """Every rank holds the values of `root_rank`, in place.

    `params` are a state_dict, named parameters, or parameters; ValueError for anything else.
    """
    pairs = _pairs(params)
    with horovods_errors():
        face = current()
        broadcast_state.broadcast_parameters(face.base, pairs, face.job_rank(root_rank))


def _pairs(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return list(params.items())
    if isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise UsageError(f"params of type {type(params)}: expected a state_dict, named parameters or parameters")
    given = list(params)
    return [
        pair if isinstance(pair, tuple) and pair[0] is not None else (f"{number:09}", _last(pair))
        for number, pair in enumerate(given)
    ]


def _last(pair: Any) -> Any:
    return pair[1] if isinstance(pair, tuple) else pair


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Every rank's optimizer has the state and options of that of `root_rank`; `model` does not matter.

    Nothing steps: weights, and the state of a fresh optimizer, stay as they are. As Horovod leaves them, parameters of
    a fresh optimizer that had no gradient have one of zeros afterwards, until the next backward or step.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("the state of LBFGS is not broadcast: broadcast the parameters before its first step")
    with horovods_errors():
        face = current()
        if not optimizer.state:
            _ZeroGradients(optimizer)
        broadcast_state.broadcast_optimizer_state(face.base, optimizer, face.job_rank(root_rank))


class _ZeroGradients:
    """Gradients that Horovod's step on a fresh optimizer left behind, for programs that look at them.

    They go before a backward adds to them, or a step uses them: else weights that no loss touches would decay, and
    sparse gradients become dense. What a program has written into one stays.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._given: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        mine = optimizer.register_step_pre_hook(self._go)  # stays: torch lets no hook go while it goes through them
        hooks = optimizer._optimizer_step_pre_hooks  # ours goes first: the wrapping's reduces
        hooks |= {number: hooks.pop(number) for number in list(hooks) if number != mine.id}
        self._hooks: list[RemovableHandle] = []
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
                self._given.append((weakref.ref(param), param.grad))
                self._hooks.append(param.register_hook(self._go))

    def _go(self, *_: Any) -> None:
        for reference, zeros in self._given:
            param = reference()
            if param is not None and param.grad is zeros and not zeros.any():
                param.grad = None
        for hook in self._hooks:
            hook.remove()
        self._given.clear()
        self._hooks.clear()


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object of `root_rank`, pickled, on every rank."""
    with horovods_errors():
        root = current().job_rank(root_rank)
        return objects.broadcast_object(joined_group(process_set), obj, root, _named(name), _dumps())


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Everybody's object, pickled, in rank order."""
    with horovods_errors():
        return objects.allgather_object(current().base, obj, _named(name), _dumps())


def _named(name: str | None) -> str | None:
    """A tensor of the same name may be under way."""
    return None if name is None else f"{name}.object"


def _dumps() -> Callable[[Any], bytes]:
    """cloudpickle's where it is installed: it takes functions and classes of a script or notebook too."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return dumps
