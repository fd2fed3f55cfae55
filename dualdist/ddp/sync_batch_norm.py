"""Batch normalisation over the batches of all ranks, as one process does it on the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from dualdist import session
from dualdist.collectives import collectives
from dualdist.collectives.compile import disable_compile
from dualdist.collectives.group import Group
from dualdist.errors import UsageError


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose mean and variance are those of all ranks' batches together: (n, channels, *s) -> same.

    Every rank of `group`, of the job where it is None, calls this in the same order; n and s may differ, n may be 0.
    Parameters, running statistics and state_dict are those of torch.nn.BatchNorm, momentum=None included; half
    precision is calculated in float32. It runs wherever torch does, on CPUs too. One message goes out in forward() (two
    where the input is float64), one in backward(); the gradients of weight and bias are this rank's own, for the
    optimizer to reduce.

    With running statistics, eval() uses them and nothing travels; without, the ranks share statistics in eval() too.

    UsageError where the ranks together have one value per channel only, which has no variance.

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
        self._line = _Line(group)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, group: Group | None = None) -> nn.Module:
        """The module, with every batch normalisation in it replaced by this one, which has the same parameters.

        A module that is itself a batch normalisation is left as it is, and its replacement returned."""
        converted = cls._in_place_of(module, group) if isinstance(module, _BatchNorm) else module
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, group))
        return converted

    @classmethod
    def _in_place_of(cls, old: _BatchNorm, group: Group | None) -> SyncBatchNorm:
        new = cls(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
        new._line = _Line(group)
        new.weight, new.bias = old.weight, old.bias
        new.running_mean, new.running_var = old.running_mean, old.running_var
        new.num_batches_tracked = old.num_batches_tracked
        new.training = old.training
        return new

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        updates = self.training and self.track_running_stats
        if updates and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        uses_own_statistics = not self.training and self.running_mean is not None
        group = None if uses_own_statistics else self._line.group or self._everybody()
        if group is None or group.size == 1:
            running = (self.running_mean, self.running_var) if updates or uses_own_statistics else (None, None)
            factor = self._factor() if updates else 0.0
            return F.batch_norm(
                input, *running, self.weight, self.bias, not uses_own_statistics, float(factor), self.eps
            )
        return self._over_ranks(group, input)

    def _everybody(self) -> Group:
        return session.current().world

    @disable_compile
    def _over_ranks(self, group: Group, input: torch.Tensor) -> torch.Tensor:
        statistics = _Statistics.over(group, input)
        updates = self.training and self.track_running_stats
        if updates and self.running_mean is not None and self.running_var is not None:
            statistics.update(self.running_mean, self.running_var, self._factor())
        normalized: torch.Tensor = _Normalize.apply(input, self.weight, self.bias, statistics, self.eps)  # type: ignore[no-untyped-call]
        return normalized

    def _factor(self) -> float | torch.Tensor:
        """The weight of this batch in the running statistics; without momentum, that of their plain average."""
        if self.momentum is None:
            assert self.num_batches_tracked is not None, "it counts wherever running statistics are kept"
            return self.num_batches_tracked.double().reciprocal()
        return self.momentum

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm({self.num_features}) got a tensor of shape {tuple(input.shape)}: expected "
                f"(n, {self.num_features}, ...), at least two dimensions"
            )


class _Line:
    """The group of a layer: copies of the layer share it, and it does not travel to other processes."""

    def __init__(self, group: Group | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Line:
        return self

    def __reduce__(self) -> tuple[type[_Line], tuple[None]]:
        if self.group is not None:
            raise UsageError(
                "a SyncBatchNorm with a group does not pickle, for the group is of this session: save its state_dict()"
            )
        return _Line, (None,)


class _Statistics:
    """Mean and variance of each channel over all values of all ranks: float64, in shapes that broadcast over a batch.

    `total` is the number of values per channel on all ranks. All are tensors: the host need not wait for a GPU.
    """

    def __init__(self, group: Group, name: str, total: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> None:
        self.group = group
        self.name = name
        self.total = total
        self.mean = mean
        self.var = var  # of the values themselves; the running one is an estimate, from one value less

    @staticmethod
    def over(group: Group, batch: torch.Tensor) -> _Statistics:
        """From the sums over ranks of count, values and squares; a rank that has joined takes part with zeros.

        A variance is the small difference of a mean of squares from the square of the mean: sums in float64 are exact
        enough for values of 24 bits. Those of 53 bits are first moved by their mean, which is a message of its own.
        """
        channels = batch.shape[1]
        count = batch.numel() // channels
        name = group.next_name("sync_batch_norm")
        var = mean = torch.zeros(channels, dtype=torch.float64, device=batch.device)
        if count:
            var, mean = (
                part.double()
                for part in torch.var_mean(_calculable(batch.detach()), _but_channels(batch), correction=0)
            )
        counted = torch.full_like(mean[:1], count)
        shift = torch.zeros_like(mean)
        if batch.dtype == torch.float64:
            sums = torch.cat([counted, count * mean])
            collectives.allreduce_(group, sums, "sum", f"{name}.mean").wait()
            shift = sums[1:] / sums[0].clamp(min=1)
        moved = mean - shift
        message = torch.cat([counted, count * moved, count * (var + moved * moved)])
        collectives.allreduce_(group, message, "sum", name).wait()
        total = message[0]
        if count < 2 and total.item() == 1:  # else there are two values on this rank already
            raise UsageError(
                "SyncBatchNorm got one value per channel from all ranks together, which has no variance: use larger "
                "batches"
            )
        means, squares = (message[1:] / total.clamp(min=1)).split(channels)
        shape = [1, channels] + [1] * (batch.dim() - 2)
        var = (squares - means * means).clamp(min=0)
        return _Statistics(group, name, total, (shift + means).view(shape), var.view(shape))

    def update(self, running_mean: torch.Tensor, running_var: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Move the running statistics towards these, unless no rank had a value."""
        unbiased = self.var * (self.total / (self.total - 1).clamp(min=1))
        factor = factor * self.total.clamp(max=1)
        for running, new in ((running_mean, self.mean), (running_var, unbiased)):
            running.add_((factor * (new.view(-1) - running)).to(running.dtype))


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, where mean and variance depend on x, on all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: _Statistics,
        eps: float,
    ) -> torch.Tensor:
        values = _calculable(batch)
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
        """With x^ the normalized x and N the number of values on all ranks:

        dx = weight / sqrt(var + eps) * (dy - sum(dy) / N - x^ sum(dy x^) / N)
        """
        batch, weight, mean, inverse, total = ctx.saved_tensors
        dy = _calculable(gradient)
        normal = (_calculable(batch) - mean).mul_(inverse)
        sums = torch.stack([dy.sum(_but_channels(batch)), (dy * normal).sum(_but_channels(batch))])
        wanted = zip(sums.flip(0), ctx.needs_input_grad[1:3], strict=True)
        own = [part.to(weight.dtype) if wants else None for part, wants in wanted]
        if not ctx.needs_input_grad[0]:
            return None, *own, None, None
        everybody = sums.double()
        collectives.allreduce_(ctx.group, everybody, "sum", f"{ctx.name}.backward").wait()
        mean_dy, mean_dy_normal = (part.to(dy.dtype).view_as(mean) for part in everybody / total.clamp(min=1))
        scale = inverse if weight is None else inverse * weight.view_as(mean)
        dx = normal.mul_(mean_dy_normal).neg_().add_(dy).sub_(mean_dy).mul_(scale)
        return dx.to(batch.dtype), *own, None, None


def _calculable(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 where it is of half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _but_channels(batch: torch.Tensor) -> list[int]:
    return [dimension for dimension in range(batch.dim()) if dimension != 1]
