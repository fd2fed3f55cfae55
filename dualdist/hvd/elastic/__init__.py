"""Elastic training by Horovod's names: a function that begins anew, from a state that the ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from dualdist.errors import DualdistError
from dualdist.hvd.elastic.common import run_fn
from dualdist.hvd.elastic.sampler import ElasticSampler
from dualdist.hvd.elastic.state import TorchState
from dualdist.hvd.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "run"]

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """A decorator: func(state, ...) begins with state.sync(), and anew after an operation between ranks has failed.

    The state then goes back to its last commit() and the ranks meet anew, by shutdown() and init(). Every rank calls
    the function, and none does anything with the others before it.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    with contextlib.suppress(DualdistError):  # nobody may be there to take leave of
        shutdown()
    init()
