"""The content of a checkpoint on one rank: plain names and data, nothing lost; every optimizer resumes from it."""

import copy
import inspect
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

import dualdist as dd
from dualdist.checkpoint.files import EXTRA, FORMAT, METADATA, FileProgress, write
from dualdist.checkpoint.state import collect_state, copies_its_state
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


def test_what_was_loaded_is_true_even_without_plain_data(tmp_path: Path) -> None:
    assert not dd.load_checkpoint(tmp_path)
    dd.save_checkpoint(tmp_path, model=nn.Linear(1, 1))
    found = dd.load_checkpoint(tmp_path)
    assert found == {}
    assert found


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
    for dtype in (then, now):
        model = nn.Linear(2, 2, dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        dd.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()
        dd.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
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
        (torch.ones(1).as_subclass(Part), "value is a Part, which cannot be saved.*torch.distributed.checkpoint"),
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


class Selective(nn.Linear):
    """A module whose state_dict() is the program's own, and fits a file that its load_state_dict() refuses."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"odd": torch.ones(1)}


def with_hook() -> nn.Module:
    module = nn.Linear(1, 1)
    module.register_state_dict_post_hook(lambda *_: None)
    return module


def patched() -> nn.Module:
    module = nn.Linear(1, 1)
    module.load_state_dict = lambda state: None  # type: ignore[method-assign, assignment, misc]
    return module


@pytest.mark.parametrize("make", [lambda: Selective(1, 1), with_hook, patched, lambda: nn.LazyLinear(1), object])
def test_only_modules_of_torchs_own_code_are_loaded_without_a_copy(make: Callable[[], object]) -> None:
    assert not copies_its_state(make())
    assert copies_its_state(nn.Sequential(nn.BatchNorm1d(2), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1)))


def test_a_module_that_refuses_what_fits_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    dd.save_checkpoint(tmp_path, model=model, other=Selective(1, 1))
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(CheckpointError, match="other refuses its state"):
        dd.load_checkpoint(tmp_path, model=model, other=Selective(1, 1))
    assert model.weight.item() == before.item() + 1


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


def plain(value: Any) -> Any:
    """Convert to a structure of types and numbers, so that == compares all of it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return type(value), {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [plain(item) for item in value]
    return value


class Training:
    def __init__(
        self, kind: type[torch.optim.Optimizer], schedule: Callable[[Any], Any] | None = None, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.model = nn.Embedding(4, 2, sparse=kind is torch.optim.SparseAdam)
        self.optimizer = kind(self.model.parameters(), **options)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if schedule is not None:
            self.parts["scheduler"] = schedule(self.optimizer)

    def state(self) -> Any:
        return plain({name: part.state_dict() for name, part in self.parts.items()})

    def closure(self) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(torch.tensor([0, 2])).sin().sum()
        loss.backward()
        return loss.item()

    def steps(self, count: int) -> list[Any]:
        """Return what each step has left."""
        found = []
        for _ in range(count):
            self.optimizer.step(self.closure)
            scheduler = self.parts.get("scheduler")
            if isinstance(scheduler, schedules.ReduceLROnPlateau):
                scheduler.step(1.0)
            elif scheduler is not None:
                scheduler.step()
            found.append(([group["lr"] for group in self.optimizer.param_groups], plain(self.model.state_dict())))
        return found


def by_file(tmp_path: Path, was: Training, new: Training) -> Training:
    dd.save_checkpoint(tmp_path, **was.parts)
    dd.load_checkpoint(tmp_path, **new.parts)
    return new


def by_file_later(tmp_path: Path, was: Training, new: Training) -> Training:
    saving = dd.save_checkpoint(tmp_path, **was.parts, async_op=True)
    was.steps(1)
    saving.wait()
    dd.load_checkpoint(tmp_path, **new.parts)
    return new


def by_state(tmp_path: Path, was: Training, new: Training) -> Training:
    dd.elastic.State(tmp_path, **was.parts).save()
    dd.elastic.State(tmp_path, **new.parts).sync()
    return new


def by_memory(tmp_path: Path, was: Training, new: Training) -> Training:
    state = dd.elastic.State(**was.parts)
    state.save()
    was.steps(1)
    state.restore()
    return was


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [schedules.LinearLR(optimizer), schedules.MultiStepLR(optimizer, [2, 3]), schedules.StepLR(optimizer, 1)]
    return schedules.SequentialLR(optimizer, parts, [2, 6])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedules.MultiStepLR(optimizer, [1, 4, 5, 5]),
    "ConstantLR": lambda optimizer: schedules.ConstantLR(optimizer, total_iters=4),
    "LinearLR": schedules.LinearLR,
    "ExponentialLR": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
    "SequentialLR": sequence,
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 5),
    "ChainedScheduler": lambda optimizer: schedules.ChainedScheduler(
        [sequence(optimizer), schedules.MultiStepLR(optimizer, [4])]
    ),
    "ReduceLROnPlateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=2),
    "CyclicLR": lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=20),
    "PolynomialLR": schedules.PolynomialLR,
    "SWALR": lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=3),
}


def test_every_scheduler_of_torch_is_covered() -> None:
    names = {name for name in schedules.__all__ if inspect.isclass(getattr(schedules, name))}
    assert names - {LRScheduler.__name__} <= set(SCHEDULES)


TRAININGS: dict[str, Callable[[], Training]] = {
    name: lambda schedule=schedule: Training(torch.optim.SGD, schedule, lr=0.1, momentum=0.9)  # type: ignore[misc]
    for name, schedule in SCHEDULES.items()
} | {
    name: lambda kind=kind: Training(kind, lr=0.1)  # type: ignore[misc]
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}


@pytest.mark.parametrize("way", [by_file, by_file_later, by_state, by_memory])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_scheduler_and_an_optimizer_resume_as_if_never_stopped(
    tmp_path: Path, name: str, way: Callable[..., Training]
) -> None:
    make = TRAININGS[name]
    was = make()
    was.steps(3)
    before = was.state()
    expected = make().steps(8)[3:]
    resumed = way(tmp_path, was, make())
    assert resumed.state() == before
    assert resumed.steps(5) == expected


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content

    def state_dict(self) -> Any:
        return {"content": self.content}

    def load_state_dict(self, state: Any) -> None:
        self.content = state["content"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        Counter("aab"),
        Counter({"down": -3, "none": 0}),
        OrderedDict([("b", torch.ones(1)), ("a", torch.zeros(1))]),
        {1: Counter("b"), (2, "x"): [Counter("c"), (OrderedDict(z=Counter("d")),)]},
        {"set": {1, 2}, "none": None, "bytes": bytearray(b"x"), "size": torch.Size([1, 2])},
    ],
    ids=str,
)
def test_containers_are_restored(tmp_path: Path, value: Any, is_async: bool) -> None:
    before = plain(copy.deepcopy(value))
    box, memory = Box(copy.deepcopy(value)), dd.elastic.State(box=Box(copy.deepcopy(value)), value=value)
    for _ in range(2):
        saving = dd.save_checkpoint(tmp_path, value=value, box=box, async_op=is_async)  # type: ignore[call-overload]
        if is_async:
            saving.wait()
        found = dd.load_checkpoint(tmp_path, box=box)
        memory.save()
        memory.restore()
        for each in (found["value"], box.content, memory.value, memory.box.content, value):
            assert plain(each) == before
    for each in (box.content, memory.value, memory.box.content):
        if isinstance(each, OrderedDict):
            assert list(each) == list(value), "in the order in which it was"
