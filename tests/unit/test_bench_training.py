"""A launch of a comparison in its ranks: the training is recorded even if allreduces cannot be timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dualdist as dd
from dualdist.bench.options import TrainOptions
from dualdist.bench.ranks import contenders
from dualdist.bench.ranks.measurements import train
from dualdist.errors import UnsupportedError


@pytest.fixture
def _session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dd.init()
    yield
    dd.shutdown()


@pytest.mark.usefixtures("_session")
def test_a_training_whose_allreduces_cannot_be_timed_is_recorded_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_place(tensor: torch.Tensor) -> None:
        raise UnsupportedError("only on CPU tensors")  # as raw mpi4py does for GPU tensors

    monkeypatch.setattr(
        contenders, "raw_allreduce", lambda backend: contenders.RawAllreduce("x", in_place, torch.Tensor.clone)
    )
    options = TrainOptions("mlp", "dualdist", batch=2, warmup=1, steps=2, sizes=(8,))
    assert train(options, tmp_path, 0.0) == {"unmeasured": "only on CPU tensors"}
    assert len(json.loads((tmp_path / "rank-0.json").read_text())["ends"]) == 3
