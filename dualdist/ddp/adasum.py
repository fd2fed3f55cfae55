"""op="adasum": every rank steps on its own gradients, and the steps are combined by Adasum.

With optimizers other than plain SGD Adasum is meant for steps, not for gradients (Maleki et al., "Scaling Distributed
Training with Adaptive Summation", MLSys 2021, section 4). So backward() reduces no gradients; but the ranks exchange
which are not finite, so that a loss scaler skips a step on all ranks or on none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dualdist.collectives.collectives import allreduce
from dualdist.ddp.bucket import Bucket, BucketStrategy
from dualdist.ddp.compression import ErrorFeedback
from dualdist.ddp.config import ReducerConfig
from dualdist.ddp.layout import BUCKET_FLAGS, BucketLayout
from dualdist.ddp.reducer import Reducer
from dualdist.engine.channel import Channel


class AdasumStrategy(BucketStrategy):
    """Send flags instead of gradients in backward()."""

    sends_gradients = False

    def make_bucket(self, layout: BucketLayout, channel: Channel, dense: set[int]) -> Bucket:
        return AdasumBucket(layout, channel, dense)


class AdasumBucket(Bucket):
    """A bucket of two flags for each gradient instead of its values: it exists, and it is not finite."""

    def __init__(self, layout: BucketLayout, channel: Channel, dense: set[int]) -> None:
        super().__init__(layout, ReducerConfig("sum"), channel, dense)

    def assign_special_grads(self, params: Sequence[torch.Tensor | None], *, as_views: bool) -> list[tuple[int, bool]]:
        """Set a gradient that is not finite on some rank to NaN."""
        for param, (_, is_nonfinite) in zip(params, self.read_flags(), strict=True):
            if param is None or not is_nonfinite:
                continue
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.mul(math.nan)
            else:
                param.grad = torch.full_like(param, math.nan)
        return []

    def reduced_values(self) -> torch.Tensor:
        """Return infinity for each gradient that is not finite on some rank, else 0."""
        is_nonfinite = self.tail[len(self.layout.shapes) : -len(BUCKET_FLAGS)] > 0
        return torch.where(is_nonfinite, math.inf, 0.0)

    def nonfinite_members(self) -> list[int]:
        return [number for number, (_, is_nonfinite) in enumerate(self.read_flags()) if is_nonfinite]

    def members_to_unbucket(self, flags: Sequence[tuple[bool, bool]]) -> list[tuple[int, bool]]:
        return []

    def _flags(self, grads: Sequence[torch.Tensor | None] | None, flag: int) -> torch.Tensor:
        assert grads is not None, "no member has a place in the bucket"
        flags = torch.zeros(2 * len(grads) + len(BUCKET_FLAGS), dtype=torch.float32, device=self.layout.device)
        flags[flag] = 1.0
        values = {n: grad._values() if grad.is_sparse else grad for n, grad in enumerate(grads) if grad is not None}
        numbers = [number for number, value in values.items() if value.numel()]
        if numbers:
            norms = torch._foreach_norm([values[number] for number in numbers], math.inf)
            flags[numbers] = 1.0
            flags[[len(grads) + number for number in numbers]] = (~torch.isfinite(torch.stack(norms))).float()
        return flags


class DeltaSteps:
    """Combines the ranks' steps by Adasum: saves the parameters before a step, and reduces the differences after it."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        # A step that calls that of its base class runs the hooks twice: the outer step combines what is combined
        # already, which changes nothing, for the Adasum of equal steps is that step.
        self._start_values: list[list[torch.Tensor]] = []

    def before_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Save the parameters' values; with a closure suspend the reducer, as each rank runs its own backwards."""
        if has_closure:
            self._reducer.update()
            self._reducer.packer.is_suspended = True
        del self._start_values[: -len(type(optimizer).__mro__)]  # of steps that raised
        self._start_values.append([param.detach().clone() for param in self._reducer.registry.all_params])

    @torch.no_grad()
    def after_step(self) -> None:
        """Replace this rank's step by the Adasum of all ranks' steps."""
        start, all_params = self._start_values.pop(), self._reducer.registry.all_params
        for device_index, device in enumerate(dict.fromkeys(tensor.device for tensor in start)):
            numbers = [n for n, tensor in enumerate(start) if tensor.device == device]
            before, params = [start[n] for n in numbers], [all_params[n].detach() for n in numbers]
            with self._reducer.errors():
                delta = self._combine(torch._foreach_sub(params, before), device_index)
            torch._foreach_add_(before, delta)
            torch._foreach_copy_(params, before)
        self._reducer.packer.is_suspended = False

    def _combine(self, deltas: Sequence[torch.Tensor], device_index: int) -> list[torch.Tensor]:
        group, name = self._reducer.group, f"{self._reducer.name}.step.{device_index}"
        compressor = self._reducer.config.compressor
        assert not isinstance(compressor, ErrorFeedback)
        if compressor is None:
            return allreduce(group, list(deltas), "adasum", name).run()
        compressed = [compressor.compress(delta) for delta in deltas]
        sums = allreduce(group, [tensor for tensor, _ in compressed], "adasum", name).run()
        return [compressor.decompress(tensor, ctx) for tensor, (_, ctx) in zip(sums, compressed, strict=True)]
