"""Elastic training on real ranks ends with the parameters of an undisturbed one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from contract.oracle import loss_of, net
from harness.jobs import Launch
from launch import uneven_program
from launch.running import RUN, TORCHRUN

import dualdist as dd

PROGRAM = str(Path(__file__).with_name("elastic_program.py"))
SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
BATCHES = 8
SIZE = 2


def test_a_training_with_failures_ends_like_an_undisturbed_one(launch: Launch) -> None:
    """From the commit before, momentum included: to the bit, for two ranks add alike every time."""
    reports = launch.reports([*TORCHRUN, PROGRAM, "3", "5"], SIZE)
    for report in reports:
        for training in (report["undisturbed"], report["failing"]):
            assert training["parameters"] == reports[0]["undisturbed"]["parameters"]
            assert training["seen"] == [0, 1, 2, 3, 4, 5]
        assert report["undisturbed"]["resets"] == []
        assert report["failing"]["resets"] == [SIZE, SIZE]


def test_a_horovod_script_continues_when_a_rank_is_lost_and_returns(launch: Launch) -> None:
    """Under horovodrun's elastic mode; to the bit what one process trains, as all ranks have its data."""
    argv = [*RUN, "-np", "2", "--min-ranks", "1", "--as-horovod"]
    reports = launch.reports([*argv, SCRIPT, str(BATCHES)], 2)
    assert [report["sizes"] for report in reports] == [[2, 1, 2], [2]]
    model = net(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in range(BATCHES):
        optimizer.zero_grad()
        loss_of(model, 0, batch).backward()
        optimizer.step()
    expected = torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()
    assert [report["parameters"] for report in reports] == [expected] * 2


@pytest.mark.parametrize(("batch", "stop_after", "dropped"), [(1, 6, set()), (2, 3, {9})])
def test_ranks_with_different_numbers_of_batches_stop_at_one_step(
    tmp_path: Path, batch: int, stop_after: int, dropped: set[int]
) -> None:
    """The notice comes in the batch that only one rank has: the next epoch has begun when all stop, and resumes."""
    folder = str(tmp_path / "run")
    first, then = zip(*dd.spawn(uneven_program.train_twice, 2, (folder, stop_after, batch)), strict=True)
    assert [stopped for _, stopped in (*first, *then)] == [True, True, False, False]
    seen = sorted(chain(*(steps for steps, _ in (*first, *then))))
    samples = sorted({*range(uneven_program.SAMPLES)} - dropped)
    assert seen == [(epoch, sample) for epoch in range(uneven_program.EPOCHS) for sample in samples]
    assert max(epoch for steps, _ in first for epoch, _ in steps) == 1
