"""Horovod's elastic training: a function that is run again after a failure, from a state that all ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from dualdist.errors import DualdistError
from dualdist.hvd.elastic.common import run_fn
from dualdist.hvd.elastic.state import ElasticSampler, TorchState
from dualdist.hvd.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "run"]

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate func(state, ...): it starts with state.sync(), and is run again after a collective has failed.

    Then the state is restored to its last commit(), and the remaining ranks initialize again by shutdown() and init().
    Every rank calls the function, before any other collective.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    with contextlib.suppress(DualdistError):  # the other ranks may be gone
        shutdown()
    init()
