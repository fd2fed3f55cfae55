"""What ranks measure: a recorded training, of the benchmark or of an unmodified program."""

from __future__ import annotations

import atexit
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dualdist as dd
from dualdist.bench.jobs import TrainOptions
from dualdist.bench.ranks.measurements import train
from dualdist.diagnostics.recording import Recorder, RecordingPlan


@pytest.fixture
def _session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dd.init()
    yield
    dd.shutdown()


@pytest.mark.usefixtures("_session")
def test_a_training_whose_allreduces_cannot_be_timed_is_recorded_with_the_reason(
    tmp_path: Path,
) -> None:
    options = TrainOptions("mlp", "dualdist", batch=2, warmup=1, steps=2, sizes=(8,))
    reason = "no raw library is known beneath the backend 'single', to compare it with"
    assert train(options, tmp_path, 0.0) == {"unmeasured": reason}
    assert len(json.loads((tmp_path / "rank-0.json").read_text())["ends"]) == 3


STEPS = 5


class Derived(torch.optim.SGD):
    """torch calls step hooks for this class and for SGD."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # restored afterwards
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    return Recorder(RecordingPlan(tmp_path / "rank-0.json", 1, STEPS - 1), {}, torch.device("cpu"), 0.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Derived])
def test_a_step_counts_once_even_if_it_calls_the_base_classs_step(
    recorder: Recorder, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    torch.optim.SGD([torch.zeros(1)])
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer, taken = kind([parameter], lr=0.5), itertools.count(1)
    recorder.attach(optimizer)
    with torch.no_grad():
        parameter.add_(1.0)  # as a broadcast does after the optimizer was wrapped

    def train() -> None:
        while True:
            optimizer.zero_grad()
            (next(taken) * parameter.sum()).backward()
            optimizer.step()

    with pytest.raises(SystemExit):
        train()
    kept = json.loads(recorder.plan.path.read_text())
    assert (next(taken), len(kept["ends"])) == (STEPS + 1, STEPS)
    assert kept["losses"] == [2.0, 2.0, -3.0, -16.0, -40.0]
    assert (kept["start"], kept["sample"]) == ([1.0, 1.0], [-6.5, -6.5])
    assert kept["rounding"] == pytest.approx(1.2e-7, rel=0.01)
