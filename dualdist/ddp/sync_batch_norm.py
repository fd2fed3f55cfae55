"""SyncBatchNorm: batch normalization over the batches of all ranks, as one process does on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # private to torch: tests/unit/test_torch_private_names.py

from dualdist import session
from dualdist.collectives import collectives
from dualdist.collectives.dynamo import disable_compile
from dualdist.collectives.group import Group
from dualdist.errors import UsageError


class SyncBatchNorm(_BatchNorm):
    """Normalize each channel by the mean and variance of all ranks' batches: (n, channels, *s) -> same shape.

    Like torch.nn.SyncBatchNorm, but also on CPUs and with any backend. Every rank of the group calls forward() and
    backward() in the same order; n and s may differ between ranks, and n may be 0. Parameters, running statistics and
    state_dict are those of torch.nn.BatchNorm. Half precision is computed in float32. forward() sends one message (two
    for float64), backward() one. The gradients of weight and bias are this rank's own, for the optimizer to reduce.
    eval() uses the running statistics without communication; if there are none, the ranks' batch statistics.

    Args:
        num_features: the number of channels.
        eps: added to the variance.
        momentum: the weight of a batch in the running statistics, or None for a cumulative average.
        affine: learn a weight and a bias.
        track_running_stats: keep running statistics.
        group: a group of new_group(), or None for all ranks.
        device: that of the parameters.
        dtype: that of the parameters.

    Raises:
        UsageError: in forward(), if all ranks together have one value per channel, which has no variance.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> type(dd.SyncBatchNorm.convert_sync_batchnorm(model)[1]) is dd.SyncBatchNorm
        True
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self._group_ref = _GroupRef(group)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, group: Group | None = None) -> nn.Module:
        """Replace every batch normalization layer in a module by a SyncBatchNorm with the same parameters.

        Args:
            module: a module, modified in place unless it is itself a batch normalization layer.
            group: a group of new_group(), or None for all ranks.

        Returns:
            The module, or the replacement if the module is itself a batch normalization layer.
        """
        converted = module
        if isinstance(module, _BatchNorm):
            converted = new = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, group=group
            )
            new.weight, new.bias = module.weight, module.bias
            new.running_mean, new.running_var = module.running_mean, module.running_var
            new.num_batches_tracked = module.num_batches_tracked
            new.training = module.training
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, group))
        return converted

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        updates = self.training and self.track_running_stats
        if updates and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        uses_own_statistics = not self.training and self.running_mean is not None
        group = None if uses_own_statistics else self._group_ref.group or self._all_ranks()
        if group is None or group.size == 1:
            running = (self.running_mean, self.running_var) if updates or uses_own_statistics else (None, None)
            factor = self._factor() if updates else 0.0
            return F.batch_norm(
                input, *running, self.weight, self.bias, not uses_own_statistics, float(factor), self.eps
            )
        return self._normalize_over_ranks(group, input)

    @disable_compile
    def _normalize_over_ranks(self, group: Group, input: torch.Tensor) -> torch.Tensor:
        statistics = _Statistics.compute(group, input)
        updates = self.training and self.track_running_stats
        if updates and self.running_mean is not None and self.running_var is not None:
            statistics.update(self.running_mean, self.running_var, self._factor())
        apply: Any = _Normalize.apply
        normalized: torch.Tensor = apply(input, self.weight, self.bias, statistics, self.eps)
        return normalized

    def _all_ranks(self) -> Group:
        return session.current().world

    def _factor(self) -> float | torch.Tensor:
        """Return the weight of this batch in the running statistics; without momentum, that of a cumulative average."""
        if self.momentum is None:
            assert self.num_batches_tracked is not None, "set wherever running statistics are kept"
            return self.num_batches_tracked.double().reciprocal()
        return self.momentum

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm({self.num_features}) got a tensor of shape {tuple(input.shape)}: expected "
                f"(n, {self.num_features}, ...), at least two dimensions"
            )


class _GroupRef:
    """The group of a layer, shared by copies of the layer and not pickled."""

    def __init__(self, group: Group | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _GroupRef:
        return self

    def __reduce__(self) -> tuple[type[_GroupRef], tuple[None]]:
        if self.group is not None:
            raise UsageError(
                "a SyncBatchNorm with a group cannot be pickled, as the group belongs to this session: save its "
                "state_dict()"
            )
        return _GroupRef, (None,)


@dataclass(frozen=True)
class _Statistics:
    """Mean and variance of each channel over all ranks: float64, in shapes that broadcast over a batch.

    `total` is the number of values per channel on all ranks. All are tensors, so that the host does not wait for a GPU.
    """

    group: Group
    name: str
    total: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor  # biased; the running variance is unbiased

    @staticmethod
    def compute(group: Group, batch: torch.Tensor) -> _Statistics:
        """Compute from the sums over ranks of count, values and squares; ranks that have joined contribute zeros.

        The variance is the difference of the mean of squares and the square of the mean, for which sums in float64 are
        exact enough with float32 values. float64 values are first shifted by their mean, found by another allreduce.
        """
        channels = batch.shape[1]
        count = batch.numel() // channels
        name = group.next_name("sync_batch_norm")
        var = mean = torch.zeros(channels, dtype=torch.float64, device=batch.device)
        if count:
            var, mean = (
                part.double() for part in torch.var_mean(_upcast(batch.detach()), _reduced_dims(batch), correction=0)
            )
        counted = torch.full_like(mean[:1], count)
        shift = torch.zeros_like(mean)
        if batch.dtype == torch.float64:
            sums = torch.cat([counted, count * mean])
            collectives.allreduce(group, sums, "sum", f"{name}.mean", in_place=True).run()
            shift = sums[1:] / sums[0].clamp(min=1)
        shifted = mean - shift
        message = torch.cat([counted, count * shifted, count * (var + shifted * shifted)])
        collectives.allreduce(group, message, "sum", name, in_place=True).run()
        total = message[0]
        if count < 2 and total.item() == 1:  # item() waits for the GPU, only where count does not decide
            raise UsageError(
                "SyncBatchNorm got one value per channel from all ranks together, which has no variance: use larger "
                "batches"
            )
        means, squares = (message[1:] / total.clamp(min=1)).split(channels)
        shape = [1, channels] + [1] * (batch.dim() - 2)
        var = (squares - means * means).clamp(min=0)
        return _Statistics(group, name, total, (shift + means).view(shape), var.view(shape))

    def update(self, running_mean: torch.Tensor, running_var: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Update the running statistics, unless no rank had a value."""
        unbiased = self.var * (self.total / (self.total - 1).clamp(min=1))
        factor = factor * self.total.clamp(max=1)
        for running, new in ((running_mean, self.mean), (running_var, unbiased)):
            running.add_((factor * (new.view(-1) - running)).to(running.dtype))


class _Normalize(torch.autograd.Function):
    """Compute (x - mean) / sqrt(var + eps) * weight + bias, where mean and var depend on x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: _Statistics,
        eps: float,
    ) -> torch.Tensor:
        values = _upcast(batch)
        mean = statistics.mean.to(values.dtype)
        inverse = (statistics.var + eps).rsqrt().to(values.dtype)
        ctx.save_for_backward(batch, weight, mean, inverse, statistics.total)
        ctx.group, ctx.name = statistics.group, statistics.name
        result = (values - mean).mul_(inverse if weight is None else inverse * weight.view_as(mean))
        if bias is not None:
            result.add_(bias.view_as(mean))
        return result.to(batch.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx = weight / sqrt(var + eps) * (dy - sum(dy) / N - xn * sum(dy * xn) / N), and this rank's gradients.

        xn is the normalized x, N the number of values per channel on all ranks (Ioffe and Szegedy, 2015).
        """
        batch, weight, mean, inverse, total = ctx.saved_tensors
        dy = _upcast(gradient)
        normal = (_upcast(batch) - mean).mul_(inverse)
        sums = torch.stack([dy.sum(_reduced_dims(batch)), (dy * normal).sum(_reduced_dims(batch))])
        wanted = zip(sums.flip(0), ctx.needs_input_grad[1:3], strict=True)
        own = [part.to(weight.dtype) if wants else None for part, wants in wanted]
        if not ctx.needs_input_grad[0]:
            return None, *own, None, None
        totals = sums.double()
        collectives.allreduce(ctx.group, totals, "sum", f"{ctx.name}.backward", in_place=True).run()
        mean_dy, mean_dy_normal = (part.to(dy.dtype).view_as(mean) for part in totals / total.clamp(min=1))
        scale = inverse if weight is None else inverse * weight.view_as(mean)
        dx = normal.mul_(mean_dy_normal).neg_().add_(dy).sub_(mean_dy).mul_(scale)
        return dx.to(batch.dtype), *own, None, None


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _reduced_dims(batch: torch.Tensor) -> list[int]:
    return [dimension for dimension in range(batch.dim()) if dimension != 1]
