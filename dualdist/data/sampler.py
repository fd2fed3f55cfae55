"""Sampler: this rank's share of each epoch, resumable in the middle on any number of ranks.

Note [position]: the order of an epoch depends on the seed and the epoch only. The ranks take the remaining samples in
turn, one each, so that every step of all ranks takes the next piece of the order, and the progress of all ranks is one
number, whatever the number of ranks was or will be.

Note [same epoch]: ranks whose arguments differ would train on some samples twice and on others never. So each compares
its arguments with the others' when an epoch begins. An epoch that is continued is not compared: ranks may have left it
at different batches. Nor is one that follows another by itself with remainder="uneven": ranks may begin it at different
steps, while the others still reduce gradients. A new session, which may have other ranks, compares anew.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from dualdist import session
from dualdist.collectives.arguments import as_ints
from dualdist.collectives.broadcast_state import allgather_object
from dualdist.errors import MismatchError, UsageError
from dualdist.utils.suggest import format_by_rank, type_name

Remainder = Literal["drop", "pad", "uneven"]
SHOWN_INDICES = 3
MAX_WEIGHTS = 1 << 24  # of torch.multinomial
NO_WEIGHTS = "none"
LISTED_INDICES = 1 << 16  # how many indices are converted to Python's numbers at a time
COMPARED = "compared samplers"  # key in a session's extras: the samplers whose epoch is known to be every rank's


@dataclass(frozen=True)
class EpochShare:
    """One rank's samples of an epoch whose first `start` are done: every size-th of the remaining ones."""

    count: int | None  # the samples of an epoch; None if unknown
    start: int
    rank: int
    size: int
    remainder: Remainder

    @property
    def end(self) -> int | None:
        """The position at which the epoch ends; None if unknown."""
        if self.count is None or self.remainder != "drop":
            return self.count
        return self.start + (self.count - self.start) // self.size * self.size

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("an iterable data set without a length")
        each, more = divmod(self.count - self.start, self.size)
        extra = {"drop": False, "pad": more > 0, "uneven": self.rank < more}[self.remainder]
        return each + extra

    def position(self, done: int) -> int:
        """Return how many samples all ranks have done when each has done `done` of its share.

        After this rank's last sample that is the whole epoch.
        """
        if self.end is not None and 0 < done == len(self):
            return self.end  # shares may differ in length
        position = self.start + done * self.size
        return position if self.count is None else min(position, self.count)

    def indices(self, order: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the order, padded from the beginning of the epoch if so configured."""
        indices = order[self.start :][self.rank :: self.size][: len(self)]
        if len(indices) == len(self):
            return indices.clone()  # without the whole order
        missing = self.rank - (len(order) - self.start) % self.size
        return torch.cat([indices, order[missing % len(order)].view(1)])


class Sampler(torch.utils.data.Sampler[int]):
    """Yield this rank's share of each epoch of a data set; resumable in the middle of an epoch on other ranks.

    Every rank creates one with the same arguments. Iterating yields the indices that are left of `epoch`. From the
    beginning of an epoch they are those of torch.utils.data.DistributedSampler for the same seed, shuffle and epoch.

    The first iteration of an epoch is a collective: every rank calls iter() of the sampler or its loader, and the ranks
    compare their arguments, epochs, positions and batch sizes.

    When an iteration ends so does the epoch, and the next iteration is the next epoch, with or without set_epoch();
    an iteration left by `break` is continued. Use it with dd.loader, which counts the batches that the program gets.
    With another loader call record() after each step, and if it has drop_last=True, finish() after the loop.

    Args:
        dataset: the whole data set, the same on every rank; anything with a length. An IterableDataset without one is
            read in its own order (shuffle=False).
        remainder: what to do if the samples do not divide evenly between the ranks. "drop" leaves the last ones of the
            order out, "pad" repeats the first ones, "uneven" gives some ranks one sample more, which may mean one more
            batch: call dd.join() after the loop.
        shuffle: permute each epoch, by `seed` + epoch.
        seed: the same on every rank.
        weights: draw as many samples as the data set has, with replacement, each with a probability proportional to its
            weight. The samples of an epoch are those of torch.utils.data.WeightedRandomSampler(weights, len(dataset))
            with a generator seeded by `seed` + epoch.

    Note:
        dd.elastic.State skips the commit after a batch that not every rank has, and therefore accepts no "uneven"
        sampler of a data set without a length.

    Raises:
        MismatchError: by iter(), on every rank: what differs between the ranks, and the values.
        UsageError: an argument is invalid, or the data set has neither a length nor an iterator.

    Example:
        >>> sampler = dd.Sampler(range(5), remainder="drop", shuffle=False)
        >>> list(sampler)
        [0, 1, 2, 3, 4]
    """

    _is_begun: bool  # begin() was called and __iter__() not yet

    def __init__(
        self,
        dataset: Sized | IterableDataset[Any],
        *,
        remainder: Remainder,
        shuffle: bool = True,
        seed: int = 0,
        weights: Sequence[float] | torch.Tensor | None = None,
    ) -> None:
        if remainder not in get_args(Remainder):
            raise UsageError(f"remainder={remainder!r}: expected one of {', '.join(map(repr, get_args(Remainder)))}")
        if isinstance(dataset, IterableDataset) and shuffle:
            raise UsageError(
                "an iterable data set is read in its own order: shuffle within it, and pass shuffle=False here"
            )
        if isinstance(dataset, torch.utils.data.Sampler | DataLoader):
            raise UsageError(
                f"dd.Sampler divides a data set, not {type_name(dataset)}, whose choice of samples would be lost: pass "
                "the data set, and weights=... to draw by weight; or a torch.utils.data.Subset of the samples to draw, "
                "the same on every rank"
            )
        self.count = _length(dataset)
        self._subset = _describe_subset(dataset)
        self.remainder: Remainder = remainder
        self.shuffle = shuffle
        (self.seed,) = as_ints([seed], "seed")
        if weights is not None and not shuffle:
            raise UsageError("weights draw samples at random: leave out shuffle=False; iterable data sets take none")
        self._weights = None if weights is None else _check_weights(weights, self.count)
        self._described_weights = NO_WEIGHTS
        if self._weights is not None:
            self._described_weights = f"SHA-256 {hashlib.sha256(self._weights.numpy().tobytes()).hexdigest()[:8]}"
        self.iteration = 0  # the number of the current iteration; earlier ones are over
        self._exhausted = 0  # the last iteration of which all indices were drawn
        self._unrecorded = 0  # consecutive iterations of which no sample was recorded
        self._seek(epoch=0, position=0)

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between two epochs."""
        return self._epoch

    @property
    def position(self) -> int:
        """The samples of the epoch that all ranks together have done; the same on every rank."""
        return self.share.position(self._done)

    @property
    def possible_positions(self) -> set[tuple[int, int]]:
        """The (epoch, position) pairs that all ranks may be at, as far as this rank knows."""
        if self.remaining != 0:
            return {(self._epoch, self.position)}
        # Another rank's share may be longer.
        before = min(self.share.start + self._done * self.share.size, cast(int, self.count))
        return {(self._epoch, before), (self._epoch, cast(int, self.share.end)), (self._epoch + 1, 0)}

    @property
    def remaining(self) -> int | None:
        """The samples left in this rank's share; None if unknown."""
        return None if self.count is None else len(self.share) - self._done

    @property
    def all_ranks_had_batch(self) -> bool:
        """True unless some ranks had no batch in the last recorded step (remainder="uneven" only)."""
        if self.count is None or self.remainder != "uneven":
            return True
        shortest = (self.count - self.share.start) // self.share.size
        return self._done <= shortest if self._drops_last else self._done_before < shortest

    def __len__(self) -> int:
        """Return this rank's samples in the current iteration, or after its last sample in the next one."""
        if self._is_over():
            return len(self._share_from(0))
        return len(self.share if self._is_iterating else self._share_from(self.position))

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices of the rest of the epoch."""
        if not self._is_begun:
            self._require_recorded()
            self.begin()
            self._is_counted = False  # until record() is called
        self._is_begun = False
        return self._indices(self.share.indices(self._order()), self.iteration)

    def begin(self, *, batch_size: int | None = None, drops_last: bool = False) -> int:
        """Begin an iteration at the current position, ending all others, and return its number; for loaders.

        Raises:
            MismatchError: the ranks begin different epochs; raised on every rank.
        """
        if self._is_over():
            self.finish()
        self._seek(self._epoch, self.position)
        self._require_same_epoch(batch_size, drops_last)
        self._is_iterating = self._is_begun = True
        self._drops_last = drops_last
        return self.iteration

    def record(self, count: int) -> None:
        """Record that this rank has trained on the next `count` samples of its share; after each step.

        Raises:
            UsageError: fewer samples are left.
        """
        if self.remaining is not None and count > self.remaining:
            raise UsageError(
                f"{count} more samples recorded of epoch {self._epoch}, of which this rank has {self.remaining} left: "
                "record each batch once"
            )
        self._done_before = self._done
        self._done += count
        self._is_counted = True

    def drop_rest(self) -> None:
        """End this rank's share: the rest is less than a batch; for loaders with drop_last=True."""
        self._is_rest_dropped = True

    def finish(self) -> None:
        """End the epoch; call it after a loop whose loader leaves samples out (drop_last=True)."""
        self._seek(self._epoch + 1, 0)
        if self.remainder != "uneven":
            self._compared.discard(self)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of this epoch, or continue it if it is the current one."""
        (epoch,) = as_ints([epoch], "epoch")
        if epoch != self._epoch or self._is_over():
            self._seek(epoch, 0)
            self._compared.discard(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks; the same on every rank between two steps.

        Raises:
            UsageError: indices were drawn but not recorded.
        """
        if not self._is_counted:
            raise UsageError(
                "the sampler's indices have been drawn, but no samples were recorded as trained on: use dd.loader, or "
                "call sampler.record(samples) after each step"
            )
        return {"epoch": self._epoch, "position": self.position, **self._order_terms()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken, on any number of ranks.

        Raises:
            UsageError: the state is of another order (count, shuffle or seed), or malformed.
        """
        mismatch = self.find_mismatch(state)
        if mismatch:
            raise UsageError(f"the state does not fit this sampler: {mismatch}")
        self._seek(state["epoch"], state["position"] if self.count is None else min(state["position"], self.count))
        self._compared.discard(self)

    def find_mismatch(self, state: Mapping[str, Any]) -> str:
        """Describe why the state does not fit this sampler, or return an empty string."""
        terms = self._order_terms()
        state = {"weights": NO_WEIGHTS, **state}  # earlier versions knew no weights
        expected = {"epoch": int, "position": int, **{name: type(value) for name, value in terms.items()}}
        missing = [name for name in expected if name not in state]
        if missing:
            return f"it has no {' and no '.join(missing)}"
        differing = [name for name, value in terms.items() if state[name] != value]
        if differing:
            saved = ", ".join(f"{name} {state[name]}" for name in differing)
            now = ", ".join(f"{name} {terms[name]}" for name in differing)
            return f"{saved} in the state, {now} now: create the sampler with the saved values, or begin a new epoch"
        wrong = [name for name, kind in expected.items() if not isinstance(state[name], kind)]
        wrong += [name for name in ("epoch", "position") if name not in wrong and state[name] < 0]
        return f"{', '.join(f'{name} is {state[name]!r}' for name in wrong)}" if wrong else ""

    def _indices(self, indices: torch.Tensor, iteration: int) -> Iterator[int]:
        for part in indices.split(LISTED_INDICES):
            yield from part.tolist()
        self._exhausted = iteration

    def _require_recorded(self) -> None:
        """Raise UsageError if the rest of an epoch was drawn twice without record().

        Then that rest is less than the batch of a loader with drop_last=True. A program that looks at one batch draws
        the rest once without record(), since workers prefetch all indices.
        """
        was_unrecorded = (
            self._exhausted == self.iteration and not self._done and self.share.start > 0 and bool(self.remaining)
        )
        self._unrecorded = self._unrecorded + 1 if was_unrecorded else 0
        if self._unrecorded > 1:
            raise UsageError(
                f"the last {self.remaining} samples of epoch {self._epoch} on this rank were drawn {self._unrecorded} "
                "times and never recorded: a loader with drop_last=True drops them; call sampler.finish() "
                "after its loop, or use dd.loader"
            )

    @property
    def _compared(self) -> "WeakSet[Sampler]":
        return cast("WeakSet[Sampler]", session.current().extras.setdefault(COMPARED, WeakSet()))

    def _require_same_epoch(self, batch_size: int | None, drops_last: bool) -> None:
        """Raise MismatchError on every rank if the ranks differ: Note [same epoch]."""
        world = session.current().world
        if world.size == 1 or self in self._compared:
            return
        own = {
            "samples": self.count,
            "subset": self._subset,
            "remainder": self.remainder,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "weights": self._described_weights,
            "epoch": self._epoch,
            "position": self.position,
            "batch_size": batch_size,
            "drop_last": drops_last,
        }
        found = allgather_object(world, own, world.next_name("dd.Sampler"))
        differing = [name for name in own if any(each[name] != own[name] for each in found)]
        if differing:
            texts = (f"{name} is {format_by_rank([each[name] for each in found])}" for name in differing)
            raise MismatchError(
                f"dd.Sampler differs between the ranks: {'; '.join(texts)}. Give every rank the whole data set and the "
                "same arguments, epoch and batch size: the sampler divides the samples"
            )
        self._compared.add(self)

    def _order_terms(self) -> dict[str, Any]:
        return {"count": self.count, "shuffle": self.shuffle, "seed": self.seed, "weights": self._described_weights}

    def _order(self) -> torch.Tensor:
        assert self.count is not None, "an IterableDataset has its own order"
        # randperm() draws the same numbers in either dtype; int32 takes half the memory.
        dtype = torch.int32 if self.count <= torch.iinfo(torch.int32).max else torch.int64
        if not self.shuffle:
            return torch.arange(self.count, dtype=dtype, device="cpu")
        generator = torch.Generator().manual_seed(self.seed + self._epoch)  # as torch's DistributedSampler
        if self._weights is not None:
            return torch.multinomial(self._weights, self.count, replacement=True, generator=generator)
        return torch.randperm(self.count, generator=generator, dtype=dtype, device="cpu")

    def _seek(self, epoch: int, position: int) -> None:
        """Split the samples from this position on among the current ranks."""
        self.iteration += 1
        self._epoch = epoch
        self.share = self._share_from(position)
        self._done = 0  # how many samples of the share are recorded
        self._done_before = 0  # how many were before the last record()
        self._is_iterating = self._is_begun = self._is_rest_dropped = self._drops_last = False
        self._is_counted = True

    def _share_from(self, position: int) -> EpochShare:
        topology = session.current().topology
        return EpochShare(self.count, position, topology.rank, topology.size, self.remainder)

    def _is_over(self) -> bool:
        """Return True if this rank has done its share of an iteration that has begun."""
        return self._is_rest_dropped or (self.remaining == 0 and (self._done > 0 or self._is_iterating))


def _length(dataset: Sized | IterableDataset[Any]) -> int | None:
    """Return the number of samples; None for an IterableDataset without a length."""
    try:
        return len(cast(Sized, dataset))
    except TypeError as error:
        if isinstance(dataset, IterableDataset):
            return None
        raise UsageError(f"a sampler needs a data set with a length, not {type_name(dataset)}") from error


def _check_weights(weights: Sequence[float] | torch.Tensor, count: int | None) -> torch.Tensor:
    """Return the weights in float64, in which torch's WeightedRandomSampler draws."""
    try:
        checked = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"weights: expected a number for each sample, not {type_name(weights)} ({error})") from error
    if checked.shape != (count,):
        raise UsageError(f"weights of shape {tuple(checked.shape)}: expected one for each of the {count} samples")
    if not (checked.isfinite().all() and (checked >= 0).all() and checked.sum() > 0):
        raise UsageError("weights: expected finite numbers, none below 0 and at least one above")
    if len(checked) > MAX_WEIGHTS:
        raise UsageError(f"weights of {count} samples: torch.multinomial draws from {MAX_WEIGHTS} at most")
    return checked


def _describe_subset(dataset: object) -> str:
    """Describe a Subset by a short text that differs where the samples do; "" for any other data set."""
    described, digest = "", hashlib.sha256()
    while isinstance(dataset, Subset):
        indices: Any = dataset.indices
        numbers = indices.tolist() if hasattr(indices, "tolist") else list(indices)
        digest.update(repr(numbers).encode())
        described = described or f"of indices {', '.join(map(str, numbers[:SHOWN_INDICES]))}, ..."
        dataset = dataset.dataset
    return described and f"{described} (SHA-256 {digest.hexdigest()[:8]})"
