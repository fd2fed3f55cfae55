"""Checks before an optimizer step: NaN and infinite gradients, and parameters that differ between ranks."""

from __future__ import annotations

import torch

from dualdist.collectives.consistency import options_of, require_same
from dualdist.ddp.nonfinite import format_nonfinite, nonfinite_kinds
from dualdist.ddp.reducer import Reducer
from dualdist.errors import NonFiniteError

# Set by torch's GradScaler on optimizers whose step() skips itself.
FOUND_INF = "found_inf"


class StepChecks:
    """Check gradients before every step, and parameters before every `every`-th, beginning with the first."""

    def __init__(self, reducer: Reducer, every: int) -> None:
        self._reducer = reducer
        self._every = every
        self._steps = 0  # by all ranks: steps while some ranks have joined do not count
        self._checked_reductions = 0  # at the last step, as a step may call that of its base class

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise NonFiniteError or DriftError on every rank if the step must not be taken."""
        reducer = self._reducer
        if reducer.num_reductions == self._checked_reductions:
            return
        self.check_gradients(optimizer)
        if not reducer.has_joined_ranks:  # their parameters are not updated
            if self._steps % self._every == 0:
                name = f"{reducer.name}.before_step.{self._steps}"
                options = options_of(optimizer, has_all_state=not reducer.config.shard)
                tensors = reducer.registry.tensors_in_order()
                require_same(reducer.group, tensors, name, options, f"before step {self._steps + 1}, ")
            self._steps += 1
        self._checked_reductions = reducer.num_reductions  # last, so that a repeated step() raises again

    def check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise NonFiniteError unless the program has replaced the gradients, or a loss scaler will skip the step."""
        reducer = self._reducer
        if not reducer.nonfinite or getattr(optimizer, FOUND_INF, None) is not None:
            return
        names = {id(param): name for name, param in reducer.registry.source.named()}
        remaining = {
            names.get(id(param), f"parameter {number}"): kinds
            for number, kinds in reducer.nonfinite.items()
            if (param := reducer.registry.owned[number]) is not None and nonfinite_kinds(param.grad)
        }
        if remaining:
            raise NonFiniteError(
                f"gradients are not finite: {format_nonfinite(remaining, reducer.group.ranks)}. The step was not "
                "taken: parameters and the optimizer's state are unchanged"
            )
