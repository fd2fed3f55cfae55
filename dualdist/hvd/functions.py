"""Parameters, optimizer state and objects from one rank to the others (horovod.torch.functions)."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from dualdist.collectives import broadcast_state
from dualdist.errors import UsageError
from dualdist.hvd.common import horovods_errors
from dualdist.hvd.process_sets import ProcessSet, current, global_process_set, member_group

T = TypeVar("T")


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor], root_rank: int
) -> None:
    """Copy the values of `root_rank` to every rank, in place; every rank calls this.

    Args:
        params: a state_dict, named parameters, or parameters.
        root_rank: a rank of the job.

    Raises:
        HorovodInternalError: names, shapes or dtypes differ between ranks.
        ValueError: `params` is anything else.
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
    """Give every rank's optimizer the state and options of that of `root_rank`; every rank calls this.

    The optimizer does not step: weights, and the state of a fresh optimizer, do not change. As with Horovod, parameters
    of a fresh optimizer without a gradient have one of zeros afterwards, until the next backward or step.

    Args:
        optimizer: of the same class and for as many parameters on every rank; not LBFGS.
        root_rank: a rank of the job.
        model: ignored.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("the state of LBFGS is not broadcast: broadcast the parameters before its first step")
    with horovods_errors():
        face = current()
        if not optimizer.state:
            _ZeroGradients(optimizer)
        broadcast_state.broadcast_optimizer_state(face.base, optimizer, face.job_rank(root_rank))


class _ZeroGradients:
    """The gradients of zeros that Horovod's step on a fresh optimizer leaves behind, for programs that read them.

    They are removed before a backward adds to them or a step uses them: otherwise weights that no loss touches would
    decay, and sparse gradients become dense. A gradient that the program has written to stays.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._given: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        own = optimizer.register_step_pre_hook(self._remove)  # stays: a hook cannot be removed while hooks run
        hooks = optimizer._optimizer_step_pre_hooks  # move it to the front: that of wrap_optimizer reduces
        hooks |= {number: hooks.pop(number) for number in list(hooks) if number != own.id}
        self._hooks: list[RemovableHandle] = []
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
                self._given.append((weakref.ref(param), param.grad))
                self._hooks.append(param.register_hook(self._remove))

    def _remove(self, *_: Any) -> None:
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
    """Return the object of `root_rank` on every rank; objects are pickled.

    Args:
        obj: a picklable object; ignored on the other ranks.
        root_rank: a rank of the job.
        name: identifies the call between ranks; if None, calls are numbered.
        process_set: the ranks that take part.
    """
    with horovods_errors():
        root = current().job_rank(root_rank)
        return broadcast_state.broadcast_object(member_group(process_set), obj, root, _object_name(name), _dumps())


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order; objects are pickled."""
    with horovods_errors():
        return broadcast_state.allgather_object(current().base, obj, _object_name(name), _dumps())


def _object_name(name: str | None) -> str | None:
    """Return a name that differs from that of a tensor under way."""
    return None if name is None else f"{name}.object"


def _dumps() -> Callable[[Any], bytes]:
    """Return cloudpickle.dumps if it is installed: it pickles functions and classes of scripts and notebooks too."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return dumps
