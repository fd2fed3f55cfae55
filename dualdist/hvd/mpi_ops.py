"""Horovod's collectives by its names and signatures (horovod.torch.mpi_ops), over dualdist's collectives."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar, cast

import torch

from dualdist.backends.arithmetic import INTEGERS, Op
from dualdist.collectives import collectives, fast_allreduce, traced_allreduce
from dualdist.collectives.arguments import as_list
from dualdist.collectives.dynamo import disable_compile
from dualdist.collectives.group import Group
from dualdist.collectives.handle import Collective
from dualdist.ddp.join import join as join_group
from dualdist.errors import UsageError
from dualdist.hvd import basics
from dualdist.hvd.basics import cross_rank as cross_rank
from dualdist.hvd.basics import cross_size as cross_size
from dualdist.hvd.basics import cuda_built as cuda_built
from dualdist.hvd.basics import gloo_enabled as gloo_enabled
from dualdist.hvd.basics import is_homogeneous as is_homogeneous
from dualdist.hvd.basics import is_initialized as is_initialized
from dualdist.hvd.basics import local_rank as local_rank
from dualdist.hvd.basics import local_size as local_size
from dualdist.hvd.basics import mpi_enabled as mpi_enabled
from dualdist.hvd.basics import mpi_threads_supported as mpi_threads_supported
from dualdist.hvd.basics import rank as rank
from dualdist.hvd.basics import rocm_built as rocm_built
from dualdist.hvd.basics import size as size
from dualdist.hvd.basics import start_timeline as start_timeline
from dualdist.hvd.basics import stop_timeline as stop_timeline
from dualdist.hvd.common import HorovodInternalError, get_average_backwards_compatibility_fun, horovods_errors
from dualdist.hvd.common import ccl_built as ccl_built
from dualdist.hvd.common import ddl_built as ddl_built
from dualdist.hvd.common import gloo_built as gloo_built
from dualdist.hvd.common import mpi_built as mpi_built
from dualdist.hvd.common import nccl_built as nccl_built
from dualdist.hvd.compression import Compression, Compressor
from dualdist.hvd.process_sets import ProcessSet as ProcessSet
from dualdist.hvd.process_sets import add_process_set as add_process_set
from dualdist.hvd.process_sets import current, global_process_set, member_group
from dualdist.hvd.process_sets import remove_process_set as remove_process_set
from dualdist.session import find_group

Average, Sum, Adasum, Min, Max, Product = range(6)
OPS: dict[int, Op] = {Average: "mean", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
Tensors = Sequence[torch.Tensor]
Given = TypeVar("Given", torch.Tensor, list[torch.Tensor])
Arguments = tuple[Group, Given, Op, "str | None", float, float]

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(
    SimpleNamespace(Average=Average, Sum=Sum)
)
_allreduce_operator: Callable[..., torch.Tensor]


def __getattr__(name: str) -> Any:
    """Define the operator of allreduce when something is compiled, because that takes milliseconds."""
    if name != "_allreduce_operator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    operator = traced_allreduce.define_allreduce("dualdist::horovod_allreduce", find_group, horovods_errors)
    globals()[name] = operator
    return operator


def _public(function: F, unless: Callable[..., Any] | None = None) -> F:
    """Raise Horovod's errors, and keep torch.compile out unless `unless` traces the call."""
    converted: F = horovods_errors()(function)
    return disable_compile(converted, unless)


def _like(model: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Make a function public with the parameters of `model`, for type checkers and help()."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        public: Any = _public(function)
        returns = inspect.signature(function).return_annotation
        public.__signature__ = inspect.signature(model).replace(return_annotation=returns)
        return cast(Callable[P, R], public)

    return decorate


@horovods_errors()
def init(*args: Any, **kwargs: Any) -> None:
    """Join the job: init(comm=None, process_sets=None), see dualdist.hvd.basics.init."""
    basics.init(*args, **kwargs)


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Leave the job; init() may follow."""
    basics.shutdown(*args, **kwargs)


def require_adasum(process_set: ProcessSet) -> None:
    """Raise NotImplementedError where Horovod 0.28.1 has no Adasum."""
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum works on all ranks, not on other process sets")
    if size() & (size() - 1):
        raise NotImplementedError(f"Adasum pairs the ranks: their number is a power of two, not {size()}")


def _arguments(
    tensors: Given, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet
) -> Arguments[Given]:
    """Return the arguments of dualdist's reductions.

    Horovod averages integers too: the sum, divided in float64 and truncated.
    """
    group = member_group(process_set)
    if op not in OPS:
        raise UsageError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product")
    if op == Adasum:
        require_adasum(process_set)
    given = tensors if isinstance(tensors, list) else [tensors]
    are_integers = {tensor.dtype in INTEGERS for tensor in given if isinstance(tensor, torch.Tensor)}
    if op != Average or True not in are_integers:
        return group, tensors, OPS[op], name, prescale, postscale
    if len(are_integers) > 1:
        what = "the tensors" if name is None else repr(name)
        raise UsageError(f"{what}: integers and floats are averaged in different ways: reduce them in two calls")
    return group, tensors, "integer mean", name, prescale, postscale


def _reduction(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Arguments[torch.Tensor]:
    op = handle_average_backwards_compatibility(op, average)
    return _arguments(tensor, op, name, prescale_factor, postscale_factor, process_set)


def _grouped_reduction(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Arguments[list[torch.Tensor]]:
    op = handle_average_backwards_compatibility(op, average)
    return _arguments(as_list(tensors), op, name, prescale_factor, postscale_factor, process_set)


def start(collective: Collective[Any]) -> int:
    """Begin a collective and return its number, for poll() and synchronize()."""
    session = current()
    number = next(session.numbers)
    session.pending[number] = collective.start()
    return number


def poll(handle: int) -> bool:
    """Return True if synchronize() would return at once.

    Args:
        handle: the number that a function with `_async` in its name returned.

    Raises:
        ValueError: there is no such collective under way, or it was synchronized.
    """
    pending = current().pending
    if handle not in pending:
        raise UsageError(f"handle {handle} is of no operation under way: was it synchronized already?")
    return pending[handle].done()


@_public
def synchronize(handle: int) -> Any:
    """Wait for a collective and return its result, or None if there is no such collective under way.

    Args:
        handle: the number that a function with `_async` in its name returned.

    Raises:
        HorovodInternalError: the collective failed.
    """
    found = current().pending.pop(handle, None)
    return None if found is None else found.wait()


def _trace_allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    *others: Any,
    **options: Any,
) -> torch.Tensor | None:
    """Trace an allreduce for torch.compile; return None if it cannot follow."""
    from dualdist.hvd.mpi_ops import _allreduce_operator  # torch.compile runs an import while it traces

    if average is not None or compression is not Compression.none:
        return None
    return traced_allreduce.trace(_allreduce_operator, *_reduction(tensor, None, name, *others, **options))


@partial(_public, unless=_trace_allreduce)
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the process set into a new tensor; gradients flow through Average and Sum.

    Every rank of the process set calls this, as all functions here.

    Args:
        tensor: of the same shape and dtype on every rank.
        average: deprecated: True for op=Average, False for op=Sum.
        name: identifies the call between ranks; if None, calls are numbered.
        compression: how the tensor is sent, one of `Compression`.
        op: Average (the default; of integers truncated), Sum, Adasum, Min, Max or Product.
        prescale_factor: the tensor is multiplied by this before the reduction.
        postscale_factor: the result is multiplied by this.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: the ranks passed different arguments, a rank is missing, or this rank is not in the set.
        ValueError: an argument is invalid.
    """
    sent, ctx = compression.compress(tensor)
    arguments = _reduction(sent, average, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(fast_allreduce.allreduce(*arguments), ctx)


@_like(_reduction)
def allreduce_(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Reduce a tensor over the process set in place, and return it; arguments as of allreduce()."""
    return fast_allreduce.allreduce(*_reduction(*args, **kwargs), in_place=True)


@_public
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors, all of them or none; the other arguments as of allreduce()."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in pairs]
    arguments = _grouped_reduction(sent, average, name, op, prescale_factor, postscale_factor, process_set)
    found = collectives.allreduce(*arguments).run()
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, pairs, strict=True)]


@_like(_grouped_reduction)
def grouped_allreduce_(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in place, all of them or none; arguments as of allreduce()."""
    return tuple(collectives.allreduce(*_grouped_reduction(*args, **kwargs), in_place=True).run())


@_public
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to reduce a sparse COO tensor by Average or Sum; return a function that waits for the result."""
    arguments = _arguments(tensor, op, name, 1.0, 1.0, process_set)
    return horovods_errors()(collectives.sparse_allreduce(*arguments).start().wait)


def _row_reduction(
    tensor: Given,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Arguments[Given]:
    if op == Adasum:
        raise HorovodInternalError("Adasum looks at whole tensors, and reducescatter only at shares: use allreduce")
    return _arguments(tensor, op, name, prescale_factor, postscale_factor, process_set)


def _grouped_row_reduction(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Arguments[list[torch.Tensor]]:
    return _row_reduction(as_list(tensors), name, op, process_set, prescale_factor, postscale_factor)


@_public
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's share of the rows of the reduction; gradients flow through it. Arguments as of allreduce()."""
    sent, ctx = compression.compress(tensor)
    arguments = _row_reduction(sent, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(collectives.reducescatter(*arguments).run(), ctx)


@_public
def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's share of the reduction of each tensor, all of them or none; arguments as of allreduce()."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in pairs]
    arguments = _row_reduction(sent, name, op, process_set, prescale_factor, postscale_factor)
    found = collectives.reducescatter(*arguments).run()
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, pairs, strict=True)]


def _rows(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Group, torch.Tensor, str | None]:
    return member_group(process_set), tensor, name


def _grouped_rows(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Group, list[torch.Tensor], str | None]:
    return member_group(process_set), as_list(tensors), name


@_like(_rows)
def allgather(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Concatenate the rows of all ranks, in rank order: (n, *s) -> (sum of all n, *s); gradients flow through it."""
    return collectives.allgather(*_rows(*args, **kwargs)).run()


@_like(_grouped_rows)
def grouped_allgather(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Gather several tensors, all of them or none; gradients flow through it."""
    return tuple(collectives.allgather(*_grouped_rows(*args, **kwargs)).run())


def _broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Group, torch.Tensor, int, str | None]:
    return member_group(process_set), tensor, current().job_rank(root_rank), name


@_like(_broadcast)
def broadcast(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a new tensor with the values of `root_rank`, a rank of the job; gradients flow through it."""
    return collectives.broadcast(*_broadcast(*args, **kwargs)).run()


@_like(_broadcast)
def broadcast_(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Copy the values of `root_rank`, a rank of the job, to every rank in place, and return the tensor."""
    return collectives.broadcast(*_broadcast(*args, **kwargs), in_place=True).run()


def _shares(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Group, torch.Tensor, Sequence[int] | torch.Tensor | None, str | None]:
    return member_group(process_set), tensor, splits, name


@_like(_shares)
def alltoall(*args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send the next splits[i] rows to rank i, or equal parts, and return the rows that came; gradients flow through it.

    With `splits` the result is a pair of the rows and of how many came from each rank.
    """
    arguments = _shares(*args, **kwargs)
    found = collectives.alltoall(*arguments).run()
    return found[0] if arguments[2] is None else found


def _begin(name: str, describe: Callable[..., Collective[Any]], arguments: Callable[P, Any]) -> Callable[P, int]:
    """Return the function `name`, with the parameters of `arguments`; a group's result is a tuple."""
    options = {"in_place": True} if name.endswith("_") else {}

    def begin(*args: Any, **kwargs: Any) -> int:
        collective = describe(*arguments(*args, **kwargs), **options)
        return start(collective.map(tuple) if name.startswith("grouped_") else collective)

    begin.__name__ = begin.__qualname__ = name
    begin.__doc__ = f"Begin {name.replace('_async', '')}() and return a handle for synchronize()."
    return _like(arguments)(begin)


allreduce_async = _begin("allreduce_async", collectives.allreduce, _reduction)
allreduce_async_ = _begin("allreduce_async_", collectives.allreduce, _reduction)
grouped_allreduce_async = _begin("grouped_allreduce_async", collectives.allreduce, _grouped_reduction)
grouped_allreduce_async_ = _begin("grouped_allreduce_async_", collectives.allreduce, _grouped_reduction)
reducescatter_async = _begin("reducescatter_async", collectives.reducescatter, _row_reduction)
grouped_reducescatter_async = _begin("grouped_reducescatter_async", collectives.reducescatter, _grouped_row_reduction)
allgather_async = _begin("allgather_async", collectives.allgather, _rows)
grouped_allgather_async = _begin("grouped_allgather_async", collectives.allgather, _grouped_rows)
broadcast_async = _begin("broadcast_async", collectives.broadcast, _broadcast)
broadcast_async_ = _begin("broadcast_async_", collectives.broadcast, _broadcast)
alltoall_async = _begin("alltoall_async", collectives.alltoall, _shares)


@_public
def join(device: int = -1) -> int:
    """Contribute zeros to the other ranks' allreduces until all ranks have called this; return the last one.

    What this rank has begun is finished first, so the others must begin that before they need this rank to join.

    Args:
        device: ignored.
    """
    base = current().base
    return base.ranks.index(join_group(base))


@_public
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called this."""
    group = member_group(process_set)
    collectives.barrier(group)
    # Once more, so that ranks leave within one message of each other: scripts measure times from barrier to barrier.
    collectives.barrier(group)
