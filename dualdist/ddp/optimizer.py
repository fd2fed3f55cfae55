"""wrap_optimizer: attach a Reducer to an optimizer, whose class, state and checkpoints stay the same."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dualdist.backends.arithmetic import Op
from dualdist.backends.base import Backend
from dualdist.backends.operation import Stages
from dualdist.collectives.arguments import Reduction, check_reduction
from dualdist.collectives.broadcast_state import (
    broadcast_nested,
    count_running_steps,
    named_optimizer_params,
    optimizer_params,
)
from dualdist.collectives.collectives import allreduce, run_agreed
from dualdist.collectives.consistency import Options, digest, named_state, options_of
from dualdist.collectives.group import Group
from dualdist.collectives.tensor_utils import map_nested
from dualdist.ddp.adasum import DeltaSteps, closure_of
from dualdist.ddp.bucket_plan import ReducerConfig
from dualdist.ddp.compression import ErrorFeedback
from dualdist.ddp.error_feedback import redistribute
from dualdist.ddp.gradient_packer import NO_BACKWARD, current_backward
from dualdist.ddp.param_buckets import Errors
from dualdist.ddp.reducer import Reducer
from dualdist.ddp.sharding import StateSharding, require_shardable
from dualdist.ddp.step_checks import StepChecks
from dualdist.errors import UsageError
from dualdist.utils.suggest import require_choice, type_name

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
T = TypeVar("T")

WRAPPER = "_dualdist_wrapper"  # the attribute of a wrapped optimizer
COPY = "_dualdist_copy"  # and of a copy of it, or a pickled one, which reduces nothing until it is wrapped
_groups: weakref.WeakSet[Group] = weakref.WeakSet()  # in which optimizers were wrapped


def wrap_optimizer(
    group: Group,
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    config: ReducerConfig,
    accumulate: int,
    *,
    fused_groups: Sequence[Sequence[torch.Tensor]] = (),
    next_group: Callable[[], Group] | None = None,
    errors: Errors = contextlib.nullcontext,
) -> OptimizerT:
    """Reduce the gradients of the optimizer's parameters over the group, and return the optimizer.

    Gradients of each of the `fused_groups` share buckets. For `next_group` and `errors` see ParamBuckets.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"wrap_optimizer takes a torch optimizer, not {type_name(optimizer)}")
    config = _resolve_config(config, group)
    if not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate={accumulate!r}: expected the number of backwards before a reduction, 1 or more")
    if not group.is_member:
        raise UsageError(
            f"this process is not a member of the group of ranks {list(group.ranks)}: call this on its members only"
        )
    if config.shard:
        require_shardable(optimizer)
    former = get_wrapper(optimizer)
    if former is not None and former.reducer.group.is_open:
        raise UsageError("this optimizer is wrapped already: wrap_optimizer returns the same object, call it once")
    names = names_by_id(optimizer, named_parameters)
    if group.size > 1 and config.compares_start:
        _require_outside_ddp(optimizer)
    unwrap_optimizer(optimizer)  # from an earlier session
    optimizer.__dict__.pop(COPY, None)
    _groups.add(group)
    if group.size == 1 and config.op == "adasum":
        config = replace(config, op="mean")
    reference = weakref.ref(optimizer)  # Note [ownership]
    reducer = Reducer(
        group,
        lambda: optimizer_params(found) if (found := reference()) is not None else [],
        lambda: named_optimizer_params(reference(), names),
        lambda: _initial_options(found, config) if (found := reference()) is not None else {},
        config,
        accumulate,
        fused_groups=fused_groups,
        next_group=next_group,
        errors=errors,
    )
    reducer.update()
    _attach(reducer, optimizer)
    return optimizer


def _initial_options(optimizer: torch.optim.Optimizer, config: ReducerConfig) -> Options:
    """Return the optimizer's options, and a digest of its state if this rank has all of it."""
    state = [] if config.shard else [tensor for _, tensor in named_state(optimizer)]
    options = options_of(optimizer, has_all_state=not config.shard)
    return {**options, "the digest of the optimizer's state": digest(state)[:12]} if state else options


def _resolve_config(config: ReducerConfig, group: Group) -> ReducerConfig:
    """Return the configuration for this group; raise UsageError unless its values fit together."""
    require_choice(config.op, ("mean", "sum", "adasum"), "op", " for gradients")
    if config.op == "adasum" and (group.size & (group.size - 1) or config.gradient_predivide_factor != 1.0):
        raise UsageError(
            f"op 'adasum' needs a power of two ranks, not {group.size}, and gradient_predivide_factor=1.0, not "
            f"{config.gradient_predivide_factor}"
        )
    if not config.gradient_predivide_factor > 0:
        raise UsageError(f"gradient_predivide_factor={config.gradient_predivide_factor}: expected a number above 0")
    every = config.check_every
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise UsageError(f"check_every={every!r}: expected the number of steps between two checks, 1 or more")
    if config.shard and config.op == "adasum":
        raise UsageError(
            "shard=True with op='adasum', for which every rank steps on all parameters: choose one of the two"
        )
    if config.op == "adasum" and isinstance(config.compressor, ErrorFeedback):
        raise UsageError(
            f"op='adasum' with compression={config.compressor}: Adasum combines steps, and what is not sent of a step "
            "cannot be added to the next one; choose one of the two"
        )
    reduction = config.reduction or group.reduction
    check_reduction(reduction, config.op)
    if reduction == "ordered" and config.compressor is not None:
        raise UsageError(
            "reduction='ordered' with compression: what is compressed is added in the format in which it is sent; "
            "choose one of the two"
        )
    return replace(config, reduction=reduction)


@dataclass
class OptimizerWrapper:
    """An attribute of a wrapped optimizer: its reducer, and a function that unwraps it."""

    reducer: Reducer
    unwrap: Callable[[], None]
    sharding: StateSharding | None = None
    skip_reduction: bool = False  # steps use the gradients as they are


def get_wrapper(optimizer: object) -> OptimizerWrapper | None:
    """Return the optimizer's wrapper, if any; copies and pickles have none."""
    return getattr(optimizer, WRAPPER, None)


def is_sharded(optimizer: object) -> bool:
    """Return True for an optimizer of which this rank has a part of the state: its state_dict() is a collective."""
    wrapper = get_wrapper(optimizer)
    return wrapper is not None and wrapper.sharding is not None and wrapper.sharding.is_partial


def require_whole_state(optimizer: torch.optim.Optimizer, action: str) -> None:
    """Raise UsageError if this rank has a part of the optimizer's state."""
    if is_sharded(optimizer):
        raise UsageError(f"this rank has a part of the optimizer's state, as it was wrapped with shard=True: {action}")


def get_sent_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return how many bytes of gradients, without flags, this rank gave to the last reduction of each optimizer."""
    wrappers = [get_wrapper(optimizer) for optimizer in optimizers]
    return sum(wrapper.reducer.sent_bytes for wrapper in wrappers if wrapper is not None)


def get_residuals(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return a copy of what this rank has not sent of its gradients, in CPU memory; None without error feedback."""
    wrapper = get_wrapper(optimizer)
    own = None if wrapper is None else wrapper.reducer.export_feedback()
    return own and map_nested(own, torch.Tensor, lambda each: each.to("cpu", copy=True))


def gather_residuals(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]] | None:
    """Return get_residuals() of all ranks, on rank 0; every rank calls this."""
    wrapper, own = get_wrapper(optimizer), get_residuals(optimizer)
    if wrapper is None or own is None or not wrapper.reducer.group.is_usable:
        return None
    group, name = wrapper.reducer.group, f"{wrapper.reducer.name}.residuals"

    def perform(backend: Backend) -> Stages[list[dict[str, Any]]]:
        found = []
        for root in range(backend.size):
            part = yield from broadcast_nested(backend, own, root, torch.device("cpu"), f"{name}.{root}")
            found += [part] if backend.rank == 0 else []
        return found

    found: list[dict[str, Any]] = run_agreed(group, "save of what compression has not sent", name, {}, perform)
    return found


def set_residuals(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Set what this rank has not sent: from get_residuals(), or its part of gather_residuals(); None for nothing."""
    wrapper = get_wrapper(optimizer)
    if wrapper is not None:
        reducer = wrapper.reducer
        if isinstance(saved, list):
            saved = redistribute(saved, reducer.group.rank, reducer.group.size, reducer.config.op)
        reducer.load_feedback(saved)


def move_to_group(optimizers: Iterable[torch.optim.Optimizer], group: Group) -> None:
    """Reduce the wrapped ones in this group, as if they had been wrapped there in the same order.

    Every rank of the group calls this, or wrap_optimizer for each of them.
    """
    wrappers = [wrapper for optimizer in optimizers if (wrapper := get_wrapper(optimizer)) is not None]
    for wrapper in sorted(wrappers, key=lambda wrapper: wrapper.reducer.number):
        wrapper.reducer.move_to_group(group)
        if wrapper.sharding is not None:
            wrapper.sharding.assign()


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer a plain one again; every rank that wrapped it calls this."""
    wrapper = get_wrapper(optimizer)
    if wrapper is not None:
        require_whole_state(
            optimizer,
            "before dd.shutdown() keep its state_dict(), which every rank calls, and load that before wrapping again",
        )
        wrapper.unwrap()


def _attach(reducer: Reducer, optimizer: torch.optim.Optimizer) -> None:
    """Hook the reducer to the optimizer's steps, zero_grad and add_param_group; copies and pickles have none of it."""
    add_param_group, zero_grad = _weakly(optimizer.add_param_group), _weakly(optimizer.zero_grad)

    @functools.wraps(optimizer.add_param_group)
    def add_and_reduce(param_group: dict[str, Any]) -> None:
        add_param_group()(param_group)
        reducer.update()

    @functools.wraps(optimizer.zero_grad)
    def zero_and_reset(*args: Any, **kwargs: Any) -> None:
        reducer.prepare_zero_grad()
        zero_grad()(*args, **kwargs)
        reducer.reset_step()  # also after a skipped step, as by GradScaler after an overflow

    get_state = _weakly(optimizer.__getstate__)

    def mark_copy() -> dict[str, Any]:
        return {**get_state()(), COPY: True}

    for function in (add_and_reduce, zero_and_reset):
        del function.__wrapped__  # the optimizer's method: Note [ownership]
    reference = weakref.ref(optimizer)
    sharding = StateSharding(reducer, optimizer) if reducer.config.shard else None
    attributes = {"add_param_group": add_and_reduce, "zero_grad": zero_and_reset, "__getstate__": mark_copy}

    def unwrap() -> None:
        if unshard is not None:
            unshard()
        before.remove()
        after.remove()
        for name in (*attributes, WRAPPER):
            delattr(reference(), name)
        reducer.detach()

    wrapper = OptimizerWrapper(reducer, unwrap, sharding)
    every = reducer.config.check_every
    checks = None if every is None else StepChecks(reducer, every)
    is_adasum = reducer.config.op == "adasum"
    steps = DeltaSteps(reducer, checks) if is_adasum else _ReducedSteps(wrapper, checks)
    before = optimizer.register_step_pre_hook(steps.before)
    unshard = None if sharding is None else sharding.attach(optimizer)
    after = optimizer.register_step_post_hook(steps.after)
    # Ours first, so that the user's see the combined steps; private to torch: tests/unit/test_torch_private_names.py.
    after_step = optimizer._optimizer_step_post_hooks
    after_step |= {number: after_step.pop(number) for number in list(after_step) if number != after.id}
    for name, value in {**attributes, WRAPPER: wrapper}.items():
        setattr(optimizer, name, value)  # on this object, not on its class


def _refuse_copy(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise UsageError in the step of a copy, which would be one on this rank's own gradients."""
    if COPY in optimizer.__dict__ and any(group.is_open and group.size > 1 for group in _groups):
        raise UsageError(
            "this optimizer is a copy of one that dd.wrap_optimizer wrapped, and reduces no gradients: call "
            "dd.wrap_optimizer(copy) on every rank; to train it on one rank, load its state_dict() into a new optimizer"
        )


register_optimizer_step_pre_hook(_refuse_copy)


def _weakly(method: Callable[..., T]) -> Callable[[], Callable[..., T]]:
    """Return a function that returns a method of the optimizer, or a function that took its place."""
    if isinstance(method, MethodType):
        return cast(Callable[[], Callable[..., T]], weakref.WeakMethod(method))
    return lambda: method


class _ReducedClosure(functools.partial[Any]):
    """A step's closure that also reduces the gradients and its loss."""


class _ReducedSteps:
    """The hooks before and after an optimizer's step: ensure that gradients are reduced, then begin the next step.

    A step that calls that of its base class runs the hooks twice; the inner ones have no effect.
    """

    def __init__(self, wrapper: OptimizerWrapper, checks: StepChecks | None) -> None:
        self._wrapping = wrapper
        self._checks = checks
        # Once more, as the model may have been put into DDP after its optimizer was wrapped.
        self._must_look_for_ddp = wrapper.reducer.group.size > 1 and wrapper.reducer.config.compares_start

    def before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._must_look_for_ddp:
            _require_outside_ddp(optimizer)
            self._must_look_for_ddp = False
        closure = closure_of(args, kwargs)
        if self._wrapping.skip_reduction or isinstance(closure, _ReducedClosure):
            return None
        if closure is None:
            if current_backward() != NO_BACKWARD and count_running_steps(optimizer) > 1:
                return None
            self._wrapping.reducer.synchronize()
            if self._checks is not None:
                self._checks.before_step(optimizer)
            return None
        # The closure will run backward, several times with LBFGS.
        reduced = _ReducedClosure(self._run_closure, optimizer, closure, itertools.count())
        if len(args) > 1:
            return (args[0], reduced, *args[2:]), kwargs
        return args, {**kwargs, "closure": reduced}

    def after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._wrapping.sharding is not None:
            self._wrapping.sharding.finish_step(optimizer)
        self._wrapping.reducer.finish_step()

    def _run_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], calls: Iterator[int]) -> Any:
        """Run a step's closure, and reduce the gradients and its loss; parameters are checked in the first call."""
        reducer, sharding = self._wrapping.reducer, self._wrapping.sharding
        if sharding is not None:
            sharding.end_step(optimizer)
        loss = closure()
        reducer.synchronize()
        if self._checks is not None:
            check = self._checks.before_step if next(calls) == 0 else self._checks.check_gradients
            check(optimizer)
        reducer.finish_step()
        if sharding is not None:
            sharding.begin_step(optimizer)
        with reducer.errors():
            return _reduced_loss(reducer.group, loss, reducer.config.op, reducer.config.reduction)


def _reduced_loss(group: Group, loss: Any, op: Op, reduction: Reduction | None) -> Any:
    """Reduce a closure's loss as the gradients are, so that LBFGS's line search decides alike on all ranks.

    A loss that is not a number, such as None, is returned as it is; MismatchError if only some ranks have a number.
    """
    kind = "loss" if isinstance(loss, (torch.Tensor, Real)) else type(loss).__name__
    name = f"the closure's {kind}, {group.next_name('loss')}"
    if kind != "loss":
        # An allreduce, which works while other ranks have joined.
        allreduce(group, torch.empty(0), op, name).run()
        return loss
    if not isinstance(loss, torch.Tensor):
        value = torch.tensor(float(loss), dtype=torch.float64)
        return allreduce(group, value, op, name, reduction=reduction).run().item()
    is_divisible = loss.is_floating_point() or loss.is_complex()
    return allreduce(group, loss if is_divisible else loss.double(), op, name, reduction=reduction).run()


def _require_outside_ddp(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if a DistributedDataParallel has some of the parameters, which torch records nowhere else."""
    kinds = (DistributedDataParallel, *DistributedDataParallel.__subclasses__())
    models = [each for each in gc.get_referrers(*kinds) if isinstance(each, DistributedDataParallel)]
    reduced = {id(param) for model in models for param in model.parameters()}
    if any(id(param) in reduced for param in optimizer_params(optimizer)):
        raise UsageError(
            "DistributedDataParallel reduces the gradients of this optimizer's parameters already: leave the optimizer "
            "unwrapped, or the model"
        )


def names_by_id(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str]:
    """Return names by id of the parameter; UsageError unless they cover all of the optimizer's parameters."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError("named_parameters takes pairs of a name and a parameter: pass model.named_parameters()")
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"named_parameters gives the name {repeated!r} to several parameters: names must be unique")
    by_id = {id(param): name for name, param in pairs}
    missing = [name for name, param in named_optimizer_params(optimizer) if id(param) not in by_id]
    if missing:
        raise UsageError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters (the first is {missing[0]}): "
            "pass model.named_parameters() of the whole model, or leave it out"
        )
    return by_id
