"""Every scheduler and optimizer of torch resumes from a checkpoint, and from a copy in memory, as if never stopped."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

import dualdist as dd


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dd.init()
    yield
    dd.shutdown()


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
        self.scheduler = schedule(self.optimizer) if schedule else None
        if self.scheduler is not None:
            self.parts["scheduler"] = self.scheduler

    def state(self) -> Any:
        return plain({name: part.state_dict() for name, part in self.parts.items()})

    def steps(self, count: int) -> list[Any]:
        """What each step has left."""
        return [self._step() for _ in range(count)]

    def _step(self) -> Any:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.model(torch.tensor([0, 2])).sin().sum()
            loss.backward()
            return loss.item()

        self.optimizer.step(closure)
        if isinstance(self.scheduler, schedules.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        elif self.scheduler is not None:
            self.scheduler.step()
        return [group["lr"] for group in self.optimizer.param_groups], plain(self.model.state_dict())


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


WAYS = [by_file, by_file_later, by_state, by_memory]


def check(tmp_path: Path, way: Callable[..., Training], make: Callable[[], Training], steps: int) -> None:
    was = make()
    was.steps(steps)
    before = was.state()
    whole = make()
    expected = whole.steps(steps + 5)[steps:]
    resumed = way(tmp_path, was, make())
    assert resumed.state() == before
    assert resumed.steps(5) == expected


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedules.MultiStepLR(optimizer, [1, 4, 5, 5]),
    "ConstantLR": lambda optimizer: schedules.ConstantLR(optimizer, total_iters=4),
    "LinearLR": schedules.LinearLR,
    "ExponentialLR": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
    "SequentialLR": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer), schedules.MultiStepLR(optimizer, [2, 3]), schedules.StepLR(optimizer, 1)],
        [2, 6],
    ),
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 5),
    "ChainedScheduler": lambda optimizer: schedules.ChainedScheduler(
        [
            schedules.SequentialLR(
                optimizer, [schedules.LinearLR(optimizer), schedules.MultiStepLR(optimizer, [2])], [2]
            ),
            schedules.MultiStepLR(optimizer, [4]),
        ]
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_resumes_as_if_never_stopped(tmp_path: Path, name: str, way: Callable[..., Training]) -> None:
    check(tmp_path, way, lambda: Training(torch.optim.SGD, SCHEDULES[name], lr=0.1, momentum=0.9), steps=3)


OPTIMIZERS = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_resumes_as_if_never_stopped(
    tmp_path: Path, kind: type[torch.optim.Optimizer], way: Callable[..., Training]
) -> None:
    check(tmp_path, way, lambda: Training(kind, lr=0.1), steps=2)


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
