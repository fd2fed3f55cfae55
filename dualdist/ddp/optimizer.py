"""wrap_optimizer: the same optimizer, whose gradients are averaged over all ranks by the time backward() returns."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeVar

import torch

from dualdist.collectives.collectives import allreduce
from dualdist.collectives.group import Group
from dualdist.collectives.reductions import Op
from dualdist.ddp.adasum import DeltaSteps, closure_of
from dualdist.ddp.bucket_plan import ReducerConfig
from dualdist.ddp.nonfinite import StepChecks
from dualdist.ddp.reducer import Errors, Reducer
from dualdist.errors import UsageError

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

WRAPPER = "_dualdist_wrapper"  # the attribute of a wrapped optimizer


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
    """Reduce the gradients of the optimizer's parameters; returns the optimizer, which stays what it was.

    `fused_groups` are parameters whose gradients travel together. For `next_group` and `errors` see Reducer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"wrap_optimizer takes a torch optimizer, not a {type(optimizer).__name__}")
    if config.op not in ("mean", "sum", "adasum"):
        raise UsageError(f"op {config.op!r}: gradients are reduced by 'mean', 'sum' or 'adasum'")
    if config.op == "adasum" and (group.size & (group.size - 1) or config.gradient_predivide_factor != 1.0):
        raise UsageError(
            f"op 'adasum' pairs the ranks, and divides nothing: expected a power of two of them, not {group.size}, and "
            f"gradient_predivide_factor=1.0, not {config.gradient_predivide_factor}"
        )
    if not config.gradient_predivide_factor > 0:
        raise UsageError(f"gradient_predivide_factor={config.gradient_predivide_factor}: expected a number above 0")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate={accumulate!r}: expected the number of backwards before a reduction, 1 or more")
    if not group.is_member:
        raise UsageError(f"this process is no member of the group of ranks {list(group.ranks)}: let only those call")
    before = get_wrapper(optimizer)
    if before is not None and before.reducer.group.is_open:
        raise UsageError("this optimizer is wrapped already: wrap_optimizer returns the same object, call it once")
    given = names_by_id(optimizer, named_parameters)
    unwrap_optimizer(optimizer)  # it was wrapped in an earlier session
    if group.size == 1 and config.op == "adasum":
        config = replace(config, op="mean")
    reference = weakref.ref(optimizer)  # Note [who keeps whom]
    reducer = Reducer(
        group,
        lambda: optimizer_params(reference()),
        lambda: named_optimizer_params(reference(), given),
        config,
        accumulate,
        fused_groups=fused_groups,
        next_group=next_group,
        errors=errors,
    )
    reducer.update()
    _attach(reducer, config, optimizer)
    return optimizer


@dataclass
class OptimizerWrapper:
    """What a wrapped optimizer carries: its reducer, and what takes the wrapper off again."""

    reducer: Reducer
    undo: Callable[[], None]
    skip_reduction: bool = False  # the next steps take the gradients as they are


def get_wrapper(optimizer: torch.optim.Optimizer) -> OptimizerWrapper | None:
    """The optimizer's wrapper, if it has one; copies and pickles have none."""
    return getattr(optimizer, WRAPPER, None)


def get_reduction_order(optimizer: torch.optim.Optimizer) -> list[int] | None:
    """The order in which the gradients of a wrapped optimizer travel, where that is settled."""
    wrapper = get_wrapper(optimizer)
    return None if wrapper is None else wrapper.reducer.order


def set_reduction_order(optimizer: torch.optim.Optimizer, order: Sequence[int]) -> None:
    """Another run's order for a wrapped optimizer; every rank calls this, between two steps. See Reducer."""
    wrapper = get_wrapper(optimizer)
    if wrapper is not None:
        wrapper.reducer.settle_order(order)


def move_to_group(optimizers: Iterable[torch.optim.Optimizer], group: Group) -> None:
    """Those that are wrapped reduce in this group from now on, as if they had been wrapped there, in the same order.

    Every rank of the group calls this, or wrap_optimizer for each.
    """
    reducers = [wrapper.reducer for optimizer in optimizers if (wrapper := get_wrapper(optimizer)) is not None]
    for reducer in sorted(reducers, key=lambda reducer: reducer.number):
        reducer.follow(group)


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer is a plain one again; every rank that wrapped it calls this."""
    wrapper = get_wrapper(optimizer)
    if wrapper is not None:
        wrapper.undo()


def _attach(reducer: Reducer, config: ReducerConfig, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer tell the reducer of its steps and new parameters. Pickles and copies do not carry this."""
    add_param_group, zero_grad = optimizer.add_param_group, optimizer.zero_grad

    @functools.wraps(add_param_group)
    def add_and_reduce(param_group: dict[str, Any]) -> None:
        add_param_group(param_group)
        reducer.update()

    @functools.wraps(zero_grad)
    def zero_and_start_anew(*args: Any, **kwargs: Any) -> None:
        zero_grad(*args, **kwargs)
        reducer.reset_step()  # also where the step was skipped, as GradScaler does after an overflow

    attributes = {"add_param_group": add_and_reduce, "zero_grad": zero_and_start_anew}

    def undo() -> None:
        before.remove()
        after.remove()
        for name in (*attributes, WRAPPER):
            delattr(optimizer, name)
        reducer.detach()

    wrapper = OptimizerWrapper(reducer, undo)
    checks = None if config.check_every is None else StepChecks(reducer, config.check_every)
    steps: DeltaSteps | _ReducedSteps = _ReducedSteps(wrapper, config.op, checks)
    if config.op == "adasum":
        steps = DeltaSteps(reducer, config.compressor, checks)
    before = optimizer.register_step_pre_hook(steps.before)
    after = optimizer.register_step_post_hook(steps.after)
    after_step = optimizer._optimizer_step_post_hooks  # ours goes first: the user's see the combined steps
    after_step |= {number: after_step.pop(number) for number in list(after_step) if number != after.id}
    for name, value in {**attributes, WRAPPER: wrapper}.items():
        setattr(optimizer, name, value)  # this object's, not its class's


class _ReducedSteps:
    """The two hooks of an optimizer's step: the gradients are reduced before it, and used after it.

    A step that calls that of its base class runs the hooks twice; the inner ones change nothing.
    """

    def __init__(self, wrapper: OptimizerWrapper, op: Op, checks: StepChecks | None) -> None:
        self._wrapping = wrapper
        self._op = op
        self._checks = checks

    def before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = closure_of(args, kwargs)
        if self._wrapping.skip_reduction or isinstance(closure, _ReducedClosure):
            return None
        if closure is None:
            self._wrapping.reducer.synchronize()
            if self._checks is not None:
                self._checks.before_step(optimizer)
            return None
        # With a closure, the backward is yet to come, and LBFGS runs several.
        checks = () if self._checks is None else self._checks.of_closure(optimizer)
        reduced = _ReducedClosure(self._wrapping.reducer, closure, self._op, iter(checks))
        if len(args) > 1:
            return (args[0], reduced, *args[2:]), kwargs
        return args, {**kwargs, "closure": reduced}

    def after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._wrapping.reducer.reset_step()


class _ReducedClosure:
    """A closure after which the gradients are reduced, on every rank, and its loss as they are."""

    def __init__(
        self, reducer: Reducer, closure: Callable[[], Any], op: Op, checks: Iterator[Callable[[], None]]
    ) -> None:
        self._reducer = reducer
        self._closure = closure
        self._op = op
        self._checks = checks

    def __call__(self) -> Any:
        loss = self._closure()
        self._reducer.synchronize()
        for check in itertools.islice(self._checks, 1):
            check()
        self._reducer.reset_step()
        with self._reducer.errors():
            return _reduced_loss(self._reducer.group, loss, self._op)


def _reduced_loss(group: Group, loss: Any, op: Op) -> Any:
    """A closure's loss, reduced as the gradients are: LBFGS's line search looks at both, and all ranks decide alike.

    What is no number, such as None, stays as it is. MismatchError on every rank where only some have a number.
    """
    kind = "loss" if isinstance(loss, (torch.Tensor, Real)) else type(loss).__name__
    name = f"the closure's {kind}, {group.next_name('loss')}"
    if kind != "loss":
        # An allreduce, for it takes place where other ranks have joined.
        allreduce(group, torch.empty(0), op, name).wait()
        return loss
    if not isinstance(loss, torch.Tensor):
        return allreduce(group, torch.tensor(float(loss), dtype=torch.float64), op, name).wait().item()
    is_divisible = loss.is_floating_point() or loss.is_complex()
    return allreduce(group, loss if is_divisible else loss.double(), op, name).wait()


def names_by_id(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str]:
    """Names by the identity of the parameter; UsageError unless they are for all of the optimizer's parameters."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError("named_parameters takes pairs of a name and a parameter: pass model.named_parameters()")
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"named_parameters gives the name {twice!r} to several parameters: names are unique")
    given = {id(param): name for name, param in pairs}
    missing = [name for name, param in named_optimizer_params(optimizer, {}) if id(param) not in given]
    if missing:
        raise UsageError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters (the first is {missing[0]}): "
            "pass model.named_parameters() of the whole model, or leave it out"
        )
    return given


def optimizer_params(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The optimizer's parameters; none where it was dropped."""
    return [] if optimizer is None else [param for group in optimizer.param_groups for param in group["params"]]


def named_optimizer_params(
    optimizer: torch.optim.Optimizer | None, names: dict[int, str]
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters, each with its given name or its place in the groups; none where it was dropped."""
    return [
        (names.get(id(param), f"group {group_number}, parameter {number}"), param)
        for group_number, group in enumerate(optimizer.param_groups if optimizer is not None else [])
        for number, param in enumerate(group["params"])
    ]
