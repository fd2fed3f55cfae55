"""The functions that a training script calls: each finds the open session and hands over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from dualdist import session
from dualdist.compiling import uncompiled

if TYPE_CHECKING:
    import torch

    from dualdist.buckets import GradientOp
    from dualdist.compression import Compressor
    from dualdist.group import Group, Handle
    from dualdist.reductions import Op

T = TypeVar("T")
OptimizerT = TypeVar("OptimizerT", bound="torch.optim.Optimizer")


def init(backend: str | None = None, *, timeout_s: float = 300) -> None:
    """Join the job: every rank calls this once, before anything else here, and returns when all ranks are there.

    `backend` is "native" (torch.distributed), "horovod" or "auto"; None takes DUALDIST_BACKEND, else "auto": Horovod
    under horovodrun, and under mpirun where Horovod was built with MPI; else native; a process that no launcher started
    is a job of one, which touches no network. `timeout_s` limits this call and every later wait for another rank, in
    seconds.

    Native sets up torch.distributed's default process group, so that DistributedDataParallel and its kin work beside
    dualdist; a group that is there already is used, and left alone at shutdown.

    Errors: TopologyError (the launcher's variables are wrong, or the ranks contradict each other),
    BackendUnavailableError, UnsupportedError (this launcher cannot start that backend), RendezvousError (ranks missing
    within the timeout), AlreadyInitializedError, UsageError.
    """
    session.init(backend, timeout_s=timeout_s)


def shutdown() -> None:
    """Leave the job: every rank calls this when nothing is under way. init() may follow again."""
    session.shutdown()


def is_initialized() -> bool:
    """Whether this process is between init() and shutdown()."""
    return session.is_open()


def rank() -> int:
    """0 <= rank < size; unique in the job."""
    return session.current().topology.rank


def size() -> int:
    """The number of ranks in the job."""
    return session.current().topology.size


def local_rank() -> int:
    """0 <= local_rank < local_size; unique on this node."""
    return session.current().topology.local_rank


def local_size() -> int:
    """The number of ranks on this node, which may differ from node to node."""
    return session.current().topology.local_size


def node() -> int:
    """0 <= node < nodes; the same for all ranks of a node."""
    return session.current().topology.node


def nodes() -> int:
    """The number of nodes that have ranks."""
    return session.current().topology.nodes


def backend() -> str:
    """What moves the tensors: "native", "horovod", or "single" in a job of one that no launcher started."""
    return session.current().backend.name


def transport() -> str:
    """What carries tensors of this rank's device: "gloo", "nccl", "mpi", or "none" where nothing has to move."""
    return session.current().backend.transport


def launcher() -> str:
    """What started the ranks: "torchrun", "horovodrun", "mpirun", "srun", "spawn", "none" and others."""
    return session.current().topology.launcher


def device() -> torch.device:
    """This rank's GPU, which init() made the current one, or the CPU where there is none."""
    return session.current().device


def _traced_allreduce(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> torch.Tensor | None:
    """What torch.compile follows in place of allreduce, if it can."""
    from dualdist.reductions import is_traceable, traced_allreduce

    backend = _group(group).backend
    if async_op or not is_traceable(backend, tensor, op, (prescale, postscale)):
        return None
    return traced_allreduce(backend, tensor, op, prescale, postscale)


@overload
def allreduce(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def allreduce(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[torch.Tensor]: ...
@partial(uncompiled, unless=_traced_allreduce)
def allreduce(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """A new tensor with the reduction of each element over all ranks; every rank passes the same shape and dtype.

    `op` is "mean" (the sum, then divided by the number of ranks; floating point only), "sum", "min", "max", "product",
    or "adasum" (Maleki et al., MLSys 2021; the number of ranks is a power of two). Any dtype of numbers will do; of
    booleans "sum" and "max" are "or", "product" and "min" are "and". The tensor is multiplied by `prescale` before, the
    result by `postscale` after. A sparse COO tensor gives the coalesced sum or mean.

    With async_op=True returns a Handle at once, whose wait() gives the tensor; the caller leaves `tensor` alone until
    then. Operations of other names may come in between, on each rank in another order. Else gradients flow back
    through "mean" and "sum": the same reduction of the ranks' gradients.

    MismatchError on every rank where shapes, dtypes, operations or names differ."""
    from dualdist import collectives, differentiable

    if not async_op and differentiable.wants_gradient([tensor]):
        return differentiable.allreduce(_group(group), tensor, op, name, prescale, postscale)
    return _now_or_later(collectives.allreduce(_group(group), tensor, op, name, prescale, postscale), async_op)


@overload
def allreduce_(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def allreduce_(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[torch.Tensor]: ...
@uncompiled
def allreduce_(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """allreduce in place: `tensor` itself holds the reduction afterwards, and is returned; no gradient flows."""
    from dualdist import collectives

    return _now_or_later(collectives.allreduce_(_group(group), tensor, op, name, prescale, postscale), async_op)


@overload
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> list[torch.Tensor]: ...
@overload
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[list[torch.Tensor]]: ...
@uncompiled
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> list[torch.Tensor] | Handle[list[torch.Tensor]]:
    """allreduce of each tensor, all of them or none, in one message for each dtype."""
    from dualdist import collectives, differentiable

    if not async_op and differentiable.wants_gradient(tensors):
        return differentiable.grouped_allreduce(_group(group), tensors, op, name, prescale, postscale)
    return _now_or_later(collectives.grouped_allreduce(_group(group), tensors, op, name, prescale, postscale), async_op)


@overload
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> list[torch.Tensor]: ...
@overload
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[list[torch.Tensor]]: ...
@uncompiled
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> list[torch.Tensor] | Handle[list[torch.Tensor]]:
    """grouped_allreduce in place: the tensors themselves hold the reductions afterwards."""
    from dualdist import collectives

    return _now_or_later(
        collectives.grouped_allreduce_(_group(group), tensors, op, name, prescale, postscale), async_op
    )


@overload
def allgather(
    tensor: torch.Tensor, *, name: str | None = None, group: Group | None = None, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def allgather(
    tensor: torch.Tensor, *, name: str | None = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
@uncompiled
def allgather(
    tensor: torch.Tensor, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """Everybody's rows in rank order: (n, *s) -> (sum of all n, *s). n may differ between ranks, s and dtype may not.

    A tensor without dimensions counts as one row. Back flows the mean over ranks of the gradients for this rank's rows.
    MismatchError on every rank where the shapes do not fit."""
    from dualdist import collectives, differentiable

    if not async_op and differentiable.wants_gradient([tensor]):
        return differentiable.allgather(_group(group), tensor, name)
    return _now_or_later(collectives.allgather(_group(group), tensor, name), async_op)


@overload
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> list[torch.Tensor]: ...
@overload
def grouped_allgather(
    tensors: Sequence[torch.Tensor], *, name: str | None = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[list[torch.Tensor]]: ...
@uncompiled
def grouped_allgather(
    tensors: Sequence[torch.Tensor], *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> list[torch.Tensor] | Handle[list[torch.Tensor]]:
    """allgather of each tensor, all of them or none, in one message."""
    from dualdist import collectives, differentiable

    if not async_op and differentiable.wants_gradient(tensors):
        return differentiable.grouped_allgather(_group(group), tensors, name)
    return _now_or_later(collectives.grouped_allgather(_group(group), tensors, name), async_op)


@overload
def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def broadcast(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
@uncompiled
def broadcast(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """A new tensor with root's values; every rank passes the same shape and dtype. `root` is a rank of the job.

    Back flows to root the mean over ranks of the gradients, to the others zero."""
    from dualdist import collectives, differentiable

    if not async_op and differentiable.wants_gradient([tensor]):
        return differentiable.broadcast(_group(group), tensor, root, name)
    return _now_or_later(collectives.broadcast(_group(group), tensor, root, name), async_op)


@overload
def broadcast_(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def broadcast_(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
@uncompiled
def broadcast_(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, group: Group | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """broadcast in place: `tensor` itself holds root's values afterwards, and is returned; no gradient flows."""
    from dualdist import collectives

    return _now_or_later(collectives.broadcast_(_group(group), tensor, root, name), async_op)


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[False] = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: Literal[True],
) -> Handle[tuple[torch.Tensor, torch.Tensor]]: ...
@uncompiled
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | Handle[tuple[torch.Tensor, torch.Tensor]]:
    """The rows that the ranks sent here, in rank order, and how many came from each: (n, *s) -> (m, *s), (size,).

    Of the tensor's rows, the next splits[i] go to rank i; without splits, equal parts. Gradients flow back to where the
    rows came from."""
    from dualdist import collectives, differentiable

    if not async_op and differentiable.wants_gradient([tensor]):
        return differentiable.alltoall(_group(group), tensor, splits, name)
    return _now_or_later(collectives.alltoall(_group(group), tensor, splits, name), async_op)


@overload
def reducescatter(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def reducescatter(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[torch.Tensor]: ...
@uncompiled
def reducescatter(
    tensor: torch.Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """This rank's share of the rows of the reduction: (n, *s) -> (n/size, *s), the first ranks take the remainder.

    Back flow the gradients of all shares; with "sum", times the number of ranks, as Horovod does."""
    from dualdist import collectives, differentiable

    if not async_op and differentiable.wants_gradient([tensor]):
        return differentiable.reducescatter(_group(group), tensor, op, name, prescale, postscale)
    return _now_or_later(collectives.reducescatter(_group(group), tensor, op, name, prescale, postscale), async_op)


@overload
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[False] = False,
) -> list[torch.Tensor]: ...
@overload
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: Literal[True],
) -> Handle[list[torch.Tensor]]: ...
@uncompiled
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    group: Group | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    async_op: bool = False,
) -> list[torch.Tensor] | Handle[list[torch.Tensor]]:
    """reducescatter of each tensor, all of them or none."""
    from dualdist import collectives, differentiable

    if not async_op and differentiable.wants_gradient(tensors):
        return differentiable.grouped_reducescatter(_group(group), tensors, op, name, prescale, postscale)
    return _now_or_later(
        collectives.grouped_reducescatter(_group(group), tensors, op, name, prescale, postscale), async_op
    )


@uncompiled
def barrier(*, group: Group | None = None) -> None:
    """Every rank has called this when it returns. It does not wait for other operations that are under way."""
    from dualdist import collectives

    collectives.barrier(_group(group))


@uncompiled
def join(*, group: Group | None = None) -> int:
    """Let the other ranks go on without this one's data; returns, once all ranks have called it, the last one to do so.

    Until then this rank takes part in the others' allreduces and gradients with zeros; a mean still divides by the
    number of all ranks. Whatever else the others call is refused with MismatchError there. The ranks' models differ
    afterwards: broadcast_parameters from the rank that is returned.
    """
    from dualdist.collectives import stand_in
    from dualdist.joining import join

    return join(_group(group), stand_in)


@uncompiled
def new_group(ranks: Sequence[int]) -> Group:
    """Some of the job's ranks, to be passed as `group=`. Every rank of the job calls this, the members and the others.

    Groups may overlap and contain each other. A rank that is no member gets a group too, with which it can do nothing;
    `group.is_member`, `group.rank` (the place among the members, or -1), `group.size` and `group.ranks` tell.
    """
    return session.new_group(ranks)


@uncompiled
def remove_group(group: Group) -> None:
    """The group exists no more; every rank of the job calls this, when nothing is under way on the group."""
    session.remove_group(group)


@uncompiled
def broadcast_object(obj: T, root: int = 0, *, group: Group | None = None) -> T:
    """Root's object on every rank. It is pickled: use it among ranks of your own job only."""
    from dualdist import objects

    return objects.broadcast_object(_group(group), obj, root)


@uncompiled
def allgather_object(obj: T, *, group: Group | None = None) -> list[T]:
    """Everybody's object, in rank order, on every rank. They are pickled: use it among ranks of your own job only."""
    from dualdist import objects

    return objects.allgather_object(_group(group), obj)


@uncompiled
def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root: int = 0,
    *,
    group: Group | None = None,
) -> None:
    """Every rank holds root's values, in place; every rank passes a model of the same names, shapes and dtypes.

    `params` is a module (its parameters and buffers), a state_dict, or named parameters. MismatchError on every rank
    where the ranks' models differ; it names what differs.
    """
    from dualdist import replicate

    replicate.broadcast_parameters(_group(group), params, root)


@uncompiled
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0, *, group: Group | None = None) -> None:
    """Every rank's optimizer has root's state and hyperparameters; a state that root does not have is dropped."""
    from dualdist import replicate

    replicate.broadcast_optimizer_state(_group(group), optimizer, root)


@uncompiled
def wrap_optimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    op: GradientOp = "mean",
    accumulate: int = 1,
    compression: Literal["fp16", "bf16"] | Compressor | None = None,
    predivide: float = 1.0,
    sparse_as_dense: bool = False,
    group: Group | None = None,
) -> OptimizerT:
    """The same optimizer, whose parameters' gradients are reduced over all ranks whenever a backward() returns.

    Every rank calls this, with the same parameters in the same order. Clipping, loss scaling and logging between
    backward() and step() see the reduced gradients, as in one process. A parameter that no rank's loss touched keeps
    grad None; one that some ranks' loss touched gets the mean over all ranks, the others counting as zero. `op` is
    "mean" or "sum".

    With accumulate=k gradients are reduced on every k-th backward() only; they add up in between, as in one process, so
    divide the loss by k for a mean. Between two steps every rank runs the same number of backwards; a rank whose
    backward touched no parameter takes part in step(), so on that step it must not clip or unscale, which would come
    too early. With op="sum", one reduction between two zero_grad() or step() calls. A closure's loss comes back as the
    mean over all ranks. Parameters that are added by add_param_group or unfrozen later are reduced too, those of two
    wrapped optimizers by the newer one; sparse gradients are refused with UnsupportedError. After shutdown() and a new
    init(), wrap again.

    `named_parameters` (model.named_parameters()) gives errors their names.
    """
    from dualdist import gradients
    from dualdist.buckets import Recipe
    from dualdist.compression import compressor_of

    recipe = Recipe(op, compressor_of(compression), predivide, sparse_as_dense)
    return gradients.wrap_optimizer(_group(group), optimizer, named_parameters, recipe, accumulate)


def _group(group: Group | None) -> Group:
    return session.current().world if group is None else group


def _now_or_later(handle: Handle[T], async_op: bool) -> T | Handle[T]:
    return handle.begin() if async_op else handle.wait()
