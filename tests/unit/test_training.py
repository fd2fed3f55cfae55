"""A launch of a comparison inside its ranks: what is recorded, whatever follows the training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dualdist as dd
from dualdist.bench.cases import TrainOptions
from dualdist.bench.ranks import baselines
from dualdist.bench.ranks.training import train
from dualdist.errors import UnsupportedError


@pytest.fixture
def _session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dd.init()
    yield
    dd.shutdown()


@pytest.mark.usefixtures("_session")
def test_a_training_whose_allreduces_cannot_be_timed_is_recorded_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_place(tensor: torch.Tensor) -> None:
        raise UnsupportedError("only on CPU tensors")  # as raw mpi4py says of a GPU's, and no runner has a GPU

    monkeypatch.setattr(
        baselines, "collective_of", lambda backend: baselines.BaselineAllreduce("x", in_place, torch.Tensor.clone)
    )
    options = TrainOptions("mlp", "dualdist", batch=2, warmup=1, steps=2, sizes=(8,))
    assert train(options, tmp_path, 0.0) == {"unmeasured": "only on CPU tensors"}
    assert len(json.loads((tmp_path / "rank-0.json").read_text())["ends"]) == 3
