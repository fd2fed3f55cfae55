"""The loader of a sampler: torch's DataLoader, which also counts what the program gets, and seeds its workers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import chain, count, islice
from multiprocessing import forkserver, resource_tracker
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from dualdist.data.sampler import EpochShare, Sampler
from dualdist.errors import UsageError
from dualdist.monitoring import preemption
from dualdist.utils import random_state
from dualdist.utils.random_state import RandomState

# Arguments of DataLoader that the sampler stands for, or whose count it would spoil.
NOT_HERE = {
    "shuffle": "say it to dd.Sampler",
    "batch_sampler": "the sampler could not tell how far the ranks have got",
    "generator": "the seed of dd.Sampler counts",
    "in_order": "the sampler could not tell which batches the program has got",
}


def loader(
    dataset: Dataset[Any],
    batch_size: int | None = 1,
    *,
    sampler: Sampler,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """A torch DataLoader of this rank's batches, which lets `sampler` know what the program has got.

    `batch_size` is that of this rank, `options` go to torch.utils.data.DataLoader. A batch counts as done from the
    moment the program gets it, however many more the workers have fetched: save checkpoints after the step.

    Workers draw the augmentations of a batch from the sampler's seed, the epoch and the batch: a run that is resumed in
    the middle of an epoch sees what the uninterrupted one saw, however many workers it has. Iterating draws nothing
    from the program's own random generators.

    An iterable data set yields all samples of an epoch to whoever iterates it; each rank and worker then takes its own.
    It must not shard itself by rank; that it runs in a worker is hidden from it. It may have set_epoch(epoch), and
    draws from generators that are seeded by the epoch alike everywhere. To go on in the middle, it is read again up to
    there.

    >>> data = torch.arange(6)
    >>> sampler = dd.Sampler(data, remainder="drop", shuffle=False)
    >>> [batch.tolist() for batch in dd.loader(data, batch_size=4, sampler=sampler)]
    [[0, 1, 2, 3], [4, 5]]
    """
    wrong = [f"{name}: {why}" for name, why in NOT_HERE.items() if name in options]
    if wrong:
        raise UsageError(f"dd.loader takes no {'; no '.join(wrong)}")
    if not isinstance(sampler, Sampler):
        raise UsageError(f"dd.loader needs sampler=dd.Sampler(dataset, ...), not a {type(sampler).__name__}")
    if not isinstance(dataset, IterableDataset) and len(cast(Sized, dataset)) != sampler.count:
        raise UsageError(
            f"the data set has {len(cast(Sized, dataset))} samples, that of the sampler {sampler.count}: give both the "
            "same data set"
        )
    return _Loader(dataset, batch_size, sampler, drop_last, options)


class _Loader(DataLoader[Any]):
    """See loader()."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None,
        sampler: Sampler,
        drop_last: bool,
        options: dict[str, Any],
    ) -> None:
        self._counted = sampler
        # Epoch, position at which it is begun, rank and size, for workers that live on while those change.
        self._place = torch.zeros(4, dtype=torch.int64, device="cpu")
        if options.get("num_workers"):
            self._place.share_memory_()
        if isinstance(dataset, IterableDataset):
            dataset = _Stream(dataset, sampler, self._place, batch_size or 1)
        else:
            options = {**options, "sampler": sampler}
            if options.get("num_workers"):
                dataset = _Seeded(dataset, sampler.seed, self._place)
        super().__init__(dataset, batch_size, drop_last=drop_last, generator=torch.Generator(), **options)

    def __iter__(self) -> Any:
        """Batches of what is left of the sampler's epoch."""
        turn = self._counted.begin(drops_last=self.drop_last)
        share = self._counted.share
        self._place.copy_(torch.tensor([self._counted.epoch, share.start, share.rank, share.size], device="cpu"))
        self.generator.manual_seed(random_state.derive_seed(self._counted.seed, self._counted.epoch, share))
        return _Batches(self._fetched(), self._counted, turn, self.batch_size or 1, self.drop_last)

    def _fetched(self) -> Iterator[Any]:
        """The DataLoader's own; workers outlive what tells their rank to stop after the step."""
        if not self.num_workers:
            return super().__iter__()
        method = (self.multiprocessing_context or torch.multiprocessing).get_start_method()
        if method != "fork":
            resource_tracker.ensure_running()  # when it starts by itself it lets the signals through again
        if method == "forkserver":
            forkserver.ensure_running()  # which serves the program, too: its workers outlive signals a moment later
        notices, programs_own = preemption.unhandled_signals(), self.worker_init_fn
        self.worker_init_fn = _Beginning(notices, programs_own)
        try:
            with preemption.block_signals(notices):
                return super().__iter__()
        finally:
            self.worker_init_fn = programs_own


@dataclass(frozen=True)
class _Beginning:
    """What a worker does first: launchers tell it to end, too, when they tell its rank to stop after the step."""

    outlived: tuple[signal.Signals, ...]
    programs_own: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        preemption.exit_with_parent(self.outlived)
        if self.programs_own is not None:
            self.programs_own(number)


class _Batches(Iterator[Any]):
    """Batches that are recorded as they are handed out."""

    def __init__(self, batches: Iterator[Any], sampler: Sampler, turn: int, batch_size: int, drop_last: bool) -> None:
        self._batches = batches
        self._sampler = sampler
        self._turn = turn
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._has_ended = False
        self._look_ahead()

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        if self._sampler.turn != self._turn:
            raise UsageError("the sampler has begun another iteration, or was set to another place: this one is over")
        try:
            batch = next(self._batches)
        except StopIteration:
            self._has_ended = True
            self._sampler.finish()
            raise
        left = self._sampler.left
        self._sampler.record(self._batch_size if left is None else min(self._batch_size, left))
        self._look_ahead()
        return batch

    def _look_ahead(self) -> None:
        """A program that counts batches does not ask for one more, and so does not see the end."""
        left = self._sampler.left
        if self._drop_last and left is not None and left < self._batch_size:
            self._sampler.spend()


class _Seeded(Dataset[Any]):
    """A data set in a worker, whose randomness depends on the epoch and the batch alone."""

    def __init__(self, dataset: Dataset[Any], seed: int, place: torch.Tensor) -> None:
        self.dataset = dataset
        self._seed = seed
        self._place = place

    def __getitem__(self, index: int) -> Any:
        self._begin(index)
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        self._begin(indices[0])
        together = getattr(self.dataset, "__getitems__", None)
        return together(indices) if together else [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getattr__(self, name: str) -> Any:
        """What programs ask of the data set itself."""
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _begin(self, index: int) -> None:
        random_state.seed_generators(random_state.derive_seed(self._seed, self._place[0].item(), index))


class _Stream(IterableDataset[Any]):
    """An iterable data set, of which each worker of each rank reads all and yields its own batches' samples.

    The k-th batch of a rank is read by worker k modulo their number: that is how the DataLoader puts them in order.
    """

    def __init__(self, dataset: IterableDataset[Any], sampler: Sampler, place: torch.Tensor, batch_size: int) -> None:
        self.dataset = dataset
        self._sampler = sampler
        self._place = place
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, start, rank, size = self._place.tolist()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        share = EpochShare(None, start, rank, size, self._sampler.remainder)
        return self._samples(
            share, random_state.make_random_state(random_state.derive_seed(self._sampler.seed, epoch)), number, workers
        )

    def _samples(self, share: EpochShare, state: RandomState, number: int, workers: int) -> Iterator[Any]:
        rank, size = share.rank, share.size
        first: list[Any] = []  # of the epoch, which fill up the last group
        with _alone(state):
            samples = iter(self.dataset)
            if share.remainder == "pad":
                first = list(islice(samples, size))
                samples = chain(first, samples)
            for _ in islice(samples, share.start):
                pass
        for batch in count():
            is_mine = batch % workers == number
            mine, seen = [], 0
            with _alone(state):
                for sample in islice(samples, self._batch_size * size):
                    if is_mine and seen % size == rank:
                        mine.append(sample)
                    seen += 1
            groups, more = divmod(seen, size)
            if share.remainder == "drop":
                mine = mine[:groups]
            elif share.remainder == "pad" and is_mine and more and rank >= more:
                mine.append(first[(rank - more) % len(first)])
            yield from mine
            if seen < self._batch_size * size:
                return


@contextlib.contextmanager
def _alone(state: RandomState) -> Iterator[None]:
    """A block in a random state of its own, in which a data set does not know that it runs in a worker.

    A data set that shards itself by worker, as torch's documentation shows, thus yields all samples.
    """
    worker = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        with random_state.use_random_state(state):
            yield
    finally:
        torch_worker._worker_info = worker
