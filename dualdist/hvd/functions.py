"""Parameters, optimizer state and objects from one rank to the others (horovod.torch.functions)."""

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from dualdist.collectives import broadcast_state
from dualdist.ddp.optimizer import require_whole_state
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
        job = current()
        broadcast_state.broadcast_parameters(job.base, pairs, job.job_rank(root_rank))


def _pairs(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return list(params.items())
    if isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise UsageError(f"params of type {type(params)}: expected a state_dict, named parameters or parameters")
    return [pair if isinstance(pair, tuple) else (f"{number:09}", pair) for number, pair in enumerate(params)]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank's optimizer the state and options of that of `root_rank`; every rank calls this.

    The optimizer does not step, unlike Horovod's: the weights, and the state of a fresh optimizer, do not change.
    Parameters of an optimizer without state that had no gradient have one of zeros afterwards, as in Horovod.

    Args:
        optimizer: of the same class and for as many parameters on every rank; not LBFGS.
        root_rank: a rank of the job.
        model: those of its embeddings that have sparse gradients get a sparse one.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("the state of LBFGS is not broadcast: broadcast the parameters before its first step")
    with horovods_errors():
        job = current()
        require_whole_state(optimizer, "broadcast before dd.wrap_optimizer, or load a checkpoint")
        is_fresh = not optimizer.state
        broadcast_state.broadcast_optimizer_state(job.base, optimizer, job.job_rank(root_rank))
    if is_fresh:
        _add_zero_gradients(optimizer, model)


def _add_zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    modules = [] if model is None else [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    sparse = {id(module.weight) for module in modules if module.sparse}
    for param in broadcast_state.optimizer_params(optimizer):
        if param.requires_grad and param.grad is None:
            zeros = torch.zeros_like(param)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(param) in sparse
            param.grad = zeros.to_sparse() if is_sparse else zeros


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
    name = name and f"{name}.object"  # differs from that of a tensor under way
    with horovods_errors():
        root = current().job_rank(root_rank)
        return broadcast_state.broadcast_object(member_group(process_set), obj, root, name, _dumps())


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order; objects are pickled."""
    with horovods_errors():
        return broadcast_state.allgather_object(current().base, obj, name and f"{name}.object", _dumps())


def _dumps() -> Callable[[Any], bytes]:
    """Return cloudpickle.dumps if it is installed: it pickles functions and classes of scripts and notebooks too."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return dumps
