"""The handles of Horovod's asynchronous functions, in a job of one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from dualdist import hvd
from dualdist.collectives import collectives
from dualdist.collectives.work import Collective, Handle
from dualdist.hvd import mpi_ops
from dualdist.hvd.process_sets import current


@pytest.fixture
def job() -> Iterator[None]:
    """Open a session of hvd for the test."""
    with mock.patch.dict(os.environ):  # hvd.init() sets Horovod's variables
        hvd.init()
        yield
        hvd.shutdown()


class Interrupted:
    """A collective in whose start another one starts, as from another thread."""

    def __init__(self, handle: Collective[Any], other: Collective[Any]) -> None:
        self._handle = handle
        self._other = other
        self.number = 0  # of the other

    def start(self) -> Handle[Any]:
        self.number = mpi_ops.start(self._other)
        return self._handle.start()


@pytest.mark.usefixtures("job")
def test_collectives_that_start_concurrently_get_different_handles() -> None:
    first, second = (collectives.allreduce(current().base, torch.tensor(value), "sum") for value in (1.0, 2.0))
    both = Interrupted(first, second)
    number = mpi_ops.start(both)  # type: ignore[arg-type]
    assert number != both.number
    assert (hvd.synchronize(number), hvd.synchronize(both.number)) == (1.0, 2.0)
