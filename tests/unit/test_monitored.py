"""Errors of monitored operations name the operation."""

from __future__ import annotations

import pytest
import torch

from dualdist.backends.base import LazyDescription
from dualdist.errors import CollectiveError, RankLostError
from dualdist.monitoring.monitored import Monitor, MonitoredWork


class Broken:
    """Work that has failed."""

    def done(self) -> bool:
        raise RankLostError("a connection broke")

    def wait(self) -> torch.Tensor:
        raise RankLostError("a connection broke")


@pytest.mark.parametrize("method", [MonitoredWork.done, MonitoredWork.wait])
def test_an_error_from_done_or_wait_names_the_operation(method: object) -> None:
    work = MonitoredWork(
        Broken(), LazyDescription("allreduce", "x", torch.ones(3)), Monitor(None, [0, 1]), lambda: None
    )
    with pytest.raises(CollectiveError, match=r"allreduce 'x' of float32\(3,\): a connection broke"):
        method(work)  # type: ignore[operator]
