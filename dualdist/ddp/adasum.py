"""op="adasum" for an optimizer: every rank steps on its own gradients, and the steps are combined by Adasum.

Adasum is meant for steps, not for gradients, where the optimizer is more than plain SGD (Maleki et al., "Scaling
Distributed Training with Adaptive Summation", MLSys 2021, section 4). So nothing is reduced in a backward; but the
ranks tell each other which gradients are not finite, so that a loss scaler skips a step on all ranks or on none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dualdist.collectives.collectives import grouped_allreduce
from dualdist.ddp.bucket_plan import BUCKET_FLAGS, BucketPlan, ReducerConfig
from dualdist.ddp.buckets import Bucket

if TYPE_CHECKING:
    from dualdist.backends.base import Backend
    from dualdist.ddp.compression import GradientCompressor
    from dualdist.ddp.nonfinite import StepChecks
    from dualdist.ddp.reducer import Reducer


class AdasumBucket(Bucket):
    """Carries no gradients, only two flags for each: "I had one" and "it is not finite"."""

    def __init__(self, plan: BucketPlan, config: ReducerConfig, line: Backend, dense: set[int]) -> None:
        super().__init__(plan, ReducerConfig("sum"), line, dense)

    def put_back(self, params: Sequence[torch.Tensor]) -> list[tuple[int, bool]]:
        """A gradient that is not finite on some rank is NaN on all of them."""
        for param, (_, is_spoilt) in zip(params, self.read_flags(), strict=True):
            if is_spoilt and param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.mul(math.nan)
            elif is_spoilt:
                param.grad = torch.full_like(param, math.nan)
        return []

    def reduced_values(self) -> torch.Tensor:
        """Not finite where a gradient is not on some rank."""
        is_spoilt = self._done_flat().tail[len(self.plan.shapes) : -len(BUCKET_FLAGS)] > 0
        return torch.where(is_spoilt, math.inf, 0.0)

    def nonfinite_members(self) -> list[int]:
        return [number for number, (_, is_spoilt) in enumerate(self.read_flags()) if is_spoilt]

    def to_reduce_apart(self, told: Sequence[tuple[bool, bool]]) -> list[tuple[int, bool]]:
        return []

    def _flags(self, grads: Sequence[torch.Tensor | None], flag: int) -> torch.Tensor:
        flags = torch.zeros(2 * len(grads) + len(BUCKET_FLAGS), dtype=torch.float32, device=self.plan.device)
        flags[flag] = 1.0
        values = {n: grad._values() if grad.is_sparse else grad for n, grad in enumerate(grads) if grad is not None}
        numbers = [number for number, value in values.items() if value.numel()]
        if numbers:
            norms = torch._foreach_norm([values[number] for number in numbers], math.inf)
            flags[numbers] = 1.0
            flags[[len(grads) + number for number in numbers]] = (~torch.isfinite(torch.stack(norms))).float()
        return flags


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure among the arguments of a step, of which the first is the optimizer."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


class DeltaSteps:
    """The two hooks of an optimizer's step: what the parameters were before it, and what they become after it."""

    def __init__(self, reducer: Reducer, compressor: GradientCompressor | None, checks: StepChecks | None) -> None:
        self._reducer = reducer
        self._compressor = compressor
        self._checks = checks
        # A step that calls that of its base class runs the hooks twice: the outer step then combines what is combined
        # already, which changes nothing, for the Adasum of equal steps is that step.
        self._starts: list[list[torch.Tensor]] = []

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the parameters' values; with a closure, whose backwards are each rank's own business, tell nothing."""
        if closure_of(args, kwargs) is None:
            self._reducer.synchronize()
            if self._checks is not None:
                self._checks.before_step(optimizer)
        else:
            self._reducer.update()
            self._reducer.is_suspended = True
        del self._starts[: -len(type(optimizer).__mro__)]  # of steps that raised
        self._starts.append([param.detach().clone() for param in self._reducer.params])

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replace this rank's step by the Adasum of everybody's."""
        start, all_params = self._starts.pop(), self._reducer.params
        for place, device in enumerate(dict.fromkeys(tensor.device for tensor in start)):
            mine = [n for n, tensor in enumerate(start) if tensor.device == device]
            before, params = [start[n] for n in mine], [all_params[n].detach() for n in mine]
            with self._reducer.errors():
                delta = self._combined(torch._foreach_sub(params, before), place)
            torch._foreach_add_(before, delta)
            torch._foreach_copy_(params, before)
        self._reducer.is_suspended = False
        self._reducer.reset_step()

    def _combined(self, deltas: Sequence[torch.Tensor], place: int) -> list[torch.Tensor]:
        group, name = self._reducer.group, f"{self._reducer.name}.step.{place}"
        if self._compressor is None:
            return grouped_allreduce(group, deltas, "adasum", name).wait()
        sent = [self._compressor.compress(delta) for delta in deltas]
        sums = grouped_allreduce(group, [tensor for tensor, _ in sent], "adasum", name).wait()
        return [self._compressor.decompress(tensor, ctx) for tensor, (_, ctx) in zip(sums, sent, strict=True)]
