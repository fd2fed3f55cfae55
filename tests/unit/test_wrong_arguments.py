"""Invalid arguments raise a UsageError that says what was expected, and the session goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dualdist as dd
from dualdist.errors import UsageError

ONE: Any = torch.ones(1)
NOT: Any = 3
MISTAKES: dict[str, Callable[[], Any]] = {
    **{
        name: lambda name=name: getattr(dd, name)(NOT)  # type: ignore[misc]
        for name in (
            *("allreduce", "allreduce_", "allgather", "broadcast", "broadcast_", "alltoall", "reducescatter"),
            *("grouped_allreduce", "grouped_allreduce_", "grouped_allgather", "grouped_reducescatter"),
            *("scatter", "gather", "new_group", "remove_group", "broadcast_parameters", "broadcast_optimizer_state"),
            *("wrap_optimizer", "check_consistency", "save_checkpoint", "load_checkpoint"),
        )
    },
    "several, not tensors": lambda: dd.grouped_allreduce([NOT]),
    "a group": lambda: dd.allreduce(ONE, group=NOT),
    "a group of a barrier": lambda: dd.barrier(group=NOT),
    "names": lambda: dd.wrap_optimizer(torch.optim.SGD([ONE.clone().requires_grad_()], 1.0), NOT),
    "a data set": lambda: dd.Sampler(NOT, remainder="drop"),
    "a sampler": lambda: dd.loader([1], sampler=NOT),
}


@pytest.fixture(scope="module")
def session(base_env: dict[str, str]) -> Iterator[None]:
    dd.init()
    yield
    dd.shutdown()


@pytest.mark.parametrize("name", MISTAKES)
def test_an_invalid_argument_raises_usage_error_and_the_session_goes_on(session: None, name: str) -> None:
    with pytest.raises(UsageError, match=r"expected|takes|needs"):
        MISTAKES[name]()
    assert dd.allreduce(ONE).item() == 1.0
