"""wrap_optimizer: attach a Reducer to an optimizer, whose class, state and checkpoints stay the same."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dualdist.backends.arithmetic import Op
from dualdist.backends.base import Backend
from dualdist.backends.operation import Stages
from dualdist.collectives.arguments import Reduction
from dualdist.collectives.broadcast_state import (
    broadcast_nested,
    named_optimizer_params,
    optimizer_params,
)
from dualdist.collectives.collectives import allreduce, run_agreed
from dualdist.collectives.ddp_models import params_in_ddp
from dualdist.collectives.group import Group
from dualdist.collectives.tensor_utils import map_nested
from dualdist.ddp.adasum import AdasumStrategy, DeltaSteps
from dualdist.ddp.bucket import BucketStrategy
from dualdist.ddp.compression import ErrorFeedback
from dualdist.ddp.config import ReducerConfig, resolve_config
from dualdist.ddp.error_feedback import FeedbackStrategy, redistribute
from dualdist.ddp.parameters import Errors, ParamSource
from dualdist.ddp.reducer import Reducer
from dualdist.ddp.sharding import StateSharding, closure_of, require_shardable
from dualdist.ddp.step_checks import StepChecks
from dualdist.errors import UsageError
from dualdist.utils.suggest import type_name

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

    Gradients of each of the `fused_groups` share buckets. For `next_group` and `errors` see Reducer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"wrap_optimizer takes a torch optimizer, not {type_name(optimizer)}")
    config = resolve_config(config, group.size, group.reduction)
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
    reducer = Reducer(
        group,
        ParamSource(optimizer, names, has_all_state=not config.shard),
        config,
        _strategy_of(config),
        accumulate,
        fused_groups=fused_groups,
        next_group=next_group,
        errors=errors,
    )
    reducer.update()
    OptimizerWrapper(optimizer, reducer)
    return optimizer


def _strategy_of(config: ReducerConfig) -> type[BucketStrategy]:
    """Return what happens to a full bucket."""
    if config.op == "adasum":
        return AdasumStrategy
    return FeedbackStrategy if isinstance(config.compressor, ErrorFeedback) else BucketStrategy


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
    own = None if wrapper is None else wrapper.reducer.registry.export_state()
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
        reducer.registry.load_state(saved)


def move_to_group(optimizers: Iterable[torch.optim.Optimizer], group: Group) -> None:
    """Reduce the wrapped ones in this group, as if they had been wrapped there in the same order.

    Every rank of the group calls this, or wrap_optimizer for each of them.
    """
    wrappers = [wrapper for optimizer in optimizers if (wrapper := get_wrapper(optimizer)) is not None]
    for wrapper in sorted(wrappers, key=lambda wrapper: wrapper.reducer.number):
        wrapper.move_to_group(group)


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer a plain one again; every rank that wrapped it calls this."""
    wrapper = get_wrapper(optimizer)
    if wrapper is not None:
        require_whole_state(
            optimizer,
            "before dd.shutdown() keep its state_dict(), which every rank calls, and load that before wrapping again",
        )
        wrapper.unwrap()


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


class OptimizerWrapper:
    """An attribute of a wrapped optimizer: what its steps, zero_grad() and add_param_group() do besides.

    It does not keep the optimizer alive: Note [ownership]. A step that calls that of its base class runs the hooks
    twice; the inner ones have no effect.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
        config = reducer.config
        self.reducer = reducer
        self.sharding = StateSharding(reducer, optimizer) if config.shard else None
        self.skip_reduction = False  # steps use the gradients as they are
        self._deltas = DeltaSteps(reducer) if config.op == "adasum" else None
        self._checks = None if config.check_every is None else StepChecks(reducer, config.check_every)
        # In the first step once more, as the model may have been put into DDP after its optimizer was wrapped.
        self._must_look_for_ddp = reducer.group.size > 1 and config.compares_start
        self._optimizer = weakref.ref(optimizer)
        before = optimizer.register_step_pre_hook(self._before_step)
        unshard = None if self.sharding is None else self.sharding.attach(optimizer)
        after = optimizer.register_step_post_hook(self._after_step)
        # Ours first, so that the user's see the combined steps; private to torch:
        # tests/unit/test_torch_private_names.py.
        after_step = optimizer._optimizer_step_post_hooks
        after_step |= {number: after_step.pop(number) for number in list(after_step) if number != after.id}
        self._undo = [*([] if unshard is None else [unshard]), before.remove, after.remove]
        methods = self._methods(optimizer)
        self._names = [*methods, WRAPPER]
        for name, value in {**methods, WRAPPER: self}.items():
            setattr(optimizer, name, value)  # on this object, not on its class

    def _methods(self, optimizer: torch.optim.Optimizer) -> dict[str, Callable[..., Any]]:
        """Return methods of the optimizer that call the reducer, too; copies and pickles have none of them."""
        reducer = self.reducer
        add_param_group, zero_grad = _weakly(optimizer.add_param_group), _weakly(optimizer.zero_grad)
        get_state = _weakly(optimizer.__getstate__)

        @functools.wraps(optimizer.add_param_group)
        def add_and_reduce(param_group: dict[str, Any]) -> None:
            add_param_group()(param_group)
            reducer.update()

        @functools.wraps(optimizer.zero_grad)
        def zero_and_reset(*args: Any, **kwargs: Any) -> None:
            reducer.prepare_zero_grad()
            zero_grad()(*args, **kwargs)
            reducer.reset_step()  # also after a skipped step, as by GradScaler after an overflow

        def mark_copy() -> dict[str, Any]:
            return {**get_state()(), COPY: True}

        for function in (add_and_reduce, zero_and_reset):
            del function.__wrapped__  # the optimizer's method: Note [ownership]
        return {"add_param_group": add_and_reduce, "zero_grad": zero_and_reset, "__getstate__": mark_copy}

    def unwrap(self) -> None:
        """Make the optimizer a plain one again."""
        for undo in self._undo:
            undo()
        for name in self._names:
            delattr(self._optimizer(), name)
        self.reducer.registry.detach()

    def move_to_group(self, group: Group) -> None:
        """Reduce in another group."""
        self.reducer.move_to_group(group)
        if self.sharding is not None:
            self.sharding.assign()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Ensure that the gradients are reduced: those that are there, or those of the step's closure."""
        if self._must_look_for_ddp:
            _require_outside_ddp(optimizer)
            self._must_look_for_ddp = False
        closure = closure_of(args, kwargs)
        if closure is None and not self.skip_reduction:
            self.reducer.synchronize()
            if self._checks is not None:
                self._checks.before_step(optimizer)
        if self._deltas is not None:  # with a closure each rank runs its own backwards
            self._deltas.before_step(optimizer, has_closure=closure is not None)
            return None
        if closure is None or self.skip_reduction or isinstance(closure, _ReducedClosure):
            return None
        # The closure will run backward, several times with LBFGS.
        reduced = _ReducedClosure(self._run_closure, optimizer, closure, itertools.count())
        if len(args) > 1:
            return (args[0], reduced, *args[2:]), kwargs
        return args, {**kwargs, "closure": reduced}

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the next step."""
        if self._deltas is not None:
            self._deltas.after_step()
        if self.sharding is not None:
            self.sharding.finish_step(optimizer)
        self.reducer.finish_step()

    def _run_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], calls: Iterator[int]) -> Any:
        """Run a step's closure, and reduce the gradients and its loss; parameters are checked in the first call."""
        reducer, sharding = self.reducer, self.sharding
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
    """Raise UsageError if a DistributedDataParallel has some of the parameters."""
    reduced = params_in_ddp()
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
