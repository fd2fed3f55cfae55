"""The functions that a training script calls; each delegates to the open session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from dualdist import session, trace
from dualdist.collectives.arguments import as_path, require_flags
from dualdist.collectives.dynamo import disable_compile
from dualdist.utils.suggest import explain_calls

if TYPE_CHECKING:
    import torch

    from dualdist.checkpoint.save import CheckpointSaver, PendingSave
    from dualdist.collectives.arguments import Reduction
    from dualdist.collectives.group import Group
    from dualdist.data.sampler import Sampler
    from dualdist.ddp.compression import AnyCompressor
    from dualdist.ddp.config import GradientOp
    from dualdist.session import Session

T = TypeVar("T")
OptimizerT = TypeVar("OptimizerT", bound="torch.optim.Optimizer")

SAVER = "checkpoints"  # key in a session's extras


@explain_calls
def init(backend: str | None = None, *, timeout_s: float = 300) -> None:
    """Initialize dualdist: join the job, choose a backend and make this rank's GPU the current device.

    Every rank calls this once, before any other function of dualdist; it returns when all ranks have joined. A process
    that no launcher started is a job of one rank and needs no network.

    With the native backend this also initializes torch.distributed's default process group, so that
    DistributedDataParallel and other torch code work alongside dualdist. A default group that exists already is used,
    and not destroyed by shutdown().

    Args:
        backend: "native" (torch.distributed), "horovod", "mpi" (mpi4py), "auto", or a registered name. If None,
            DUALDIST_BACKEND, else "auto". "auto" is the choice that `dualdist compare --save-choice` saved for such a
            job on this machine. Without one it is Horovod under horovodrun, and under mpirun if Horovod was built with
            MPI; else mpi under mpirun if mpi4py is installed and torch sees no GPU; else native.
        timeout_s: the limit, in seconds, for this call and for every later wait for another rank.

    Raises:
        AlreadyInitializedError: a session is open.
        BackendUnavailableError: the backend is not installed or does not fit the installed torch.
        NotInitializedError: this process was forked from a rank that had called init().
        RendezvousError: some ranks did not join within `timeout_s`.
        TopologyError: the launcher's variables are incomplete, or the ranks contradict each other.
        UnsupportedError: this launcher cannot start that backend.
        UsageError: an argument is invalid.

    Example:
        >>> dd.init(timeout_s=60)
        >>> f"rank {dd.rank()} of {dd.size()}, started by {dd.launcher()}, on {dd.backend()}"
        'rank 0 of 1, started by none, on single'
    """
    session.add_observer(trace.ASKED_BY_VARIABLES)
    session.init(backend, timeout_s=timeout_s)


def shutdown() -> None:
    """Leave the job; every rank calls this, with no operation under way. init() may be called again afterwards.

    In a child that was forked from a rank it does nothing: the rank's session continues.

    Raises:
        CheckpointError: an asynchronous save failed.
        NotInitializedError: init() has not been called.

    Example:
        >>> dd.shutdown()
        >>> dd.is_initialized()
        False
    """
    session.shutdown()


def is_initialized() -> bool:
    """Return True between init() and shutdown().

    Example:
        >>> dd.is_initialized()
        True
    """
    return session.is_open()


def rank() -> int:
    """Return this process's rank in the job, 0 <= rank < size().

    Example:
        >>> dd.rank()
        0
    """
    return session.current().topology.rank


def size() -> int:
    """Return the number of ranks in the job.

    Example:
        >>> dd.size()
        1
    """
    return session.current().topology.size


def local_rank() -> int:
    """Return this process's rank on its node, 0 <= local_rank < local_size().

    Example:
        >>> dd.local_rank()
        0
    """
    return session.current().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this node; nodes may differ.

    Example:
        >>> dd.local_size()
        1
    """
    return session.current().topology.local_size


def node_rank() -> int:
    """Return the number of this rank's node, 0 <= node_rank < num_nodes().

    Example:
        >>> dd.node_rank()
        0
    """
    return session.current().topology.node_rank


def num_nodes() -> int:
    """Return the number of nodes in the job.

    Example:
        >>> dd.num_nodes()
        1
    """
    return session.current().topology.num_nodes


def backend() -> str:
    """Return the backend: "native", "horovod", "mpi", or "single" in a job of one rank that no launcher started.

    Example:
        >>> dd.backend()
        'single'
    """
    return session.current().backend.name


def transport() -> str:
    """Return the transport for tensors on this rank's device: "shm", "gloo", "nccl", "mpi" or "none".

    "shm" is shared memory between the ranks of a host, and Gloo between hosts; "none" is that of a single rank.

    Example:
        >>> dd.transport()
        'none'
    """
    return session.current().backend.transport


def launcher() -> str:
    """Return the launcher that started the ranks: "torchrun", "horovodrun", "mpirun", "srun", "spawn", "none", ...

    Example:
        >>> dd.launcher()
        'none'
    """
    return session.current().topology.launcher


def device() -> torch.device:
    """Return this rank's GPU, which init() made the current one, or the CPU if there is none.

    Example:
        >>> model = torch.nn.Linear(2, 1).to(dd.device())
    """
    return session.current().device


@disable_compile
def new_group(ranks: Sequence[int]) -> Group:
    """Create a group of ranks, to be passed as `group=`; every rank of the job calls this, members or not.

    Groups may overlap. `group.is_member`, `group.rank` (the rank within the group, or -1), `group.size` and
    `group.ranks` describe it; a rank that is not a member cannot use the group.

    Args:
        ranks: different ranks of the job, in any order and the same on every rank.

    Returns:
        The group, whose ranks are in ascending order.

    Raises:
        MismatchError: the ranks passed different `ranks`.
        UsageError: `ranks` is empty, repeats a rank, or names one that does not exist.

    Example:
        >>> group = dd.new_group([0])
        >>> dd.allreduce(torch.ones(1), group=group)
        tensor([1.])
    """
    return session.new_group(ranks)


@disable_compile
def remove_group(group: Group) -> None:
    """Destroy a group; every rank of the job calls this, with no operation under way on the group.

    Args:
        group: a group of new_group(), created since init().

    Raises:
        MismatchError: the ranks passed different groups; raised on every rank.
        UsageError: the group is not one of this session, or has been removed.

    Example:
        >>> dd.remove_group(dd.new_group([0]))
    """
    session.remove_group(group)


@disable_compile
def wrap_optimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    op: GradientOp = "mean",
    accumulate: int = 1,
    compression: str | AnyCompressor | None = None,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    check_every: int | None = None,
    gradient_as_bucket_view: bool = True,
    reduction: Reduction | None = None,
    shard: bool = False,
    group: Group | None = None,
) -> OptimizerT:
    """Reduce the gradients of the optimizer's parameters over all ranks whenever a backward() returns.

    Every rank of the group calls this, with the same parameters in the same order, and before the first backward().
    Gradients are reduced in buckets while backward() runs, as in torch.nn.parallel.DistributedDataParallel, but the
    model stays as it is, and so do the optimizer's class, state and state_dict. Since all gradients are reduced when
    backward() returns, clipping, loss scaling and logging between backward() and step() need no change.

    A parameter that no rank's loss used keeps ``grad is None``; if some ranks used it, the others count as zero.

    Args:
        optimizer: any torch optimizer.
        named_parameters: names for error messages, such as model.named_parameters(); covers all of the optimizer's
            parameters if given.
        op: "mean", "sum" or "adasum". With "adasum" gradients are not reduced: every rank steps on its own, and the
            steps are combined (Maleki et al., MLSys 2021); the number of ranks must be a power of two.
        accumulate: reduce on every `accumulate`-th backward() only. Gradients add up in between, as in one process, so
            divide the loss by `accumulate` for a mean.
        compression: the format in which floating-point gradients are sent: "fp16", "bf16", or an object with
            compress(tensor) -> (tensor, ctx) and decompress(tensor, ctx) -> tensor. Or what part of them is sent, with
            error feedback: Compression.powersgd() and Compression.topk(), or "powersgd:RANK" and "topk:RATIO".
        gradient_predivide_factor: divide gradients by it before the sum and multiply them by it afterwards, where a sum
            could overflow.
        sparse_as_dense: send sparse gradients as dense ones. By default only the stored values are sent.
        bucket_cap_mb: the size of a bucket in MiB.
        first_bucket_mb: the size of the first bucket in MiB, smaller so that communication starts early. Gradients of
            less than twice this size share one bucket.
        check_every: if given, step() checks the reduced gradients for NaN and infinity, and before the first and every
            `check_every`-th step compares the parameters between ranks. The check waits for the GPU.
        gradient_as_bucket_view: make the reduced gradients views of the buckets, as in DistributedDataParallel. They
            are valid until the next backward(); a program that needs them for longer clones them. It may clear them by
            zero_grad() of either kind, replace ``p.grad`` or ``p.grad.data``, ``detach_()`` them and accumulate into
            them. With False, and with `check_every`, they are copied to the tensors that autograd made.
        reduction: "ordered" adds gradients in the order of ranks, element by element. On CPUs a training then ends with
            the same bits on every backend, transport and number of hosts, and with any bucket size. Gradients below 32
            bits are added in float32 and rounded once. "unordered" adds as the transport does. If None,
            DUALDIST_REDUCTION, else "unordered".
        shard: divide the optimizer's state between the ranks (ZeRO stage 1, Rajbhandari et al., SC 2020). Every rank
            has all parameters and gradients, and the state of about 1/size of the parameters; step() updates those and
            sends them to the others. Parameters end with the bits that they have without it.
        group: a group of new_group(), or None for all ranks.

    Returns:
        `optimizer` itself.

    Raises:
        MismatchError: the ranks' parameters or arguments differ; raised on every rank.
        UnsupportedError: a parameter is not dense, or is a DTensor, as of FSDP.
        UsageError: an argument is invalid, the optimizer is wrapped already, or DistributedDataParallel has its model.
            Also if "ordered" is combined with compression or "adasum", or `shard` with an optimizer that steps on all
            parameters together, such as LBFGS.
        DriftError: from the first backward(), on every rank: the ranks began with different parameters; call
            broadcast_parameters() before.
        DriftError: from a later step() with `check_every`, on every rank: the ranks hold different parameters. Nothing
            has changed, and training can continue.
        NonFiniteError: from step() with `check_every`, on every rank: gradients are not finite; names them and the
            ranks that caused it. Not raised if a loss scaler will skip the step, or the program has replaced the
            gradients.

    Note:
        - The optimizer owns the reduction: when it is deleted, gradients are no longer reduced.
        - A gradient is copied to its bucket after the hooks of its parameter: these may change it, others may not.
        - Between two steps every rank runs the same number of backwards. A rank whose backward used none of the
          parameters takes part in step(); it must not clip or unscale gradients before.
        - With op="sum" reduce once between two zero_grad() or step() calls, as a second reduction would sum again.
        - The loss that step(closure) returns is the mean over all ranks.
        - Parameters added by add_param_group or unfrozen later are reduced, too. A parameter of two wrapped optimizers
          is reduced by the newer one.
        - Parameters are not compared while some ranks have joined; see join().
        - With shard=True state_dict() returns the full state, in CPU memory, and every rank calls it; load_state_dict()
          takes a full state and keeps this rank's part. Ranks must not join() while others step.
        - The wrapper ends with the session: after shutdown() and init() wrap the optimizer again.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = dd.wrap_optimizer(optimizer, model.named_parameters())
        >>> model(torch.ones(4, 2)).mean().backward()  # gradients are reduced when this returns
        >>> optimizer.step()
    """
    from dualdist.ddp import optimizer as ddp_optimizer
    from dualdist.ddp.compression import resolve_compressor
    from dualdist.ddp.config import ReducerConfig, bucket_bytes

    config = ReducerConfig(
        op,
        resolve_compressor(compression),
        gradient_predivide_factor,
        sparse_as_dense,
        bucket_bytes("bucket_cap_mb", bucket_cap_mb),
        bucket_bytes("first_bucket_mb", first_bucket_mb),
        check_every,
        gradient_as_bucket_view,
        reduction=reduction,
        shard=shard,
    )
    ddp_optimizer.wrap_optimizer(session.group_or_world(group), optimizer, named_parameters, config, accumulate)
    session.announce_optimizer(optimizer, session.SentGradients(reduction, ddp_optimizer.get_sent_bytes))
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
    path: str | PathLike[str], *, keep: int | None = 3, async_op: Literal[True], **parts: Any
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
    """Save rank 0's state of the objects and every rank's random state to a new file in a folder.

    Every rank calls this, between two steps; only rank 0 accesses the disk. The file appears completely or not at all.
    torch.load(path, weights_only=True) reads it, too: under "model" are the plain names of the model's state_dict,
    under "extra" the plain data.

    Args:
        path: the folder, taken from rank 0. It is created; its parent must exist.
        model: a module; that inside DistributedDataParallel or torch.compile is saved.
        optimizer: a torch optimizer, wrapped or not.
        scheduler: a learning rate scheduler, or any object with a state_dict().
        scaler: a GradScaler.
        sampler: a dd.Sampler.
        keep: the number of checkpoints to keep in the folder, or None for all.
        async_op: return after copying the state to CPU memory; a thread writes the file.
        **extra: further objects with a state_dict(), or plain data: numbers, strings, tensors, dicts and lists of them.

    Returns:
        The path of the file; with async_op=True an object with wait() -> path, which every rank calls. The next save
        and shutdown() wait for it, too.

    Raises:
        CheckpointError: the disk is full, read-only, missing, or made no progress within the timeout_s of init();
            raised on every rank. Earlier checkpoints are as they were.
        UsageError: an object cannot be saved, or the sampler's batches were not recorded; raised on every rank.

    Example:
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
    """Load the newest valid checkpoint of a folder, or one file, into every rank's objects.

    Every rank calls this with the same objects; only rank 0 accesses the disk. A truncated or altered file is skipped
    with a RuntimeWarning. Files are read with weights_only=True and cannot run code. A save under way is finished
    first, and its error raised.

    The number of ranks, the backend and the launcher may differ from those at the time of saving. With the same number
    of ranks each continues with its own random state, so that on CPUs a resumed run ends with the same bits as an
    uninterrupted one.

    Args:
        path: a folder, or a file whose name ends in .pt; taken from rank 0.
        model: a module to load into.
        optimizer: an optimizer to load into.
        scheduler: a scheduler to load into.
        scaler: a GradScaler to load into.
        sampler: a dd.Sampler to load into.
        required: raise CheckpointError if the folder has no checkpoint.
        random: restore the random state, or with another number of ranks seed it from the saved ones.
        **objects: further objects with a load_state_dict().

    Returns:
        The plain data that were saved, in a dict that is true even if it is empty; or None, and nothing has changed, if
        the folder has no checkpoint or is missing.

    Raises:
        CheckpointError: no file is valid, names or shapes differ, or an object refuses its state; raised on every
            rank, and nothing has changed on any.
        UsageError: an argument is invalid.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> path = dd.save_checkpoint("run", model=model, epoch=3)
        >>> dd.load_checkpoint("run", model=model)
        {'epoch': 3}
    """
    from dualdist.checkpoint.load import load

    here = session.current()
    require_flags(required=required, random=random)
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    parts = {name: part for name, part in given.items() if part is not None} | objects
    saver = _saver(here)
    saver.finish()
    return load(here.world, here.device, here.timeout_s, as_path(path), parts, saver, required=required, random=random)


def _saver(here: Session) -> CheckpointSaver:
    from dualdist.checkpoint.save import CheckpointSaver

    saver: CheckpointSaver | None = here.extras.get(SAVER)
    if saver is None:
        saver = here.extras[SAVER] = CheckpointSaver(here.world, here.device, here.timeout_s)
        here.close_callbacks.append(saver.finish)
    return saver
