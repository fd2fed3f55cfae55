"""Which parameters shard=True cuts, and that a step on a part has the bits of that part of a step on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualdist.ddp.sharding import BLOCK, ELEMENTWISE, EXACT, assign_owners, part_of

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "ASGD": [{"t0": 1}],
}
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
CASES = [
    (each.__name__, implementation)
    for each in sorted(ELEMENTWISE, key=lambda each: each.__name__)
    for implementation in ("single", "foreach", *["fused"] * (each.__name__ in FUSED))
]


def trained(name: str, options: dict[str, Any], start: torch.Tensor, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a parameter and its state after a step with each gradient."""
    param = torch.nn.Parameter(start.clone())
    optimizer = getattr(torch.optim, name)([param], lr=0.01, **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return [param.detach(), *(value for value in optimizer.state[param].values() if torch.is_tensor(value))]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_a_step_on_a_part_has_the_bits_of_the_part(name: str, implementation: str) -> None:
    """On CPUs. Numbers of steps and the like are those of the whole."""
    count, size = 1003, 3
    generator = torch.Generator().manual_seed(0)
    how = {"foreach": False} if implementation == "single" else {implementation: True}
    for dtype in EXACT:
        if implementation == "fused" and dtype.is_complex:
            continue  # which torch refuses
        start, *grads = (torch.randn(count, dtype=dtype, generator=generator) for _ in range(6))
        for options in OPTIONS.get(name, [{"weight_decay": 0.1}] if name != "Rprop" else [{}]):
            whole = trained(name, options | how, start, grads)
            for rank in range(size):
                part = part_of(count, rank, size)
                found = trained(name, options | how, start[part], [grad[part] for grad in grads])
                for own, every in zip(found, whole, strict=True):
                    assert own.dtype == every.dtype
                    assert torch.equal(own, every[part] if every.dim() else every)


@pytest.mark.parametrize("count", [BLOCK * 7, 1003, 10**6 + 1])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_cover_a_parameter_in_blocks(count: int, size: int) -> None:
    parts = [part_of(count, rank, size) for rank in range(size)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == count
    assert all(part.start % BLOCK == 0 and 0 < part.stop - part.start <= count / size + BLOCK for part in parts)


def assign(sizes: list[int], size: int, *, cuts: bool = True) -> tuple[list[int | None], list[int]]:
    """Return the owners of parameters of these numbers of elements, and the elements of each rank."""
    loads = [0] * size
    params = [torch.empty(each, device="meta", dtype=torch.uint8) for each in sizes]
    return assign_owners(params, loads, lambda param: cuts and param.numel() >= BLOCK * size), loads


GPT2 = [50257 * 768, 1024 * 768, *[768 * 2304, 768 * 768, *[768 * 3072] * 2, 2304, 3072, *[768] * 6] * 12, 768, 768]


@pytest.mark.parametrize("sizes", [GPT2, [5003], [5000, 1, 2, 3], [1000] * 10])
@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_no_rank_has_more_than_its_part(sizes: list[int], size: int) -> None:
    _, loads = assign(sizes, size)
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / size * 1.05


def test_only_what_is_too_large_and_can_be_cut_is_cut() -> None:
    assert assign([64] * 8 + [1] * 8, 4) == ([*[0, 1, 2, 3] * 4], [130] * 4)
    assert assign([9000, 100, 90], 2, cuts=False) == ([0, 1, 1], [9000, 190])
    owners, loads = assign([10, 10, 8000], 2)
    assert (owners[2], loads) == (None, [4010, 4010])


def test_a_later_parameter_goes_to_the_rank_with_the_fewest_bytes_or_is_cut() -> None:
    loads = [100, 120]
    params = [torch.empty(10, dtype=torch.uint8), torch.empty(1000, dtype=torch.uint8)]
    assert [assign_owners([param], loads, lambda param: param.numel() > 100) for param in params] == [[0], [None]]
    assert loads == [110 + 496, 120 + 504]
