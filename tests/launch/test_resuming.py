"""A run that stops in the middle of an epoch resumes on other ranks and another backend."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
from harness.problem import make_model, make_optimizer
from launch import resuming_program
from launch.resuming_program import SAMPLES, SEED, TOGETHER

import dualdist as dd

LEFT_AFTER = 3


def test_other_ranks_on_another_backend_see_the_remaining_samples_once(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    before = dd.spawn(resuming_program.train, 2, (folder, LEFT_AFTER, 2), backend="native")
    after = dd.spawn(resuming_program.train, 3, (folder, SAMPLES, 0), backend="horovod")
    assert [rank["found"] for rank in (*before, *after)] == [None] * 2 + [{"backend": "native"}] * 3
    assert [rank["epochs"] for rank in after] == [(1, 1)] * 3
    for kind in (0, 1):  # of a data set with an order of the sampler's, and of one with its own
        seen = [[sample for batch in rank["seen"] for sample in batch[kind]] for rank in (*before, *after)]
        assert sorted(chain(*seen)) == list(range(SAMPLES))
        assert [len(samples) for samples in seen] == [TOGETHER // 2 * LEFT_AFTER] * 2 + [10] * 3
    alone = trained_by_one_process()
    for rank in after:
        for mine, right in zip(rank["parameters"], alone, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)  # sums in another order


def trained_by_one_process() -> list[torch.nn.Parameter]:
    """One epoch on the samples of all ranks' steps together, in the order of torch's own sampler."""
    model = make_model()
    optimizer = make_optimizer(model)
    sampler = torch.utils.data.DistributedSampler(range(SAMPLES), 1, 0, seed=SEED)  # type: ignore[arg-type]
    for samples in torch.tensor(list(sampler)).split(TOGETHER):
        resuming_program.step(model, optimizer, samples)
    return list(model.parameters())
