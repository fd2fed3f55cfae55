"""The functions that a training script calls: each finds the open session and hands over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from dualdist import session

if TYPE_CHECKING:
    import torch

    from dualdist.buckets import GradientOp
    from dualdist.collectives import Handle, Op

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


@overload
def allreduce(
    tensor: torch.Tensor, op: Op = "mean", *, name: str | None = None, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def allreduce(
    tensor: torch.Tensor, op: Op = "mean", *, name: str | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
def allreduce(
    tensor: torch.Tensor, op: Op = "mean", *, name: str | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """A new tensor with the reduction of each element over all ranks; every rank passes the same shape and dtype.

    `op` is "mean" (the sum, then divided by the number of ranks; floating point only), "sum", "min", "max" or
    "product". With async_op=True returns a Handle at once, whose wait() gives the tensor; the caller leaves `tensor`
    alone until then.
    """
    from dualdist import collectives

    return _now_or_later(collectives.allreduce(session.current().backend, tensor, op, name), async_op)


@overload
def allreduce_(
    tensor: torch.Tensor, op: Op = "mean", *, name: str | None = None, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def allreduce_(
    tensor: torch.Tensor, op: Op = "mean", *, name: str | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
def allreduce_(
    tensor: torch.Tensor, op: Op = "mean", *, name: str | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """allreduce in place: `tensor` itself holds the reduction afterwards, and is returned."""
    from dualdist import collectives

    return _now_or_later(collectives.allreduce_(session.current().backend, tensor, op, name), async_op)


@overload
def allgather(tensor: torch.Tensor, *, name: str | None = None, async_op: Literal[False] = False) -> torch.Tensor: ...
@overload
def allgather(tensor: torch.Tensor, *, name: str | None = None, async_op: Literal[True]) -> Handle[torch.Tensor]: ...
def allgather(
    tensor: torch.Tensor, *, name: str | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """Everybody's rows in rank order: (n, *s) -> (sum of all n, *s). n may differ between ranks, s and dtype may not.

    A tensor without dimensions counts as one row. MismatchError on every rank where the shapes do not fit.
    """
    from dualdist import collectives

    return _now_or_later(collectives.allgather(session.current().backend, tensor, name), async_op)


@overload
def broadcast(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def broadcast(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
def broadcast(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """A new tensor with root's values; every rank passes the same shape and dtype."""
    from dualdist import collectives

    copy = tensor.detach().clone()
    return _now_or_later(collectives.broadcast_(session.current().backend, copy, root, name), async_op)


@overload
def broadcast_(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def broadcast_(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, async_op: Literal[True]
) -> Handle[torch.Tensor]: ...
def broadcast_(
    tensor: torch.Tensor, root: int = 0, *, name: str | None = None, async_op: bool = False
) -> torch.Tensor | Handle[torch.Tensor]:
    """broadcast in place: `tensor` itself holds root's values afterwards, and is returned."""
    from dualdist import collectives

    return _now_or_later(collectives.broadcast_(session.current().backend, tensor, root, name), async_op)


def barrier() -> None:
    """Every rank has called this when it returns."""
    from dualdist import collectives

    collectives.barrier(session.current().backend)


def broadcast_object(obj: T, root: int = 0) -> T:
    """Root's object on every rank. It is pickled: use it among ranks of your own job only."""
    from dualdist import collectives

    return collectives.broadcast_object(session.current().backend, obj, root)


def allgather_object(obj: T) -> list[T]:
    """Everybody's object, in rank order, on every rank. They are pickled: use it among ranks of your own job only."""
    from dualdist import collectives

    return collectives.allgather_object(session.current().backend, obj)


def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root: int = 0
) -> None:
    """Every rank holds root's values, in place; every rank passes a model of the same names, shapes and dtypes.

    `params` is a module (its parameters and buffers), a state_dict, or named parameters. MismatchError on every rank
    where the ranks' models differ; it names what differs.
    """
    from dualdist import replicate

    replicate.broadcast_parameters(session.current().backend, params, root)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Every rank's optimizer has root's state and hyperparameters; a state that root does not have is dropped."""
    from dualdist import replicate

    replicate.broadcast_optimizer_state(session.current().backend, optimizer, root)


def wrap_optimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    op: GradientOp = "mean",
    accumulate: int = 1,
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

    return gradients.wrap_optimizer(session.current().backend, optimizer, named_parameters, op, accumulate)


def _now_or_later(handle: Handle[T], async_op: bool) -> T | Handle[T]:
    return handle if async_op else handle.wait()
