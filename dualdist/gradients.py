"""wrap_optimizer: the same optimizer, whose gradients are averaged over all ranks by the time backward() returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dualdist.buckets import Recipe
from dualdist.collectives import allreduce
from dualdist.errors import UsageError
from dualdist.group import Group
from dualdist.reducer import Reducer

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

WRAPPING = "_dualdist_wrapping"  # the attribute of a wrapped optimizer


def wrap_optimizer(
    group: Group,
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    recipe: Recipe,
    accumulate: int,
    together: Sequence[Sequence[torch.Tensor]] = (),
) -> OptimizerT:
    """Reduce the gradients of the optimizer's parameters; returns the optimizer, which stays what it was."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"wrap_optimizer takes a torch optimizer, not a {type(optimizer).__name__}")
    if recipe.op not in ("mean", "sum", "adasum"):
        raise UsageError(f"op {recipe.op!r}: gradients are reduced by 'mean', 'sum' or 'adasum'")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate={accumulate!r}: expected the number of backwards before a reduction, 1 or more")
    before = wrapping_of(optimizer)
    if before is not None and before.reducer.group.is_open:
        raise UsageError("this optimizer is wrapped already: wrap_optimizer returns the same object, call it once")
    if before is not None:
        before.undo()  # it was wrapped in an earlier session
    given = _given_names(named_parameters)
    missing = [name for name, param in _with_names(optimizer, {}) if given and id(param) not in given]
    if missing:
        raise UsageError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters (the first is {missing[0]}): "
            "pass model.named_parameters() of the whole model, or leave it out"
        )
    if recipe.op == "adasum":
        raise NotImplementedError
    reducer = Reducer(group, lambda: _with_names(optimizer, given), recipe, accumulate, together)
    reducer.update()
    _attach(reducer, optimizer)
    return optimizer


@dataclass
class Wrapping:
    """What a wrapped optimizer carries: its reducer, and what takes the wrapping off again."""

    reducer: Reducer
    undo: Callable[[], None]
    steps_alone: bool = False  # the next steps take the gradients as they are


def wrapping_of(optimizer: torch.optim.Optimizer) -> Wrapping | None:
    """The optimizer's wrapping, if it has one; copies and pickles have none."""
    return getattr(optimizer, WRAPPING, None)


def _attach(reducer: Reducer, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer tell the reducer of its steps and new parameters. Pickles and copies do not carry this."""

    def before_step(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if wrapping.steps_alone:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            reducer.before_step()
            return None

        def reduced_closure() -> Any:
            loss = closure()
            reducer.before_step()
            return _mean_loss(reducer.group, loss)

        # With a closure, the backward is yet to come, and LBFGS runs several.
        return args[:1], {**kwargs, "closure": reduced_closure}

    add_param_group, zero_grad = optimizer.add_param_group, optimizer.zero_grad

    def add_and_reduce(param_group: dict[str, Any]) -> None:
        add_param_group(param_group)
        reducer.update()

    def zero_and_start_anew(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        reducer.start_anew()  # also where the step was skipped, as GradScaler does after an overflow

    handle = optimizer.register_step_pre_hook(before_step)
    attributes = {"add_param_group": add_and_reduce, "zero_grad": zero_and_start_anew}

    def undo() -> None:
        handle.remove()
        for name in (*attributes, WRAPPING):
            delattr(optimizer, name)

    wrapping = Wrapping(reducer, undo)
    for name, value in {**attributes, WRAPPING: wrapping}.items():
        setattr(optimizer, name, value)  # this object's, not its class's


def _mean_loss(group: Group, loss: Any) -> Any:
    """A closure's loss, averaged, so that all ranks decide alike (LBFGS's line search looks at it)."""
    if not isinstance(loss, (torch.Tensor, float)):
        return loss
    value = torch.as_tensor(loss, dtype=None if isinstance(loss, torch.Tensor) else torch.float64)
    mean = allreduce(group, value, "mean").wait()
    return mean if isinstance(loss, torch.Tensor) else mean.item()


def _given_names(named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> dict[int, str]:
    pairs = list(named_parameters or ())
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError("named_parameters takes pairs of a name and a parameter: pass model.named_parameters()")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UsageError(f"named_parameters gives the name {twice[0]!r} to several parameters: names are unique")
    return {id(param): name for name, param in pairs}


def _with_names(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters, each with its given name or its place in the groups."""
    return [
        (names.get(id(param), f"group {group_number}, parameter {number}"), param)
        for group_number, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
    ]
