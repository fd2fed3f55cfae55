"""SyncBatchNorm, compared with torch's batch normalization of all ranks' batches in this process."""

import copy
import io
import itertools
from collections.abc import Callable

import torch
from contract.oracle import law, raises, ranks
from torch import nn

import dualdist as dd
from dualdist.errors import UsageError

CHANNELS = 3
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
Rows = Callable[[int], int]  # how many a rank has
ROWS: dict[str, Rows] = {
    "even": lambda rank: 4,
    "uneven": lambda rank: 2 + 3 * rank,
    "the first rank has none": lambda rank: 0 if rank == 0 and dd.size() > 1 else 5,
    "one value a rank": lambda rank: 1 if dd.size() > 1 else 2,
}


def batch_of(rank: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Far from zero and wider from rank to rank, so that equal weights or a mean of variances would show."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(rows, CHANNELS, *shape, generator=generator, dtype=torch.float64)
    return (values * (1 + rank) + 5 - 3 * rank).to(dtype)


def weights_like(batch: torch.Tensor) -> torch.Tensor:
    """Return factors of the outputs in the loss: without them the sum of normalized values is always 0."""
    return torch.sin(batch.detach().double() * 7).to(batch.dtype)


def scrambled(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.linspace(0.5, 2.0, CHANNELS) * (-1) ** number)
    return layer


def check(
    rows: Rows,
    shape: tuple[int, ...],
    options: dict[str, object],
    dtype: torch.dtype,
    tolerance: float,
    steps: int = 2,
    mean: float | None = None,
) -> None:
    """Compare steps of our layer on this rank's rows, which may be moved to a mean, with torch's on all rows."""
    mine = scrambled(dd.SyncBatchNorm(CHANNELS, **options))  # type: ignore[arg-type]
    whole = scrambled(PLAIN[2 + len(shape)](CHANNELS, **options))
    if dtype == torch.float64:
        mine, whole = mine.double(), whole.double()
    for step in range(steps):
        raw = [batch_of(rank + 10 * step, rows(rank), shape, dtype) for rank in ranks()]
        batches = raw if mean is None else [batch / 100 + mean for batch in raw]
        starts = [0, *itertools.accumulate(len(batch) for batch in batches)]
        own = slice(starts[dd.rank()], starts[dd.rank() + 1])
        all_rows = torch.cat(batches).requires_grad_()
        given = batches[dd.rank()].requires_grad_()
        found, expected = mine(given), whole(all_rows)
        close = {"rtol": tolerance, "atol": tolerance}
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected[own], **close)
        (found * weights_like(raw[dd.rank()])).sum().backward()
        (expected * weights_like(torch.cat(raw))).sum().backward()
        assert given.grad is not None
        assert all_rows.grad is not None
        close["atol"] *= max(1.0, all_rows.grad.abs().max().item())
        torch.testing.assert_close(given.grad, all_rows.grad[own], **close)
    for parameter, right in zip(mine.parameters(), whole.parameters(), strict=True):
        total = dd.allreduce(parameter.grad, "sum")  # type: ignore[arg-type]
        torch.testing.assert_close(total, right.grad, rtol=tolerance, atol=tolerance * starts[-1])
    for (name, buffer), right in zip(mine.named_buffers(), whole.buffers(), strict=True):
        # Statistics are float32 whatever the input's dtype.
        close = dict.fromkeys(("rtol", "atol"), min(tolerance, 2e-5))
        torch.testing.assert_close(buffer, right, **close, msg=lambda m, n=name: f"{n}: {m}")
    buffers = dd.allgather_object([buffer.tolist() for buffer in mine.buffers()])
    assert all(other == buffers[0] for other in buffers), "every rank has the same bits"
    torch.testing.assert_close(mine.eval()(given), whole.eval()(all_rows)[own], rtol=tolerance, atol=tolerance)


@law
def sync_batch_norm_normalizes_the_whole_batch() -> None:
    """In float64, where a wrong term of 1e-9 shows."""
    for rows in ROWS.values():
        for shape in ((), (6,), (3, 2), (2, 1, 2)):
            check(rows, shape, {}, torch.float64, 1e-10)


@law
def sync_batch_norm_has_the_options_of_batch_norm() -> None:
    options: list[dict[str, object]] = [
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False, "momentum": None},
    ]
    for chosen in options:
        check(ROWS["uneven"], (2,), chosen, torch.float64, 1e-10, steps=3)


@law
def sync_batch_norm_computes_half_precision_in_float32() -> None:
    """Outputs are off by the rounding of their own dtype only; statistics are float32, as torch's are."""
    check(ROWS["uneven"], (3, 2), {}, torch.float32, 2e-5)
    check(ROWS["uneven"], (3, 2), {}, torch.float16, 4e-3)
    check(ROWS["uneven"], (3, 2), {}, torch.bfloat16, 4e-2)
    layer = dd.SyncBatchNorm(CHANNELS).to(torch.bfloat16)
    found = layer(batch_of(dd.rank(), 4, (2,), torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert layer.running_var.dtype == torch.bfloat16


@law
def sync_batch_norm_keeps_a_small_variance_beside_a_large_mean() -> None:
    """The square of the mean is 1e7 times the variance: sums of squares in float32 would lose it."""
    layer = dd.SyncBatchNorm(CHANNELS, momentum=1.0)
    batches = [batch_of(rank, 50, ()) / 10 + 1000 for rank in ranks()]
    layer(batches[dd.rank()])
    all_rows = torch.cat(batches).double()
    torch.testing.assert_close(layer.running_var.double(), all_rows.var(0), rtol=1e-3, atol=0)
    torch.testing.assert_close(layer.running_mean.double(), all_rows.mean(0), rtol=1e-6, atol=0)


@law
def sync_batch_norm_is_as_exact_as_its_input() -> None:
    """The square of the mean is up to 1e16 times the variance, and the means of the ranks differ; forward and back.

    The input itself has 53 bits, of which the mean takes away as many as it is larger than the deviation.
    """
    for tracks in (True, False):
        for mean in (0.0, 1e3, 1e6):
            options: dict[str, object] = {"eps": 1e-9, "track_running_stats": tracks}
            check(lambda rank: 8, (), options, torch.float64, 1e-10 + 1e-13 * mean, mean=mean)


@law
def sync_batch_norm_keeps_channels_last() -> None:
    layer = dd.SyncBatchNorm(CHANNELS)
    image = batch_of(dd.rank(), 2, (4, 5)).to(memory_format=torch.channels_last).requires_grad_()
    other = dd.SyncBatchNorm(CHANNELS)
    found, expected = layer(image), other(image.detach().contiguous())
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.square().sum().backward()
    assert image.grad is not None
    assert image.grad.is_contiguous(memory_format=torch.channels_last)


@law
def sync_batch_norm_exchanges_once_forward_and_once_backward() -> None:
    if dd.size() == 1:
        return
    from dualdist import session

    group = session.current().world
    layer = dd.SyncBatchNorm(CHANNELS)
    given = batch_of(dd.rank(), 4, (2,)).requires_grad_()
    before = group.exchanges
    found = layer(given)
    assert group.exchanges == before + 1
    found.square().sum().backward()
    assert group.exchanges == before + 2
    layer(given.detach()).sum().backward()
    assert group.exchanges == before + 3, "no gradient of the input is asked for"


@law
def sync_batch_norm_over_a_group_uses_its_ranks() -> None:
    group = dd.new_group(range(0, dd.size(), 2))
    if group.is_member:
        layer = dd.SyncBatchNorm(CHANNELS, group=group)
        whole = nn.BatchNorm1d(CHANNELS)
        batches = [batch_of(rank, 4 + rank, ()) for rank in group.ranks]
        found, expected = layer(batches[group.rank]), whole(torch.cat(batches))
        start = sum(len(batch) for batch in batches[: group.rank])
        torch.testing.assert_close(found, expected[start : start + len(found)], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.running_var, whole.running_var, rtol=1e-5, atol=1e-5)
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(batches[group.rank]), found)
        raises(UsageError, lambda: torch.save(layer, io.BytesIO()), "state_dict")
    dd.remove_group(group)


@law
def convert_sync_batchnorm_keeps_parameters_and_options() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Sequential(nn.BatchNorm2d(4, eps=0.25, momentum=None), nn.ReLU()))
    kept = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    model[1].eval()
    converted = dd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    layer = converted[1][0]
    assert type(layer) is dd.SyncBatchNorm
    assert (layer.eps, layer.momentum, layer.training) == (0.25, None, False)
    assert all(tensor is kept[name] for name, tensor in converted.state_dict(keep_vars=True).items())
    alone = dd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4, affine=False))
    assert type(alone) is dd.SyncBatchNorm
    assert alone.weight is None
    torch.save(alone, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=False)(torch.randn(4, 4)).shape == (4, 4)


@law
def sync_batch_norm_ignores_joined_ranks() -> None:
    """The last rank has two batches: the second one is normalized alone."""
    last = dd.size() - 1
    for dtype in (torch.float32, torch.float64):
        layer = dd.SyncBatchNorm(CHANNELS, momentum=1.0).to(dtype)
        layer(batch_of(dd.rank(), 4, (), dtype))
        if dd.rank() == last:
            given = batch_of(20, 6, (), dtype).requires_grad_()
            found = layer(given)
            found.square().sum().backward()
            torch.testing.assert_close(found, nn.BatchNorm1d(CHANNELS).to(dtype)(given), rtol=1e-5, atol=1e-5)
        dd.join()


@law
def sync_batch_norm_refuses_invalid_input() -> None:
    layer = dd.SyncBatchNorm(CHANNELS)
    raises(UsageError, lambda: layer(torch.ones(2)), "(2,)", "two dimensions")
    raises(UsageError, lambda: layer(torch.ones(2, CHANNELS + 1)), f"(n, {CHANNELS}, ...)")
    rows = 1 if dd.rank() == 0 else 0
    raises(ValueError, lambda: layer(torch.ones(rows, CHANNELS)), "value")
    empty = torch.ones(0, CHANNELS, requires_grad=True)
    for running in (layer.running_mean, layer.running_var):
        running.fill_(7)
    layer(empty).sum().backward()
    assert layer.running_mean.tolist() == layer.running_var.tolist() == [7] * CHANNELS, "no values, no change"
