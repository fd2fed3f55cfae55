"""A training that is stopped or loses a rank resumes on other ranks, and ends as if nothing had happened."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from contract.oracle import loss_of, net
from faults.elastic_rank import GLOBAL_BATCH, SAMPLES, SEED, step
from harness.jobs import Launch
from harness.problem import make_model, make_optimizer
from launch import programs
from launch.running import RUN

import dualdist as dd

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
BATCHES = 8
LEFT_AFTER = 3


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
    first, then = zip(*dd.spawn(programs.train_twice, 2, (folder, stop_after, batch)), strict=True)
    assert [stopped for _, stopped in (*first, *then)] == [True, True, False, False]
    seen = sorted(chain(*(steps for steps, _ in (*first, *then))))
    samples = sorted({*range(programs.UNEVEN_SAMPLES)} - dropped)
    assert seen == [(epoch, sample) for epoch in range(programs.UNEVEN_EPOCHS) for sample in samples]
    assert max(epoch for steps, _ in first for epoch, _ in steps) == 1


def test_other_ranks_on_another_backend_see_the_remaining_samples_once(tmp_path: Path) -> None:
    """A run stops in the middle of an epoch; another one resumes it."""
    folder = str(tmp_path / "run")
    before = dd.spawn(programs.train_on, 2, (folder, LEFT_AFTER, 2), backend="native")
    after = dd.spawn(programs.train_on, 3, (folder, SAMPLES, 0), backend="horovod")
    assert [rank["found"] for rank in (*before, *after)] == [None] * 2 + [{"backend": "native"}] * 3
    assert [rank["epochs"] for rank in after] == [(1, 1)] * 3
    for kind in (0, 1):  # of a data set with an order of the sampler's, and of one with its own
        seen = [[sample for batch in rank["seen"] for sample in batch[kind]] for rank in (*before, *after)]
        assert sorted(chain(*seen)) == list(range(SAMPLES))
        assert [len(samples) for samples in seen] == [GLOBAL_BATCH // 2 * LEFT_AFTER] * 2 + [10] * 3
    model = make_model()
    optimizer = make_optimizer(model)
    sampler = torch.utils.data.DistributedSampler(range(SAMPLES), 1, 0, seed=SEED)  # type: ignore[arg-type]
    for samples in torch.tensor(list(sampler)).split(GLOBAL_BATCH):
        step(model, optimizer, samples)
    for rank in after:
        for mine, right in zip(rank["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)  # sums in another order
