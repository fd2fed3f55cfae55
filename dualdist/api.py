"""The functions that a training script calls: each finds the open session and hands over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from dualdist import session
from dualdist.collectives.arguments import as_path, require_flags
from dualdist.collectives.compile import disable_compile

if TYPE_CHECKING:
    import torch

    from dualdist.checkpoint.save import CheckpointSaver, PendingSave
    from dualdist.collectives.group import Group
    from dualdist.data.sampler import Sampler
    from dualdist.ddp.bucket_plan import GradientOp
    from dualdist.ddp.compression import GradientCompressor
    from dualdist.monitoring.wait_times import SlowRanks
    from dualdist.rendezvous.open_session import Session

T = TypeVar("T")
OptimizerT = TypeVar("OptimizerT", bound="torch.optim.Optimizer")

SAVER = "checkpoints"  # of a session's extras


def init(backend: str | None = None, *, timeout_s: float = 300) -> None:
    """Join the job: every rank calls this once, before anything else here, and returns when all ranks are there.

    `backend` is "native" (torch.distributed), "horovod", "mpi" (mpi4py) or "auto"; None takes DUALDIST_BACKEND, else
    "auto": what `dualdist compare --save-choice` found for such a job on this machine, else Horovod under horovodrun,
    and under mpirun where Horovod was built with MPI; there else mpi, if mpi4py is installed and torch sees no GPU;
    else native; a process that no launcher started is a job of one, which touches no network. `timeout_s` limits this
    call and every later wait for another rank, in seconds.

    Native sets up torch.distributed's default process group, so that DistributedDataParallel and its kin work beside
    dualdist; a group that is there already is used, and left alone at shutdown.

    Errors: TopologyError (the launcher's variables are wrong, or the ranks contradict each other),
    BackendUnavailableError, UnsupportedError (this launcher cannot start that backend), RendezvousError (ranks missing
    within the timeout), AlreadyInitializedError, UsageError.

    >>> dd.init(timeout_s=60)
    >>> f"rank {dd.rank()} of {dd.size()}, started by {dd.launcher()}, on {dd.backend()}"
    'rank 0 of 1, started by none, on single'
    """
    session.init(backend, timeout_s=timeout_s)


def shutdown() -> None:
    """Leave the job: every rank calls this when nothing is under way. init() may follow again.

    NotInitializedError where init() has not been called; CheckpointError where a save that was under way has failed.

    >>> dd.shutdown()
    >>> dd.is_initialized()
    False
    """
    session.shutdown()


def is_initialized() -> bool:
    """Whether this process is between init() and shutdown().

    >>> dd.is_initialized()
    True
    """
    return session.is_open()


def rank() -> int:
    """0 <= rank < size; unique in the job.

    >>> dd.rank()
    0
    """
    return session.current().topology.rank


def size() -> int:
    """The number of ranks in the job.

    >>> dd.size()
    1
    """
    return session.current().topology.size


def local_rank() -> int:
    """0 <= local_rank < local_size; unique on this node.

    >>> dd.local_rank()
    0
    """
    return session.current().topology.local_rank


def local_size() -> int:
    """The number of ranks on this node, which may differ from node to node.

    >>> dd.local_size()
    1
    """
    return session.current().topology.local_size


def node_rank() -> int:
    """0 <= node < nodes; the same for all ranks of a node.

    >>> dd.node_rank()
    0
    """
    return session.current().topology.node_rank


def num_nodes() -> int:
    """The number of nodes that have ranks.

    >>> dd.num_nodes()
    1
    """
    return session.current().topology.num_nodes


def backend() -> str:
    """What moves the tensors: "native", "horovod", "mpi", or "single" in a job of one that no launcher started.

    >>> dd.backend()
    'single'
    """
    return session.current().backend.name


def transport() -> str:
    """What carries tensors of this rank's device: "shm", "gloo", "nccl", "mpi", or "none" where nothing has to move.

    "shm" is the memory that ranks of one host share; where there are several hosts, Gloo between them.

    >>> dd.transport()
    'none'
    """
    return session.current().backend.transport


def launcher() -> str:
    """What started the ranks: "torchrun", "horovodrun", "mpirun", "srun", "spawn", "none" and others.

    >>> dd.launcher()
    'none'
    """
    return session.current().topology.launcher


def device() -> torch.device:
    """This rank's GPU, which init() made the current one, or the CPU where there is none.

    >>> model = torch.nn.Linear(2, 1).to(dd.device())
    """
    return session.current().device


@disable_compile
def barrier(*, group: Group | None = None) -> None:
    """Every rank has called this when it returns. It does not wait for other operations that are under way.

    CollectiveTimeoutError, on every rank that waits, where one does not come within the timeout_s of init().

    >>> dd.barrier()
    """
    from dualdist.collectives import collectives

    collectives.barrier(session.group_or_world(group))


@disable_compile
def join(*, group: Group | None = None) -> int:
    """Let the other ranks go on without this one's data; returns, once all ranks have called it, the last one to do so.

    Until then this rank takes part in the others' allreduces and gradients with zeros; a mean still divides by the
    number of all ranks. Whatever else the others call is refused with MismatchError there. The ranks' models differ
    afterwards: broadcast_parameters from the rank that is returned.

    >>> dd.join()
    0
    """
    from dualdist.collectives.collectives import zero_contribution
    from dualdist.ddp.join import join

    return join(session.group_or_world(group), zero_contribution)


@disable_compile
def new_group(ranks: Sequence[int]) -> Group:
    """Some of the job's ranks, to be passed as `group=`. Every rank of the job calls this, the members and the others.

    Groups may overlap and contain each other. A rank that is no member gets a group too, with which it can do nothing;
    `group.is_member`, `group.rank` (the place among the members, or -1), `group.size` and `group.ranks` tell.

    >>> group = dd.new_group([0])
    >>> dd.allreduce(torch.ones(1), group=group)
    tensor([1.])
    """
    return session.new_group(ranks)


@disable_compile
def remove_group(group: Group) -> None:
    """The group exists no more; every rank of the job calls this, when nothing is under way on the group.

    >>> dd.remove_group(dd.new_group([0]))
    """
    session.remove_group(group)


@disable_compile
def broadcast_object(obj: T, root: int = 0, *, group: Group | None = None) -> T:
    """Root's object on every rank; every rank calls this, and what the others pass does not count.

    It is pickled: use it among ranks of your own job only. MismatchError on every rank where roots differ.

    >>> dd.broadcast_object({"lr": 0.1})
    {'lr': 0.1}
    """
    from dualdist.collectives import objects

    return objects.broadcast_object(session.group_or_world(group), obj, root)


@disable_compile
def allgather_object(obj: T, *, group: Group | None = None) -> list[T]:
    """Everybody's object, in rank order, on every rank; every rank calls this.

    They are pickled: use it among ranks of your own job only.

    >>> dd.allgather_object(f"rank {dd.rank()}")
    ['rank 0']
    """
    from dualdist.collectives import objects

    return objects.allgather_object(session.group_or_world(group), obj)


@disable_compile
def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root: int = 0,
    *,
    group: Group | None = None,
) -> None:
    """Every rank holds root's values, in place; every rank passes a model of the same names, shapes and dtypes.

    `params` is a module (its parameters and buffers), a state_dict, or named parameters. MismatchError on every rank
    where the ranks' models differ; it names what differs.

    >>> dd.broadcast_parameters(torch.nn.Linear(2, 1))
    """
    from dualdist.collectives import broadcast_state

    broadcast_state.broadcast_parameters(session.group_or_world(group), params, root)


@disable_compile
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0, *, group: Group | None = None) -> None:
    """Every rank's optimizer has root's state and hyperparameters; a state that root does not have is dropped.

    Every rank calls this with an optimizer of the same class for as many parameters in each group; MismatchError on
    every rank where these differ.

    >>> model = torch.nn.Linear(2, 1)
    >>> dd.broadcast_optimizer_state(torch.optim.AdamW(model.parameters()))
    """
    from dualdist.collectives import broadcast_state

    broadcast_state.broadcast_optimizer_state(session.group_or_world(group), optimizer, root)


@disable_compile
def wrap_optimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    op: GradientOp = "mean",
    accumulate: int = 1,
    compression: Literal["fp16", "bf16"] | GradientCompressor | None = None,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    check_every: int | None = None,
    group: Group | None = None,
) -> OptimizerT:
    """The same optimizer, whose parameters' gradients are reduced over all ranks whenever a backward() returns.

    Every rank calls this, with the same parameters in the same order. Clipping, loss scaling and logging between
    backward() and step() see the reduced gradients, as in one process. A parameter that no rank's loss touched keeps
    grad None; one that some ranks' loss touched gets the mean over all ranks, the others counting as zero.

    `op` is "mean", "sum" or "adasum". With "adasum" no gradients are reduced: every rank steps on its own, and the
    steps are combined (Maleki et al., MLSys 2021; the number of ranks is a power of two), so the loss is each rank's.

    `compression` is what floats become on the wire: "fp16", "bf16", or an object with compress(tensor) -> (tensor, ctx)
    and decompress(tensor, ctx). Gradients are divided by `gradient_predivide_factor` before the sum and multiplied by
    it afterwards, where a sum could overflow. Of sparse gradients only the stored values are sent, unless
    `sparse_as_dense`. Gradients are reduced in buckets of `bucket_cap_mb` MiB, which overlap with backward(); the first
    one is `first_bucket_mb`, and gradients that would not fill two of those share one bucket.
    Afterwards they are views of the buckets, unless the program keeps the tensor that was .grad before.

    With accumulate=k gradients are reduced on every k-th backward() only; they add up in between, as in one process, so
    divide the loss by k for a mean. Between two steps every rank runs the same number of backwards; a rank whose
    backward touched no parameter takes part in step(), so on that step it must not clip or unscale, which would come
    too early. With op="sum", one reduction between two zero_grad() or step() calls. A closure's loss comes back as the
    mean over all ranks. Parameters that are added by add_param_group or unfrozen later are reduced too, those of two
    wrapped optimizers by the newer one. After shutdown() and a new init(), wrap again.

    With check_every=n no step is taken with gradients that are NaN or infinite: step() raises NonFiniteError on every
    rank, which names them and the ranks on whose part it was so. Before the first step and every n-th after it
    parameters are compared, and DriftError names the first that differs. Nothing has changed then, and training may go
    on. What a loss scaler passes over (GradScaler skips the step) or the program has put right before step() is no
    error. Costs a look at the reduced gradients, for which the program waits for the GPU, and at the n-th steps one at
    the parameters. While some ranks have joined, parameters are not compared.

    `named_parameters` (model.named_parameters()) gives errors their names.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> dd.wrap_optimizer(optimizer, model.named_parameters()) is optimizer
    True
    """
    from dualdist.ddp import optimizer as gradients
    from dualdist.ddp.bucket_plan import ReducerConfig, bucket_bytes
    from dualdist.ddp.compression import resolve_compressor
    from dualdist.ddp.nonfinite import validate_check_every

    sizes = bucket_bytes("bucket_cap_mb", bucket_cap_mb), bucket_bytes("first_bucket_mb", first_bucket_mb)
    config = ReducerConfig(
        op,
        resolve_compressor(compression),
        gradient_predivide_factor,
        sparse_as_dense,
        *sizes,
        validate_check_every(check_every),
    )
    gradients.wrap_optimizer(session.group_or_world(group), optimizer, named_parameters, config, accumulate)
    session.record_steps(optimizer)
    return optimizer


@overload
def save_checkpoint(
    path: str | PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Sampler | None = None,
    keep: int | None = 3,
    async_op: Literal[False] = False,
    **extra: Any,
) -> str: ...
@overload
def save_checkpoint(
    path: str | PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Sampler | None = None,
    keep: int | None = 3,
    async_op: Literal[True],
    **extra: Any,
) -> PendingSave: ...


@disable_compile
def save_checkpoint(
    path: str | PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Sampler | None = None,
    keep: int | None = 3,
    async_op: bool = False,
    **extra: Any,
) -> str | PendingSave:
    """A new file in the folder `path` holds rank 0's state of the objects, and every rank's random state.

    Every rank calls this, between two steps; only rank 0 touches the disk, and only its `path` counts. The folder is
    made, its parent must be there. Its last `keep` checkpoints are left, all where that is None. Returns the file's
    path. `extra` are more objects with a state_dict(), or plain data: numbers, texts, tensors, dicts and lists of them.

    The file appears whole or not at all; torch.load(path, weights_only=True) reads it too: "model" has the plain names
    of the model's state_dict, "extra" the plain data.

    With async_op=True this returns when the state has been copied to the CPU's memory, and a thread writes it; wait()
    of what is returned, which every rank calls, gives the path. So do the next save and shutdown(), where it must.

    Errors, on every rank: CheckpointError (the disk is full, read-only, gone or does not answer within timeout_s of
    init; the earlier checkpoints are as they were), UsageError (something cannot be saved, or was not counted).

    >>> model = torch.nn.Linear(2, 1)
    >>> dd.save_checkpoint("run", model=model, epoch=3)
    'run/checkpoint-00000001.pt'
    """
    here = session.current()
    require_flags(async_op=async_op)
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    parts = {name: part for name, part in given.items() if part is not None} | extra
    saving = _saver(here).save(as_path(path), parts, keep, async_op=async_op)
    return saving if async_op else saving.wait()


@disable_compile
def load_checkpoint(
    path: str | PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Sampler | None = None,
    required: bool = False,
    random: bool = True,
    **objects: Any,
) -> dict[str, Any] | None:
    """Every rank's objects are as they were saved in the newest good checkpoint of the folder `path`, or in a file.

    Every rank calls this with the same objects; only rank 0 touches the disk. Returns the plain data that were saved;
    None, and nothing has changed, where the folder has no checkpoint yet or is not there itself, which with
    required=True, or where the path ends in .pt, is an error. A file that is truncated or altered is passed over with a
    RuntimeWarning that names it. No file can run code: torch reads it with weights_only=True.

    The number of ranks, the backend and the launcher may be others than when it was saved. On as many ranks, each goes
    on with its own random state, so that on CPUs a run that is resumed ends with the bits of one that never stopped;
    on another number they get new ones. With random=False random states are left alone.

    A checkpoint that is still being written is waited for, and what goes wrong with it raised, as by the next save.

    Errors, on every rank: CheckpointError (no good file, or the objects are of other names or shapes, and then nothing
    has changed anywhere), UsageError.

    >>> model = torch.nn.Linear(2, 1)
    >>> path = dd.save_checkpoint("run", model=model, epoch=3)
    >>> dd.load_checkpoint("run", model=model)
    {'epoch': 3}
    """
    from dualdist.checkpoint import load as resuming

    here = session.current()
    require_flags(required=required, random=random)
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    parts = {name: part for name, part in given.items() if part is not None} | objects
    saver = _saver(here)
    saver.finish()
    return resuming.load(
        here.world, here.device, here.timeout_s, as_path(path), parts, saver, required=required, random=random
    )


def _saver(here: Session) -> CheckpointSaver:
    """The checkpoints of this session."""
    from dualdist.checkpoint import save as checkpoint

    saver: CheckpointSaver | None = here.extras.get(SAVER)
    if saver is None:
        saver = here.extras[SAVER] = checkpoint.CheckpointSaver(here.world, here.device, here.timeout_s)
        here.close_callbacks.append(saver.finish)
    return saver


@disable_compile
def check_consistency(
    model: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    *,
    buffers: bool = False,
    group: Group | None = None,
) -> None:
    """All ranks hold the same bits in the parameters of `model`, or DriftError on every rank says where they do not.

    Every rank calls this with a model of the same names and shapes: a module, a state_dict or named tensors. The error
    names the first parameter that differs, the ranks that differ from the others and by how much, and says where they
    hold NaN or infinite values; equal bits are equal, NaN too. What batch norm has counted is each rank's own, and
    compared with buffers=True only. Tensors stay where they are: what travels is 64 bytes.

    >>> dd.check_consistency(torch.nn.Linear(2, 1))
    """
    from dualdist.collectives import consistency

    consistency.check_consistency(session.group_or_world(group), model, buffers=buffers)


@disable_compile
def slow_ranks(*, group: Group | None = None) -> SlowRanks:
    """Who has waited for whom in operations and gradients, and how long, since the last call; every rank calls this.

    The first call begins to count. What is returned is the same on every rank and prints as a table: `slowest` is the
    rank for which the others waited most, or None, `caused_s` what each of the others waited for a rank, by rank, and
    `waited_s` what a rank waited. With DUALDIST_SLOW_RANKS=1 counting begins with init(), and rank 0 prints a table at
    the end. Only waits of the program count: on a GPU those that its stream does by itself do not.

    >>> dd.slow_ranks().slowest is None
    True
    """
    from dualdist.diagnostics import stragglers

    return stragglers.slow_ranks(session.group_or_world(group))
