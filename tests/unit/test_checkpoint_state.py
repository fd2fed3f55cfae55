"""The content of a checkpoint on one rank: plain names, plain data, no duplicates, nothing lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualdist as dd
from dualdist.checkpoint.files import EXTRA, FORMAT, METADATA, FileProgress, write
from dualdist.checkpoint.state import collect_state
from dualdist.errors import CheckpointError, UsageError


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dd.init()
    yield
    dd.shutdown()


def filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_names_are_those_of_the_unwrapped_model(tmp_path: Path, wrap: Any) -> None:
    path = dd.save_checkpoint(tmp_path, model=wrap(filled(nn.Linear(2, 2), 3.0)))
    assert sorted(torch.load(path, weights_only=True)["model"]) == ["bias", "weight"]
    for model in (nn.Linear(2, 2), wrap(nn.Linear(2, 2))):
        dd.load_checkpoint(tmp_path, model=model)
        assert torch.cat([param.flatten() for param in model.parameters()]).unique().tolist() == [3.0]


def test_tensors_are_copied_only_for_async_saves_and_once() -> None:
    tied = nn.Linear(100, 100, bias=False)
    model = nn.ModuleList([tied, nn.Linear(100, 100), tied])
    assert collect_state({"model": model}, copy=False)["model"]["0.weight"].data_ptr() == tied.weight.data_ptr()
    extra = {"numbers": [1], "names": {"a"}}
    found = collect_state({"model": model, "extra": extra} | extra, copy=True)
    places = {tensor.data_ptr() for tensor in found["model"].values()}
    assert len(places) == 3, "tied weights are one"
    assert places.isdisjoint(param.data_ptr() for param in model.parameters())
    extra["numbers"].append(2)  # type: ignore[attr-defined]
    extra["names"].add("b")  # type: ignore[attr-defined]
    assert (found[EXTRA]["numbers"], found[EXTRA]["names"]) == ([1], {"a"})


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    path = dd.save_checkpoint(tmp_path, view=torch.arange(100_000.0)[5:7], sign=torch.tensor([1j]).conj())
    assert os.path.getsize(path) < 20_000
    found = dd.load_checkpoint(tmp_path)
    assert (found["view"].tolist(), found["sign"].tolist()) == ([5.0, 6.0], [-1j])


@pytest.mark.parametrize("copy", [False, True])
def test_each_view_is_saved_with_its_values(copy: bool) -> None:
    """Even if memory was freed and reused in between."""
    numbers = [torch.full((1000,), complex(n, n)) for n in range(4)]
    views = [number.conj() for number in numbers] + numbers + [number.imag for number in numbers]
    views += [number.conj().imag for number in numbers]
    found = collect_state({"views": views}, copy=copy)[EXTRA]["views"]
    assert all(map(torch.equal, found, views))


def test_state_wider_than_its_parameter_keeps_its_dtype(tmp_path: Path) -> None:
    """Optimizer.load_state_dict() alone makes it bfloat16."""
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    momentum = torch.tensor([1.0, 1 / 3, 1e-9])
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = momentum.clone()
    dd.save_checkpoint(tmp_path, optimizer=optimizer)
    other = torch.optim.SGD([param], lr=0.2)
    dd.load_checkpoint(tmp_path, optimizer=other)
    assert torch.equal(other.state[param]["momentum_buffer"], momentum)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["momentum"]) == (0.1, 0.9)


@pytest.mark.parametrize("then", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("now", [torch.bfloat16, torch.float32])
def test_state_of_the_parameters_dtype_is_cast_to_another_models(
    tmp_path: Path, then: torch.dtype, now: torch.dtype
) -> None:
    def training(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2, dtype=dtype)
        return model, torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()

    model, optimizer = training(then)
    step(model, optimizer, then)
    dd.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    model, optimizer = training(now)
    dd.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    step(model, optimizer, now)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {now}


def test_further_objects_and_plain_data_are_saved_by_name(tmp_path: Path) -> None:
    first, second = filled(nn.Linear(2, 1), 1.0), filled(nn.Linear(2, 1), 2.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(first.parameters(), lr=1.0), [3])
    best = {"loss": 0.5, "at": (1, 2), "none": None, "rows": torch.ones(2)}
    path = dd.save_checkpoint(tmp_path, generator=first, discriminator=second, scheduler=schedule, best=best)
    found = dd.load_checkpoint(path, discriminator=first)
    assert found["best"]["rows"].tolist() == [1.0, 1.0]
    assert found["best"] | {"rows": 0} == best | {"rows": 0}
    assert first.weight.tolist() == [[2.0, 2.0]]


class Part(torch.Tensor):
    """A tensor type of sharded models."""


class FullyShardedDataParallel(nn.Module):
    """The name of a class whose state_dict() is collective."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.float64(1.0), "value cannot be saved.*GLOBAL numpy"),
        (lambda: None, "value cannot be saved.*pickle"),
        (Path("x"), "value cannot be saved.*GLOBAL pathlib"),
        (torch.ones(1).as_subclass(Part), "a Part cannot be saved.*torch.distributed.checkpoint"),
        (nn.Sequential(FullyShardedDataParallel()), "value is sharded.*torch.distributed.checkpoint"),
        ([{torch.ones(1)}], "a tensor in a set cannot be saved"),
        (torch.eye(2).to_sparse(), "convert it to a dense one"),
    ],
)
def test_objects_that_need_code_to_load_are_refused_when_saving(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        dd.save_checkpoint(tmp_path / "run", value=value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["random", "required", "async_op", "dualdist", "extra"])
def test_reserved_part_names_are_refused(tmp_path: Path, name: str) -> None:
    """Such a part would silently not be loaded."""
    path = dd.save_checkpoint(tmp_path, step=1)
    for part in (nn.Linear(1, 1), 1):
        with pytest.raises(UsageError, match=f"{name}="):
            dd.elastic.State(tmp_path, **{name: part})  # type: ignore[arg-type]
        if name == "async_op" and part == 1:
            continue
        with pytest.raises(UsageError, match=f"{name}="):
            dd.save_checkpoint(tmp_path, **{name: part})  # type: ignore[call-overload]
    if name in ("random", "required"):
        with pytest.raises(UsageError, match=rf"{name}=Linear.*expected True or False"):
            dd.load_checkpoint(path, **{name: nn.Linear(1, 1)})  # type: ignore[arg-type]


STRANGE: tuple[Any, ...] = (5, None, [], {}, {"param_groups": 5}, {"state": 1, "param_groups": [{"params": [0, 1]}]})


@pytest.mark.parametrize("state", STRANGE, ids=str)
@pytest.mark.parametrize("random", [5, [], [{}], [{"torch": 1, "python": 2, "numpy": 3}]], ids=str)
def test_a_malformed_foreign_file_raises_checkpoint_error(tmp_path: Path, state: Any, random: Any) -> None:
    content = {METADATA: {"format": FORMAT, "random": random, "orders": state}, EXTRA: {}, "thing": state}
    write(tmp_path, content, None, FileProgress())
    model = nn.Linear(1, 1)
    for thing in (
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        dd.Sampler(range(3), remainder="pad"),
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1),
    ):
        with pytest.raises(
            CheckpointError, match=r"00000001\.pt does not fit|thing refuses its state|Error|no random state"
        ):
            dd.load_checkpoint(tmp_path, thing=thing)


class Wary(nn.Linear):
    """Refuses the state of a file, after it has loaded it."""

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        super().load_state_dict(state, *args, **kwargs)
        if state["bias"].item() == 7.0:
            raise ValueError("no")


def test_an_object_whose_state_cannot_be_copied_is_loaded_last_and_only_if_the_others_accept(tmp_path: Path) -> None:
    """A sampler with indices drawn and not recorded, and a module with uninitialized parameters."""
    saved = dd.Sampler(range(6), remainder="pad")
    saved.record(2)
    dd.save_checkpoint(tmp_path, sampler=saved, model=filled(nn.Linear(2, 1), 3.0), wary=filled(nn.Linear(1, 1), 7.0))
    sampler, lazy, wary = dd.Sampler(range(6), remainder="pad"), nn.LazyLinear(1), filled(Wary(1, 1), 1.0)
    list(sampler)
    with pytest.raises(CheckpointError, match="wary refuses its state: ValueError: no"):
        dd.load_checkpoint(tmp_path, sampler=sampler, model=lazy, wary=wary)
    assert (sampler.position, nn.parameter.is_lazy(lazy.weight), wary.weight.item()) == (0, True, 1.0)
    dd.load_checkpoint(tmp_path, sampler=sampler, model=lazy)
    assert (sampler.position, lazy.weight.tolist()) == (2, [[3.0, 3.0]])


def test_a_checkpoint_of_another_number_of_ranks_gives_new_random_states(tmp_path: Path) -> None:
    path = Path(dd.save_checkpoint(tmp_path))
    content = torch.load(path, weights_only=True)
    content[METADATA]["random"] *= 2
    write(tmp_path, content, None, FileProgress())
    draws = []
    for file in (path, path, tmp_path, tmp_path):
        dd.load_checkpoint(file)
        draws.append((torch.rand(1).item(), float(np.random.rand())))
    assert draws[0] == draws[1]
    assert draws[2] == draws[3]
    assert set(draws[0]).isdisjoint(draws[2])
