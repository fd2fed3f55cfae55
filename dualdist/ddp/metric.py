"""Metric: a weighted mean over all ranks."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING

from dualdist import session
from dualdist.errors import UsageError

if TYPE_CHECKING:
    import torch

    from dualdist.collectives.group import Group


class Metric:
    """Average values over all samples of all ranks.

    update() does not communicate and does not wait for the GPU; value() is one allreduce.

    Args:
        name: shown in errors, timelines and repr().
        group: the ranks to average over; all ranks if None.

    Example:
        >>> import dualdist as dd
        >>> dd.init()
        >>> loss = dd.Metric("loss")
        >>> loss.update(2.0, count=3)
        >>> loss.update(6.0)
        >>> loss.value()
        3.0
        >>> dd.shutdown()
    """

    def __init__(self, name: str = "", *, group: Group | None = None) -> None:
        self.name = name
        self._group = group
        self.reset()

    def reset(self) -> None:
        """Discard the values of this rank."""
        self._total: float | torch.Tensor = 0.0
        self._count = 0.0

    def update(self, value: float | torch.Tensor, count: float = 1) -> None:
        """Add the mean `value` of `count` samples on this rank.

        Args:
            value: a number, or a tensor of one element on any device.
            count: the number of samples that `value` is the mean of, at least 0.

        Raises:
            UsageError: `value` is not one number, or `count` is negative.
        """
        if not 0 <= count < math.inf:
            raise UsageError(f"count={count}: expected the number of samples that the value is the mean of, 0 or more")
        if count == 0:  # the mean of no samples is NaN
            return
        # Convert numpy's numbers, which are numbers.Real and would keep their precision.
        number = float(value) if isinstance(value, numbers.Real) else _as_scalar(value)
        self._total = self._total + number * float(count)
        self._count += float(count)

    def value(self) -> float:
        """Return the mean over all ranks, NaN if there is no sample; every rank of the group calls this."""
        import torch

        from dualdist.collectives import collectives

        group = session.group_or_world(self._group)
        sums = torch.tensor([float(self._total), self._count], dtype=torch.float64)
        name = group.next_name(f"metric {self.name}".strip())
        total, count = collectives.allreduce(group, sums, "sum", name).run().tolist()
        return float(total / count) if count else float("nan")

    @property
    def local(self) -> float:
        """The mean over this rank only; NaN if there is no sample."""
        return float(self._total) / self._count if self._count else float("nan")

    def __repr__(self) -> str:
        return f"Metric({self.name!r}, local={self.local:g} of {self._count:g})"


def _as_scalar(value: object) -> torch.Tensor:
    """Return a tensor's one element as a float64 scalar on its device."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise UsageError(f"a value of {type(value).__name__}: a metric takes a number, or a tensor of one element")
    if value.numel() != 1:
        raise UsageError(f"a value of shape {tuple(value.shape)}: a metric takes one number, such as loss.mean()")
    return value.detach().reshape(()).double()
