"""loader: a torch DataLoader that records progress in a Sampler and seeds its workers reproducibly."""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator, Sized
from itertools import chain, count, islice
from multiprocessing import forkserver, resource_tracker
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker  # private to torch: tests/unit/test_torch_private_names.py

from dualdist.data import random_state
from dualdist.data.random_state import RandomState
from dualdist.data.sampler import Sampler
from dualdist.data.worker_signals import block_signals, exit_with_parent, unhandled_signals
from dualdist.errors import UsageError
from dualdist.utils.suggest import type_name

# Arguments of DataLoader that the sampler replaces, or that would break its count, with the reason.
REFUSED_OPTIONS = {
    "shuffle": "pass it to dd.Sampler",
    "batch_sampler": (
        "the sampler could not record the ranks' progress; pass sampler=dd.Sampler(...) and batch_size, or make each "
        'batch one sample of a data set, as the page "Data and samplers" of the manual shows'
    ),
    "generator": "the seed of dd.Sampler is used",
    "in_order": "the sampler could not record which batches the program got",
}


def loader(
    dataset: Dataset[Any],
    batch_size: int | None = 1,
    *,
    sampler: Sampler | None = None,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """Return a torch DataLoader of this rank's batches, which records in `sampler` what the program gets.

    Every rank creates one with the same data set, batch_size and drop_last, and begins each epoch together with the
    others: see dd.Sampler.

    A batch counts as done once the program gets it, however many more the workers have prefetched: save checkpoints
    after the step. Workers draw the augmentation of a batch from the sampler's seed, the epoch and the batch. So a run
    that is resumed in the middle of an epoch sees the same data with any number of workers. Iterating does not use the
    program's own random generators.

    An IterableDataset yields all samples of an epoch in every process, and each rank and worker selects its own. It
    must not shard itself by rank, and does not see that it runs in a worker. It may have a method set_epoch(epoch); its
    random generators are seeded by the epoch, alike everywhere. Resuming reads it again up to the position.

    Args:
        dataset: the data set of the sampler.
        batch_size: samples per batch on this rank, or None for single samples.
        sampler: this rank's dd.Sampler; required.
        drop_last: drop the last batch of an epoch if it is smaller.
        **options: passed to torch.utils.data.DataLoader.

    Raises:
        UsageError: an option conflicts with the sampler, or the sampler is of another data set.

    Example:
        >>> data = torch.arange(6)
        >>> sampler = dd.Sampler(data, remainder="drop", shuffle=False)
        >>> [batch.tolist() for batch in dd.loader(data, batch_size=4, sampler=sampler)]
        [[0, 1, 2, 3], [4, 5]]
    """
    wrong = [f"{name}: {why}" for name, why in REFUSED_OPTIONS.items() if name in options]
    if wrong:
        raise UsageError(f"dd.loader takes no {'; no '.join(wrong)}")
    if not isinstance(sampler, Sampler):
        given = "" if sampler is None else f", not {type_name(sampler)}"
        raise UsageError(f"dd.loader needs sampler=dd.Sampler(dataset, ...){given}")
    if not isinstance(dataset, IterableDataset) and len(cast(Sized, dataset)) != sampler.count:
        raise UsageError(
            f"the data set has {len(cast(Sized, dataset))} samples, that of the sampler {sampler.count}: give both the "
            "same data set"
        )
    return _Loader(dataset, batch_size, sampler, drop_last, options)


class _Loader(DataLoader[Any]):
    """The DataLoader that loader() returns."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None,
        sampler: Sampler,
        drop_last: bool,
        options: dict[str, Any],
    ) -> None:
        self._progress = sampler
        # Epoch, its start position, rank and size, shared with persistent workers.
        self._position = torch.zeros(4, dtype=torch.int64, device="cpu")
        if options.get("num_workers"):
            self._position.share_memory_()
        if isinstance(dataset, IterableDataset):
            dataset = _ShardedStream(dataset, sampler, self._position, batch_size or 1)
        else:
            options = {**options, "sampler": sampler if batch_size else _LazyIndices(sampler)}
            if options.get("num_workers"):
                dataset = _SeededDataset(dataset, sampler.seed, self._position)
        super().__init__(dataset, batch_size, drop_last=drop_last, generator=torch.Generator(), **options)

    def __iter__(self) -> Any:
        """Yield the batches of the rest of the sampler's epoch."""
        iteration = self._progress.begin(batch_size=self.batch_size, drops_last=self.drop_last)
        share = self._progress.share
        self._position.copy_(torch.tensor([self._progress.epoch, share.start, share.rank, share.size], device="cpu"))
        self.generator.manual_seed(random_state.derive_seed(self._progress.seed, self._progress.epoch, share))
        return _RecordedBatches(self._start_workers(), self._progress, iteration, self)

    def _start_workers(self) -> Iterator[Any]:
        """Return the DataLoader's own iterator, whose workers ignore the stop signals of preemption."""
        if not self.num_workers:
            return super().__iter__()
        method = (self.multiprocessing_context or torch.multiprocessing).get_start_method()
        if method != "fork":
            resource_tracker.ensure_running()  # if torch starts it, it unblocks the signals
        if method == "forkserver":
            forkserver.ensure_running()  # shared with the program; its workers ignore signals slightly later
        signals, worker_init_fn = unhandled_signals(), self.worker_init_fn
        self.worker_init_fn = functools.partial(_init_worker, signals, worker_init_fn)
        try:
            with block_signals(signals):
                return super().__iter__()
        finally:
            self.worker_init_fn = worker_init_fn


def _init_worker(
    ignored: tuple[signal.Signals, ...], worker_init_fn: Callable[[int], None] | None, number: int
) -> None:
    """Make a worker ignore stop signals, which launchers send to it as well as to its rank."""
    exit_with_parent(ignored)
    if worker_init_fn is not None:
        worker_init_fn(number)


class _RecordedBatches(Iterator[Any]):
    """Record each batch in the sampler as the program gets it."""

    def __init__(self, batches: Iterator[Any], sampler: Sampler, iteration: int, loader: DataLoader[Any]) -> None:
        self._batches = batches
        self._sampler = sampler
        self._iteration = iteration
        self._batch_size = loader.batch_size or 1
        self._drop_last = loader.drop_last
        self._has_ended = False
        self._drop_incomplete_batch()

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        if self._sampler.iteration != self._iteration:
            raise UsageError("the sampler has begun another iteration or was set to another position: this one is over")
        try:
            batch = next(self._batches)
        except StopIteration:
            self._has_ended = True
            self._sampler.finish()
            raise
        remaining = self._sampler.remaining
        self._sampler.record(self._batch_size if remaining is None else min(self._batch_size, remaining))
        self._drop_incomplete_batch()
        return batch

    def _drop_incomplete_batch(self) -> None:
        """End the share with the last full batch, as a program that counts batches never requests one more."""
        remaining = self._sampler.remaining
        if self._drop_last and remaining is not None and remaining < self._batch_size:
            self._sampler.drop_rest()


class _LazyIndices:
    """Begin the sampler's iteration with its first index: without batch_size torch calls iter() twice for workers."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)


class _SeededDataset(Dataset[Any]):
    """Seed the generators of a worker by epoch and batch."""

    def __init__(self, dataset: Dataset[Any], seed: int, position: torch.Tensor) -> None:
        self.dataset = dataset
        self._seed = seed
        self._position = position

    def __getitem__(self, index: int) -> Any:
        self._seed_generators([index])
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        self._seed_generators(indices)
        get_batch = getattr(self.dataset, "__getitems__", None)
        return get_batch(indices) if get_batch else [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the data set itself."""
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _seed_generators(self, indices: list[int]) -> None:
        """Seed by all indices: with weights the same sample may begin several batches."""
        random_state.seed_generators(random_state.derive_seed(self._seed, self._position[0].item(), indices))


class _ShardedStream(IterableDataset[Any]):
    """An IterableDataset that every worker of every rank reads in full, yielding the samples of its batches.

    Worker k of n yields the batches k, k + n, ... of its rank, which is the order in which DataLoader takes them.
    """

    def __init__(
        self, dataset: IterableDataset[Any], sampler: Sampler, position: torch.Tensor, batch_size: int
    ) -> None:
        self.dataset = dataset
        self._sampler = sampler
        self._position = position
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, start, rank, size = self._position.tolist()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        state = random_state.make_random_state(random_state.derive_seed(self._sampler.seed, epoch))
        remainder = self._sampler.remainder
        first: list[Any] = []  # the epoch's first samples, for padding
        with _isolated(state):
            samples = iter(self.dataset)
            if remainder == "pad":
                first = list(islice(samples, size))
                samples = chain(first, samples)
            for _ in islice(samples, start):
                pass
        for batch in count():
            is_own = batch % workers == number
            own, seen = [], 0
            with _isolated(state):
                for sample in islice(samples, self._batch_size * size):
                    if is_own and seen % size == rank:
                        own.append(sample)
                    seen += 1
            groups, more = divmod(seen, size)
            if remainder == "drop":
                own = own[:groups]
            elif remainder == "pad" and is_own and more and rank >= more:
                own.append(first[(rank - more) % len(first)])
            yield from own
            if seen < self._batch_size * size:
                return


@contextlib.contextmanager
def _isolated(state: RandomState) -> Iterator[None]:
    """Run a block with this random state, hiding from the data set that it is in a worker.

    A data set that shards itself by worker, as torch's documentation shows, then yields all samples.
    """
    worker = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        with random_state.use_random_state(state):
            yield
    finally:
        torch_worker._worker_info = worker
