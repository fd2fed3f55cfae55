"""A mean over all ranks of what each has seen."""

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
    """A mean over everything that all ranks have seen, each value counting as often as it was said to.

    update() costs no message and waits for no GPU; value() is one allreduce, which every rank of the group calls.

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
        """Nothing has been seen."""
        self._total: float | torch.Tensor = 0.0
        self._count = 0.0

    def update(self, value: float | torch.Tensor, count: float = 1) -> None:
        """This rank has seen `count` samples of this mean value: a number, or a tensor of one element."""
        if not 0 <= count < math.inf:
            raise UsageError(f"count={count}: expected how many samples the value stands for, 0 or more")
        if count == 0:  # whose mean is no number
            return
        # Numpy's numbers are real ones, too, and would keep their own precision.
        one = float(value) if isinstance(value, numbers.Real) else _one(value)
        self._total = self._total + one * float(count)
        self._count += float(count)

    def value(self) -> float:
        """The mean over all ranks; NaN where no rank has seen anything. Every rank of the group calls this."""
        import torch

        from dualdist.collectives import collectives

        group = session.group_or_world(self._group)
        said = torch.tensor([float(self._total), self._count], dtype=torch.float64)
        name = group.next_name(f"metric {self.name}".strip())
        total, count = collectives.allreduce(group, said, "sum", name).wait().tolist()
        return float(total / count) if count else float("nan")

    @property
    def local(self) -> float:
        """The mean of what this rank has seen; NaN where that is nothing."""
        return float(self._total) / self._count if self._count else float("nan")

    def __repr__(self) -> str:
        return f"Metric({self.name!r}, local={self.local:g} of {self._count:g})"


def _one(value: object) -> torch.Tensor:
    """The tensor's one number, where it lies."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise UsageError(f"a value of {type(value).__name__}: a metric takes a number, or a tensor of one element")
    if value.numel() != 1:
        raise UsageError(f"a value of shape {tuple(value.shape)}: a metric takes one number, as loss.mean()")
    return value.detach().reshape(()).double()
