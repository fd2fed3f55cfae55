"""Horovod's DistributedOptimizer: dualdist's wrapping of an optimizer, with Horovod's methods on it."""

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from dualdist import session
from dualdist.ddp.compression import CASTS, AnyCompressor, resolve_compressor
from dualdist.ddp.config import GradientOp, ReducerConfig
from dualdist.ddp.optimizer import (
    OptimizerWrapper,
    get_sent_bytes,
    get_wrapper,
    names_by_id,
    unwrap_optimizer,
    wrap_optimizer,
)
from dualdist.errors import UsageError
from dualdist.hvd.basics import size
from dualdist.hvd.common import horovods_errors, split_list
from dualdist.hvd.compression import Compression
from dualdist.hvd.mpi_ops import Adasum, Average, Sum, require_adasum
from dualdist.hvd.process_sets import ProcessSet, global_process_set, group_of

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

CONTROLS = "_dualdist_controls"  # the attribute of an optimizer that went through DistributedOptimizer
GRADIENT_OPS: dict[int, GradientOp] = {Average: "mean", Sum: "sum", Adasum: "adasum"}


def DistributedOptimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> OptimizerT:
    """Wrap an optimizer: its parameters' gradients are reduced over the process set before backward() returns.

    Every rank of the set calls this, with the same parameters in the same order; a rank outside of it steps alone. A
    wrapped optimizer is wrapped again. With op=Adasum each rank steps on its own gradients and the steps are combined.

    The optimizer gains synchronize(), skip_synchronize() and set_backward_passes_per_step(). Scripts do not need them:
    gradients are reduced before anything can read them, and step() reduces what is left.

    Args:
        optimizer: any torch optimizer.
        named_parameters: names for errors, for instance model.named_parameters().
        compression: how gradients are sent, one of `Compression`.
        backward_passes_per_step: gradients are reduced in every so many backward passes.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: of Average: gradients are divided by it before the sum, and multiplied after it.
        num_groups: deprecated: use groups.
        groups: a number of groups, or lists of parameters, whose gradients are reduced together.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that take part.

    Returns:
        The same optimizer.

    Raises:
        ValueError: arguments contradict each other or are out of range.
        NotImplementedError: Adasum on a process set, or on a number of ranks that is not a power of two, as Horovod
            0.28.1 raises.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor is for op=Average only, which it divides before and after the sum")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated in Horovod: pass groups=... instead", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _require_passes(backward_passes_per_step)
    if op not in GRADIENT_OPS:
        raise UsageError(f"op={op!r}: gradients are reduced by Average, Sum or Adasum")
    named = _named(optimizer, named_parameters)
    names_by_id(optimizer, named)
    fused_groups = _fused_groups(optimizer, groups)
    if op == Adasum:
        require_adasum(process_set)
    config = ReducerConfig(
        GRADIENT_OPS[op],
        _compressor(compression),
        gradient_predivide_factor,
        sparse_as_dense,
        compares_start=False,  # as in Horovod
    )
    group = group_of(process_set)
    before = getattr(optimizer, CONTROLS, None)
    if before is not None:
        before.undo(optimizer)
    unwrap_optimizer(optimizer)
    if group.is_member:
        with horovods_errors():
            wrap_optimizer(
                group,
                optimizer,
                named,
                config,
                backward_passes_per_step,
                fused_groups=fused_groups,
                next_group=lambda: group_of(process_set),
                errors=horovods_errors,
            )
    _Controls(
        optimizer,
        skips=op != Adasum or size() == 1,
        _parameter_names={param: name for name, param in sorted(named, key=lambda pair: pair[0])},
        _compression=compression,
        _groups=groups,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    session.announce_optimizer(optimizer, session.SentGradients(None, get_sent_bytes))
    return optimizer


class _Controls:
    """The methods that DistributedOptimizer adds to an optimizer.

    They are attributes of this optimizer object, beside those `known`; copies and pickles of it have none of them. They
    refer to it weakly: an optimizer that a program drops is freed at once, and not by a later garbage collection.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, skips: bool, **known: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._skips = skips
        self._is_synchronized = False
        attributes = known | {
            CONTROLS: self,
            "synchronize": self.synchronize,
            "skip_synchronize": self.skip_synchronize,
            "set_backward_passes_per_step": self.set_backward_passes_per_step,
        }
        for name, value in attributes.items():
            setattr(optimizer, name, value)
        self._names = tuple(attributes)
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def undo(self, optimizer: torch.optim.Optimizer) -> None:
        self._hook.remove()
        for name in self._names:
            delattr(optimizer, name)

    def _wrapper(self) -> OptimizerWrapper | None:
        """Return the optimizer's wrapper; None for a rank outside of the process set."""
        return get_wrapper(self._optimizer())

    def synchronize(self) -> None:
        """Reduce the gradients, also after fewer backward passes than backward_passes_per_step.

        Every rank of the process set calls this. With op=Adasum it does nothing: the step does.
        """
        wrapper = self._wrapper()
        if self._skips and wrapper is not None:
            wrapper.reducer.synchronize()
            self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which step() uses the gradients as they are; AssertionError with op=Adasum."""
        if not self._skips:
            raise AssertionError("skip_synchronize() is not for op=Adasum, where it is the steps that are combined")
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper.skip_reduction = True
        try:
            yield
        finally:
            if wrapper is not None:
                wrapper.skip_reduction = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients in every `passes`-th backward pass from now on; every rank of the set calls this."""
        _require_passes(passes)
        optimizer: Any = self._optimizer()
        optimizer.backward_passes_per_step = passes
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper.reducer.accumulate = passes

    def _before_step(self, *_: Any) -> None:
        wrapper = self._wrapper()
        if self._is_synchronized and wrapper is not None and not wrapper.skip_reduction:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                "gradients are reduced already, and are not reduced again",
                UserWarning,
                stacklevel=3,
            )
        self._is_synchronized = False


def _require_passes(passes: int) -> None:
    if passes <= 0:
        raise UsageError(f"backward_passes_per_step={passes}: backward_passes_per_step must be > 0")


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the named parameters, with Horovod's names if none were given."""
    if named_parameters is not None:
        return list(named_parameters)
    return [
        (f"allreduce.noname.{group_number}.{number}", param)
        for group_number, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
    ]


def _fused_groups(
    optimizer: torch.optim.Optimizer, groups: int | list[list[torch.Tensor]] | None
) -> Sequence[Sequence[torch.Tensor]]:
    """Return the parameters whose gradients are reduced together; the first groups have one more."""
    if groups is None:
        return ()
    if isinstance(groups, list):
        members = [param for group in groups for param in group]
        if not all(isinstance(param, torch.Tensor) for param in members):
            raise UsageError("groups takes lists of parameters: each entry is a list of torch tensors")
        if len({id(param) for param in members}) < len(members):
            raise UsageError("groups names a parameter twice: each belongs to one group")
        return groups
    if groups <= 0:
        raise UsageError(f"groups={groups}: expected a number above 0, or lists of parameters")
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    return [part for part in split_list(params, groups) if part]


def _compressor(compression: Any) -> AnyCompressor | None:
    """Return dualdist's form of Horovod's compressors, which compresses whole buckets, or a user's own."""
    if compression is Compression.none or compression is None:
        return None
    return CASTS["fp16"] if compression is Compression.fp16 else resolve_compressor(compression)
