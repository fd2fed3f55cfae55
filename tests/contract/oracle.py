"""Registration of laws, and the oracles that they compare with: plain torch in this process, on all ranks' batches."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

import dualdist as dd

LAWS: dict[str, Callable[[], None]] = {}
# Laws that need a session of their own: once a session has had several optimizers, buckets no longer leave early.
ALONE: dict[str, Callable[[], None]] = {}


def law(function: Callable[[], None]) -> Callable[[], None]:
    LAWS[function.__name__] = function
    return function


def law_alone(function: Callable[[], None]) -> Callable[[], None]:
    ALONE[function.__name__] = function
    return function


def raises(kind: type[BaseException], call: Callable[[], object], *words: str) -> None:
    """Check that the call raises `kind` with all the words in its message."""
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


def mean_scale() -> float:
    """Return the mean of rank + 1 over all ranks."""
    return (dd.size() + 1) / 2


def reopen(backend: str) -> None:
    """Open a session on this backend, which is the dd.backend() of the session before."""
    dd.init(None if backend == "single" else backend, timeout_s=40)


def net(seed: int = 0) -> nn.Sequential:
    """Return the same small model on every rank; the loss uses all parameters but `untouched`."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    model.register_parameter("untouched", nn.Parameter(torch.ones(3)))
    return model


def batch(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(1000 * step + rank)
    x = torch.randn(8, 6, generator=generator, device="cpu").to(torch.get_default_device())
    return x, x[:, :2].sin()


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x, y = (tensor.to(dtype) for tensor in batch(rank, step))
    return nn.functional.mse_loss(model(x), y)


def total_loss(model: nn.Module, step: int = 0, members: Iterable[int] | None = None) -> torch.Tensor:
    """Return the sum of the losses of all ranks' batches, or of the members'."""
    return sum(loss_of(model, rank, step) for rank in (ranks() if members is None else members))  # type: ignore[return-value]


def mean_gradients(model: nn.Module, steps: tuple[int, ...] = (0,)) -> list[torch.Tensor | None]:
    """Return the mean of all ranks' gradients, summed over the steps."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for step in steps:
        (total_loss(alone, step) / dd.size()).backward()
    return gradients(alone)


def closure_of(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a closure for optimizer.step(), which computes the loss and its gradients."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int] = (0,)) -> None:
    """Take a step on this rank's batch of each number."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
        optimizer.step()


def refuse(gradient: torch.Tensor) -> None:
    """Raise in a backward, as a tensor's hook."""
    raise ValueError("refused")


def assert_close(
    found: list[torch.Tensor | None], expected: list[torch.Tensor | None], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Equal, by default up to the rounding of a sum in another order: a few units in the last place of float32."""
    for mine, right in zip(found, expected, strict=True):
        assert (mine is None) == (right is None), f"{mine} but expected {right}"
        if mine is not None and right is not None:
            torch.testing.assert_close(mine, right, rtol=rtol, atol=atol)


def digest(model: nn.Module) -> str:
    tensors = [tensor.reshape(-1).view(torch.uint8) for tensor in model.state_dict().values()]
    return hashlib.sha256(torch.cat(tensors).cpu().numpy().tobytes()).hexdigest()


def assert_same_everywhere(model: nn.Module) -> None:
    """Every rank has the same bits."""
    assert len(set(dd.allgather_object(digest(model)))) == 1


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [param.grad for param in model.parameters()]


def parameters(model: nn.Module) -> list[torch.Tensor | None]:
    return [param.detach() for param in model.parameters()]


def adasum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Adasum of a power of two of tensors, by the rule of arXiv:2006.02924 for pairs of halves."""
    if len(tensors) == 1:
        return tensors[0]
    half = len(tensors) // 2
    a, b = adasum(tensors[:half]), adasum(tensors[half:])
    dot, a_square, b_square = (a * b).sum(), (a * a).sum(), (b * b).sum()
    if a_square == 0 or b_square == 0:
        return a + b
    return a * (1 - dot / (2 * a_square)) + b * (1 - dot / (2 * b_square))
