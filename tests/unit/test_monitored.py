"""What fails says which operation it was, however it is found out."""

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


@pytest.mark.parametrize("look", [MonitoredWork.done, MonitoredWork.wait])
def test_an_error_names_the_operation_whether_it_is_waited_for_or_looked_at(look: object) -> None:
    work = MonitoredWork(
        Broken(), LazyDescription("allreduce", "x", torch.ones(3)), Monitor(None, [0, 1]), lambda: None
    )
    with pytest.raises(CollectiveError, match=r"allreduce 'x' of float32\(3,\): a connection broke"):
        look(work)  # type: ignore[operator]
