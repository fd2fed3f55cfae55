"""What the laws are held against, and the lists in which they stand."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable

import torch
from torch import nn

import dualdist as dd

LAWS: dict[str, Callable[[], None]] = {}
# Laws that want a session of their own: once a session has had several optimizers, buckets no longer leave early.
ALONE: dict[str, Callable[[], None]] = {}


def law(function: Callable[[], None]) -> Callable[[], None]:
    LAWS[function.__name__] = function
    return function


def law_alone(function: Callable[[], None]) -> Callable[[], None]:
    ALONE[function.__name__] = function
    return function


def raises(kind: type[Exception], call: Callable[[], object], *words: str) -> None:
    """The call raises kind, and its message has all the words."""
    message = None
    try:
        call()
    except kind as error:
        message = str(error)
    assert message is not None, f"no {kind.__name__} was raised"
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message}"


def ranks() -> range:
    return range(dd.size())


def net(seed: int = 0) -> nn.Sequential:
    """The same small model on every rank; a parameter in it that no loss touches."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    model.register_parameter("untouched", nn.Parameter(torch.ones(3)))
    return model


def batch(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 6, generator=generator)
    return x, x[:, :2].sin()


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x, y = (tensor.to(dtype) for tensor in batch(rank, step))
    return nn.functional.mse_loss(model(x), y)


def mean_gradients(model: nn.Module, steps: tuple[int, ...] = (0,)) -> list[torch.Tensor | None]:
    """The oracle: everybody's gradients, computed here one after the other without dualdist, and their mean."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for step in steps:
        (sum(loss_of(alone, rank, step) for rank in ranks()) / dd.size()).backward()
    return [param.grad for param in alone.parameters()]


def assert_close(
    found: list[torch.Tensor | None], expected: list[torch.Tensor | None], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Equal, by default up to the rounding of a sum in another order: a few units in the last place of float32."""
    for mine, right in zip(found, expected, strict=True):
        assert (mine is None) == (right is None), f"{mine} but expected {right}"
        if mine is not None and right is not None:
            torch.testing.assert_close(mine, right, rtol=rtol, atol=atol)


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()


def assert_same_everywhere(model: nn.Module) -> None:
    """Every rank has the same bits."""
    assert len(set(dd.allgather_object(digest(model)))) == 1


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [param.grad for param in model.parameters()]
