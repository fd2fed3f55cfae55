"""Shares of an epoch, compared with torch's DistributedSampler, and the state of a sampler and loader on one rank."""

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import pytest
import torch
from harness.pages import find_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

import dualdist as dd
from dualdist.data.sampler import EpochShare, Remainder
from dualdist.errors import UsageError

COUNT = 20


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dd.init()
    yield
    dd.shutdown()


def shares(count: int, start: int, size: int, remainder: Remainder) -> list[EpochShare]:
    return [EpochShare(count, start, rank, size, remainder) for rank in range(size)]


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 5), st.booleans(), st.booleans())
def test_an_epoch_is_split_like_distributed_sampler(
    count: int, size: int, epoch: int, shuffle: bool, drop: bool
) -> None:
    sampler = dd.Sampler(range(count), remainder="drop", shuffle=shuffle, seed=3)
    sampler.set_epoch(epoch)
    order = torch.tensor(list(sampler))
    for rank, share in enumerate(shares(count, 0, size, "drop" if drop else "pad")):
        oracle = DistributedSampler(range(count), size, rank, shuffle, 3, drop)  # type: ignore[arg-type]
        oracle.set_epoch(epoch)
        assert share.indices(order).tolist() == list(oracle)
        assert len(share) == len(share.indices(order))


@settings(deadline=None)
@given(
    st.integers(0, 80),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6),
    st.sampled_from(["drop", "pad", "uneven"]),
)
def test_each_sample_is_seen_once_when_the_number_of_ranks_changes(
    count: int, lives: list[tuple[int, int, int]], remainder: Remainder
) -> None:
    """`lives` are (ranks, batch size, steps); the last one runs to the end of the epoch."""
    order = torch.randperm(count)
    position, seen = 0, []
    for number, (size, batch, steps) in enumerate(lives):
        ranks = shares(count, position, size, remainder)
        done = min(steps * batch, len(ranks[0]))
        if number == len(lives) - 1:
            done = len(ranks[0])
        # Step by step all ranks together take the next piece of the order, whatever their number.
        for step in range(0, done, batch):
            taken = [sample for share in ranks for sample in share.indices(order).tolist()[step : step + batch]]
            piece = order[position + step * size :][: min(batch, done - step) * size].tolist()
            repeated = len(taken) - len(piece)
            assert repeated == 0 or (remainder == "pad" and step + batch >= len(ranks[0]))
            assert set(piece) <= set(taken)
            seen += taken
        position = ranks[0].position(done)
    each_once = sorted(order.tolist())
    last = lives[-1][0]
    if remainder == "uneven":
        assert sorted(seen) == each_once
    elif remainder == "drop":
        assert len(set(seen)) == len(seen) > count - last
    else:
        assert set(seen) == set(each_once)
        # A life that ends within its last, padded step has no more to do, and only the last one gets there.
        assert len(seen) < count + sum(size for size, _, _ in lives)


def sampler_of(count: int = COUNT, **options: Any) -> dd.Sampler:
    return dd.Sampler(range(count), **{"remainder": "drop", "seed": 1, **options})


def sampler_at(position: int, count: int = COUNT) -> dd.Sampler:
    sampler = sampler_of(count)
    sampler.load_state_dict(sampler.state_dict() | {"position": position})
    return sampler


def loader_of(sampler: dd.Sampler, batch_size: int | None = 4, **options: Any) -> DataLoader[Any]:
    return dd.loader(range(sampler.count or 0), batch_size, sampler=sampler, **options)  # type: ignore[arg-type]


def batches(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_length_is_that_of_the_current_iteration_and_epochs_advance() -> None:
    sampler = sampler_of()
    loader = loader_of(sampler)
    first, second = batches(loader), batches(loader)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(COUNT))
    assert first != second
    assert (sampler.epoch, sampler.position) == (2, 0)
    sampler.set_epoch(0)
    assert batches(loader) == first
    sampler = sampler_of(22)
    loader = loader_of(sampler, drop_last=True)
    for number, _ in enumerate(loader):
        assert len(loader) == 5
        if number == 1:
            break
    iterator = iter(loader)
    assert len(loader) == 3
    assert len(list(iterator)) == 3
    assert list(iterator) == []
    assert (sampler.epoch, len(loader)) == (1, 5)


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_not_recorded(workers: int) -> None:
    sampler = sampler_of()
    whole = batches(loader_of(sampler_of()))
    for done, batch in enumerate(loader_of(sampler, num_workers=workers), 1):
        assert batch.tolist() == whole[done - 1]
        assert sampler.state_dict()["position"] == sampler.position == 4 * done
        if done == 3:
            break
    resumed = sampler_at(12)
    assert len(loader_of(resumed)) == 2
    assert batches(loader_of(resumed)) == whole[3:]
    assert batches(loader_of(sampler)) == whole[3:]  # it goes on there itself, too


def test_a_state_of_the_last_step_resumes_at_the_end_of_its_epoch() -> None:
    """The program's work after each epoch is then done on resuming."""
    sampler = sampler_of()
    for _ in loader_of(sampler):
        state = sampler.state_dict()
    resumed = sampler_of()
    resumed.load_state_dict(state)
    resumed.set_epoch(resumed.epoch)
    assert (resumed.epoch, resumed.position) == (0, COUNT)
    assert batches(loader_of(resumed)) == []
    assert resumed.state_dict() == sampler.state_dict()
    assert (resumed.epoch, resumed.position) == (1, 0)
    broken_off = sampler_of()
    for number, _ in enumerate(loader_of(broken_off), 1):
        if number == 5:
            break
    assert broken_off.epoch == 0
    assert len(batches(loader_of(broken_off))) == 5, "the next epoch"
    assert broken_off.epoch == 2


@pytest.mark.parametrize(
    ("count", "position", "drop_last", "lengths"),
    [(20, 12, False, [2, 5, 5]), (22, 12, True, [2, 5, 5]), (22, 20, True, [0, 5, 5])],
)
def test_length_after_the_last_batch_is_that_of_the_next_epoch(
    count: int, position: int, drop_last: bool, lengths: list[int]
) -> None:
    """`zip(range(len(loader)), loader)`, which does not see the end, then gets the whole epoch."""
    sampler = sampler_at(position, count)
    loader = loader_of(sampler, drop_last=drop_last)
    found = [sum(1 for _ in zip(range(len(loader)), loader, strict=False)) for _ in lengths]
    assert (found, sampler.epoch) == (lengths, 2)


def test_a_plain_loader_advances_past_a_finished_epoch_and_looking_at_a_batch_loses_none() -> None:
    sampler = sampler_at(COUNT)
    plain = DataLoader(range(COUNT), 4, sampler=sampler)  # type: ignore[arg-type]
    assert [len(list(plain)) for _ in range(2)] == [0, 5]
    assert sampler.epoch == 1
    sampler = sampler_at(16)
    plain = DataLoader(range(COUNT), 4, sampler=sampler, num_workers=1)  # type: ignore[arg-type]
    looked = next(iter(plain)).tolist()
    assert batches(plain) == [looked]
    assert [len(batches(DataLoader(range(COUNT), 4, sampler=sampler_of()))) for _ in range(4)] == [5] * 4  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_that_drops_a_batch_is_detected(workers: int) -> None:
    """The sampler cannot know that the last two samples make no batch; it does not lose them silently."""
    sampler = sampler_of(22)
    plain = DataLoader(range(22), 4, sampler=sampler, drop_last=True, num_workers=workers)  # type: ignore[arg-type]

    def epoch() -> int:
        count = 0
        for batch in plain:
            sampler.record(len(batch))
            count += 1
        return count

    assert epoch() == 5
    assert [epoch(), epoch()] == [0, 0]
    with pytest.raises(UsageError, match=r"2 samples of epoch 0 .*drop_last=True.*sampler\.finish\(\)"):
        epoch()
    sampler.finish()
    assert (epoch(), sampler.epoch, sampler.position) == (5, 1, 20)


def test_a_plain_loader_must_record_and_an_iteration_ends_earlier_ones() -> None:
    sampler = sampler_of()
    plain = DataLoader(range(COUNT), 4, sampler=sampler)  # type: ignore[arg-type]
    next(iter(plain))
    with pytest.raises(UsageError, match=r"dd\.loader.*sampler\.record"):
        sampler.state_dict()
    sampler.record(4)
    assert sampler.state_dict()["position"] == 4
    with pytest.raises(UsageError, match=r"17 more.*has 16 left"):
        sampler.record(17)
    loader = loader_of(sampler_of())
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(UsageError, match="another iteration"):
        next(first)
    with pytest.raises(UsageError, match="another iteration"):
        list(zip_longest(loader, loader))
    sampler = sampler_of(shuffle=False)
    for number, sample in enumerate(loader_of(sampler, None), 1):
        assert (sample, sampler.position) == (number - 1, number), "single samples"


def test_weights_draw_what_torchs_weighted_sampler_draws_and_resume_in_the_middle() -> None:
    weights = torch.rand(COUNT)
    sampler = sampler_of(weights=weights)
    loader = loader_of(sampler)
    for epoch in range(2):
        generator = torch.Generator().manual_seed(1 + epoch)
        drawn = list(WeightedRandomSampler(weights.tolist(), COUNT, generator=generator))
        assert list(chain(*batches(loader))) == drawn
    sampler.set_epoch(1)
    first = [batch.tolist() for _, batch in zip(range(2), loader, strict=False)]
    resumed = sampler_of(weights=weights.tolist())
    resumed.load_state_dict(sampler.state_dict())
    assert list(chain(*first, *batches(loader_of(resumed)))) == drawn
    for other in (None, weights + 1):
        with pytest.raises(UsageError, match=r"weights SHA-256 \w{8} in the state, weights .* now"):
            sampler_of(weights=other).load_state_dict(sampler.state_dict())
    plain = sampler_of().state_dict()
    del plain["weights"]  # as of an earlier version
    sampler_of().load_state_dict(plain)


def test_batches_of_a_batch_sampler_are_divided_and_resumed_as_the_manual_shows() -> None:
    (block,) = (block for block in find_blocks("python") if "BatchSampler" in block.text)
    manual: dict[str, Any] = {}
    exec(block.text.partition("dd.init()")[0], manual)
    texts = [torch.full((length,), float(length)) for length in range(COUNT)]
    data = manual["Batches"](texts, torch.utils.data.BatchSampler(range(COUNT), 3, drop_last=False))
    sampler = dd.Sampler(data, remainder="drop", seed=3)
    whole = list(dd.loader(data, None, sampler=sampler))
    assert sorted(int(batch.max()) for batch in whole) == [2, 5, 8, 11, 14, 17, 19]
    assert sorted(map(len, whole)) == [2, *[3] * 6]
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "position": 4})
    for batch, right in zip(dd.loader(data, None, sampler=sampler, num_workers=1), whole[4:], strict=True):
        assert torch.equal(batch, right)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "no epoch and no position"),
        ({"epoch": "1"}, "epoch is '1'"),
        ({"position": -1}, "position is -1"),
        ({"count": 19}, "count 19 in the state, count 20 now"),
        ({"seed": 2, "shuffle": False}, "shuffle False, seed 2 in the state, shuffle True, seed 1 now"),
    ],
)
def test_a_state_of_another_order_is_refused(state: dict[str, Any], words: str) -> None:
    sampler = sampler_of()
    with pytest.raises(UsageError, match=words):
        sampler.load_state_dict(state and sampler.state_dict() | state)


def test_invalid_arguments_are_refused_with_the_valid_ones() -> None:
    with pytest.raises(UsageError, match="'drop', 'pad', 'uneven'"):
        sampler_of(remainder="keep")
    with pytest.raises(UsageError, match="shuffle=False"):
        dd.Sampler(Stream(5), remainder="drop")
    with pytest.raises(UsageError, match="with a length, not a generator"):
        dd.Sampler((number for number in range(3)), remainder="drop")  # type: ignore[arg-type]
    weighted = torch.utils.data.WeightedRandomSampler([1.0, 2.0], 32)
    for other in (weighted, DistributedSampler(range(3), 1, 0), DataLoader(range(3))):  # type: ignore[arg-type, list-item]
        with pytest.raises(UsageError, match=f"divides a data set, not a {type(other).__name__}, whose choice"):
            dd.Sampler(other, remainder="drop")
    for weights, words in (
        ([1.0], r"weights of shape \(1,\): expected one for each of the 20 samples"),
        ([1.0] * 19 + [-1.0], "weights: expected finite numbers, none below 0"),
        ([0.0] * 20, "at least one above"),
        (["a"] * 20, "weights: expected a number for each sample, not a list"),
    ):
        with pytest.raises(UsageError, match=words):
            sampler_of(weights=weights)
    with pytest.raises(UsageError, match="leave out shuffle=False"):
        sampler_of(weights=[1.0] * 20, shuffle=False)
    with pytest.raises(UsageError, match=r"shuffle: pass it to dd\.Sampler"):
        loader_of(sampler_of(), shuffle=True)
    with pytest.raises(UsageError, match=r"batch_sampler: .*pass sampler=dd\.Sampler"):
        dd.loader(range(3), batch_sampler=torch.utils.data.BatchSampler(range(3), 2, False))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"needs sampler=dd\.Sampler\(dataset, \.\.\.\)$"):
        dd.loader(range(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has 3 samples, that of the sampler 20"):
        dd.loader(range(3), sampler=sampler_of())  # type: ignore[arg-type]


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Augment each sample by the generators of random, numpy and torch."""

    classes = ("a", "b")

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        import random

        import numpy as np

        return torch.tensor([index, random.random(), float(np.random.rand()), torch.rand(1).item()])


def noise(sampler: dd.Sampler, workers: int, **options: Any) -> list[torch.Tensor]:
    return list(dd.loader(Noisy(sampler.count or 0), 4, sampler=sampler, num_workers=workers, **options))


def test_augmentation_depends_on_the_epoch_and_the_batch_only() -> None:
    """Not on the number of workers or the position of resuming; epochs differ."""
    whole = noise(sampler_of(), 1)
    assert len(torch.cat(whole)[:, 1:].unique()) == 3 * COUNT
    torch.manual_seed(7)
    for mine, right in zip(noise(sampler_at(8), 2), whole[2:], strict=True):
        assert torch.equal(mine, right)
    sampler = sampler_of()
    persistent = dd.loader(Noisy(COUNT), 4, sampler=sampler, num_workers=2, persistent_workers=True)
    assert torch.equal(torch.cat(list(persistent)), torch.cat(whole))
    second = torch.cat(list(persistent))
    assert set(second[:, 1].tolist()).isdisjoint(torch.cat(whole)[:, 1].tolist())
    later = sampler_of()
    later.set_epoch(1)
    assert torch.equal(torch.cat(noise(later, 1)), second)
    assert (len(persistent.dataset), persistent.dataset.classes) == (COUNT, ("a", "b"))  # type: ignore[arg-type, attr-defined]


def test_iterating_leaves_the_programs_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2).tolist()
    torch.manual_seed(0)
    for workers in (0, 1):
        next(iter(loader_of(sampler_of(), num_workers=workers)))
    next(iter(dd.loader(Stream(9), sampler=dd.Sampler(Stream(9), remainder="pad", shuffle=False))))
    assert torch.rand(2).tolist() == expected


class Stream(IterableDataset[int]):
    """Shards itself by worker, as torch's documentation shows; dd.loader hides the worker from it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(100 * self.epoch + first, 100 * self.epoch + self.count, every))


@pytest.mark.parametrize(("workers", "options"), [(0, {}), (1, {}), (3, {"persistent_workers": True})])
def test_a_stream_keeps_its_order_with_any_number_of_workers(workers: int, options: dict[str, Any]) -> None:
    stream = Stream(14)
    sampler = dd.Sampler(stream, remainder="pad", shuffle=False)
    loader = dd.loader(stream, 3, sampler=sampler, num_workers=workers, **options)
    for epoch in range(2):
        expected = [[100 * epoch + number for number in range(first, min(first + 3, 14))] for first in range(0, 14, 3)]
        for number, batch in enumerate(loader):
            assert batch.tolist() == expected[number]
            if number == 1:
                break
        assert sampler.position == 6
        assert batches(loader) == expected[2:]
    assert list(dd.loader(stream, None, sampler=sampler, num_workers=workers))[:2] == [200, 201]


def test_sync_splits_the_rest_of_the_epoch_but_not_of_unknown_uneven_length() -> None:
    """Rank 0 owns the state, but the set of ranks may have changed."""
    sampler = sampler_of()
    loader = loader_of(sampler)
    next(iter(loader))
    state = dd.elastic.State(sampler=sampler)
    state.sync()
    assert (len(loader), sampler.position) == (4, 4)
    assert len(batches(loader)) == 4
    assert sampler.all_ranks_had_batch
    for remainder in ("drop", "pad"):
        dd.elastic.State(sampler=dd.Sampler(Stream(5), remainder=remainder, shuffle=False))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no rank knows whether all have the batch.*__len__.*drop"):
        dd.elastic.State(sampler=dd.Sampler(Stream(5), remainder="uneven", shuffle=False))
