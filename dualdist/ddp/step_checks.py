"""What wrap_optimizer(check_every=...) looks at before a step: one that should not be taken changes nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from dualdist.collectives.consistency import require_same
from dualdist.ddp.nonfinite import format_nonfinite, nonfinite_kinds
from dualdist.errors import NonFiniteError, UsageError

if TYPE_CHECKING:
    from dualdist.ddp.reducer import Reducer

# What torch's GradScaler sets on optimizers whose step() skips itself by it.
FOUND_INF = "found_inf"


class StepChecks:
    """Gradients are looked at before every step, parameters before every `every`-th, beginning with the first."""

    def __init__(self, reducer: Reducer, every: int) -> None:
        self._reducer = reducer
        self._every = every
        self._steps = 0  # that all ranks took: who has joined counts none
        self._seen = 0  # reductions, at the last step: a step may call that of its base class

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """NonFiniteError or DriftError on every rank where the step must not be taken."""
        reducer = self._reducer
        if reducer.reductions == self._seen:
            return
        self.gradients(optimizer)
        if not reducer.some_have_joined:  # whose parameters are left behind by design
            if self._steps % self._every == 0:
                self.parameters(self._steps)
            self._steps += 1
        self._seen = reducer.reductions  # now: a program that calls step() once more is refused once more

    def of_closure(self, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
        """For each time that a closure is called: parameters are what they were before the step at the first one."""
        yield functools.partial(self.before_step, optimizer)
        yield from itertools.repeat(functools.partial(self.gradients, optimizer))

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """NonFiniteError unless the program has put right what is to blame, or a loss scaler will pass it over."""
        reducer = self._reducer
        if not reducer.blamed or getattr(optimizer, FOUND_INF, None) is not None:
            return
        names = {id(param): name for name, param in reducer.named_parameters()}
        left = {
            names.get(id(param), f"parameter {number}"): kinds
            for number, kinds in reducer.blamed.items()
            if (param := reducer.parameter(number)) is not None and nonfinite_kinds(param.grad)
        }
        if left:
            raise NonFiniteError(
                f"gradients are not finite: {format_nonfinite(left, reducer.group.ranks)}. The step was not taken: "
                "parameters and the optimizer's state are as they were"
            )

    def parameters(self, step: int) -> None:
        """DriftError unless all ranks hold the same parameters."""
        reducer = self._reducer
        name = f"{reducer.name}.before_step.{step}"
        require_same(reducer.group, reducer.named_parameters(), name, f"before step {step + 1}, ")


def validate_check_every(every: int | None) -> int | None:
    """How often parameters are checked; UsageError unless that is None, or 1 or more."""
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise UsageError(f"check_every={every!r}: expected after how many steps parameters are compared, 1 or more")
    return every
