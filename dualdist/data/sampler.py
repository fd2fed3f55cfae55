"""What a rank sees of a data set: its share of each epoch, and how far all ranks together have got.

Note [position]: the samples of an epoch stand in one order, which depends on the seed and the epoch alone. Of those
that are left, the ranks take one each in turn, so that every step of all ranks takes the next piece of that order, and
how far they have got is one number, whatever the number of ranks was or will be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch.utils.data import IterableDataset

from dualdist import session
from dualdist.collectives.arguments import as_ints
from dualdist.errors import UsageError

Remainder = Literal["drop", "pad", "uneven"]


@dataclass(frozen=True)
class EpochShare:
    """One rank's samples of an epoch whose first `start` are done: each size-th of those that are left."""

    count: int | None  # the samples of an epoch; None where nobody knows
    start: int
    rank: int
    size: int
    remainder: Remainder

    @property
    def end(self) -> int | None:
        """The position at which the epoch is over."""
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
        """How many samples all ranks have done when each has done so many of its share; with its last one all."""
        if self.end is not None and 0 < done == len(self):
            return self.end  # not every rank's share is as long
        position = self.start + done * self.size
        return position if self.count is None else min(position, self.count)

    def of(self, order: torch.Tensor) -> list[int]:
        """This rank's part of the order; it is filled up, where that is wanted, from the beginning of the epoch."""
        mine: list[int] = order[self.start :][self.rank :: self.size][: len(self)].tolist()
        if len(mine) < len(self):
            missing = self.rank - (len(order) - self.start) % self.size
            mine.append(int(order[missing % len(order)]))
        return mine


class Sampler(torch.utils.data.Sampler[int]):
    """This rank's share of each epoch of `dataset`, which can be left in the middle and gone on with on other ranks.

    Every rank makes one, with the same arguments. `remainder` says what happens where the samples do not divide evenly
    between the ranks: "drop" leaves the last ones of the order out, "pad" repeats the first ones, "uneven" gives some
    ranks one sample more, which may mean one batch more: call dd.join() behind the loop. From the beginning of an
    epoch it gives what torch's DistributedSampler gives for the same seed, shuffle and epoch. dd.elastic.State passes
    over the commit after a batch that not every rank has, and so takes no "uneven" sampler without a length.

    Iterating yields what is left of `epoch`. Give it to dd.loader, which counts what the program gets; with a loader of
    your own, call record() after each step. Where an iteration ends the epoch is over, and the next one comes, without
    set_epoch() too; left by `break`, it goes on there. A loader of your own with drop_last=True hides the end: call
    finish() behind its loop.

    `dataset` needs a length only. An iterable data set without one is read in its own order: pass shuffle=False.

    >>> sampler = dd.Sampler(range(5), remainder="drop", shuffle=False)
    >>> list(sampler)
    [0, 1, 2, 3, 4]
    """

    _is_prepared: bool  # begin() was called, and __iter__() was not yet

    def __init__(
        self,
        dataset: Sized | IterableDataset[Any],
        *,
        remainder: Remainder,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if remainder not in get_args(Remainder):
            raise UsageError(f"remainder={remainder!r}: expected one of {', '.join(map(repr, get_args(Remainder)))}")
        if isinstance(dataset, IterableDataset) and shuffle:
            raise UsageError(
                "an iterable data set is read in its own order: shuffle within it, and pass shuffle=False here"
            )
        self.count = _length(dataset)
        self.remainder: Remainder = remainder
        self.shuffle = shuffle
        (self.seed,) = as_ints([seed], "seed")
        self.turn = 0  # iterations that have begun: those before the last one are over
        self._drawn = 0  # the last of them of which all indices were drawn
        self._in_vain = 0  # iterations, one after the other, of which nothing was recorded
        self._go_to(epoch=0, position=0)

    @property
    def epoch(self) -> int:
        """The epoch under way, or the one that comes next."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of the epoch all ranks together have done; the same number on every rank."""
        return self._share.position(self._done)

    @property
    def places(self) -> set[tuple[int, int]]:
        """The epochs and positions at which all ranks may be, for all that this rank knows."""
        if self.left != 0:
            return {(self._epoch, self.position)}
        # The next sample may be another rank's, whose share is longer.
        before = min(self._share.start + self._done * self._share.size, cast(int, self.count))
        return {(self._epoch, before), (self._epoch, cast(int, self._share.end)), (self._epoch + 1, 0)}

    @property
    def share(self) -> EpochShare:
        """What the iteration under way is about."""
        return self._share

    @property
    def left(self) -> int | None:
        """The samples that this rank has still to do of its share; None where nobody knows."""
        return None if self.count is None else len(self._share) - self._done

    @property
    def was_everybodys(self) -> bool:
        """Whether all ranks had a batch when this one had the one recorded last; with "uneven" a rank may have more."""
        if self.count is None or self.remainder != "uneven":
            return True
        shortest = (self.count - self._share.start) // self._share.size
        return self._done <= shortest if self._drops_last else self._done_before < shortest

    def __len__(self) -> int:
        """The samples of this rank in the iteration under way, or else, also with its last one, in the next one."""
        if self._is_over():
            return len(self._share_from(0))
        return len(self._share if self._is_under_way else self._share_from(self.position))

    def __iter__(self) -> Iterator[int]:
        """This rank's indices of what is left of the epoch."""
        if not self._is_prepared:
            self._require_use()
            self.begin()
            self._is_counted = False  # until somebody calls record()
        self._is_prepared = False
        return self._indices(self._share.of(self._order()), self.turn)

    def begin(self, *, drops_last: bool = False) -> int:
        """A new iteration begins where the last one was left; for loaders, which get its number. Ends all others."""
        if self._is_over():
            self.finish()
        self._go_to(self._epoch, self.position)
        self._is_under_way = self._is_prepared = True
        self._drops_last = drops_last
        return self.turn

    def record(self, count: int) -> None:
        """This rank has trained on the next `count` samples of its share."""
        if self.left is not None and count > self.left:
            raise UsageError(
                f"{count} more samples recorded of epoch {self._epoch}, of which this rank has {self.left} left: "
                "record each batch once"
            )
        self._done_before = self._done
        self._done += count
        self._is_counted = True

    def spend(self) -> None:
        """What this rank has left of its share does not make a batch. For loaders that drop it."""
        self._is_spent = True

    def finish(self) -> None:
        """The epoch is over; the next one comes. For loaders, at the end of an iteration that left samples out."""
        self._go_to(self._epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, unless it is the one under way, which goes on from its position."""
        (epoch,) = as_ints([epoch], "epoch")
        if epoch != self._epoch or self._is_over():
            self._go_to(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks are; alike on all of them, between two steps."""
        if not self._is_counted:
            raise UsageError(
                "the sampler's indices have been drawn, but nobody recorded what was trained on: use dd.loader, or "
                "call sampler.record(samples) after each step"
            )
        return {"epoch": self._epoch, "position": self.position, **self._order_terms()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, on however many ranks there are now; UsageError where it does not fit."""
        words = self.misfit(state)
        if words:
            raise UsageError(f"the state does not fit this sampler: {words}")
        self._go_to(state["epoch"], state["position"] if self.count is None else min(state["position"], self.count))

    def misfit(self, state: Mapping[str, Any]) -> str:
        """Why the state is not one of this sampler, or nothing."""
        terms = self._order_terms()
        expected = {"epoch": int, "position": int, **{name: type(value) for name, value in terms.items()}}
        missing = [name for name in expected if name not in state]
        if missing:
            return f"it has no {' and no '.join(missing)}"
        differing = [name for name, mine in terms.items() if state[name] != mine]
        if differing:
            then = ", ".join(f"{name} {state[name]}" for name in differing)
            now = ", ".join(f"{name} {terms[name]}" for name in differing)
            return (
                f"{then} then, {now} now, which is another order: make the sampler as it was, or begin the epoch anew"
            )
        wrong = [name for name, kind in expected.items() if not isinstance(state[name], kind)]
        wrong += [name for name in ("epoch", "position") if name not in wrong and state[name] < 0]
        return f"{', '.join(f'{name} is {state[name]!r}' for name in wrong)}" if wrong else ""

    def _indices(self, mine: list[int], turn: int) -> Iterator[int]:
        yield from mine
        self._drawn = turn

    def _require_use(self) -> None:
        """UsageError where what is left of an epoch was drawn twice in vain, as it makes no batch of a loader's.

        Once may have been a look at the first batch, beyond which workers draw all there is.
        """
        was_in_vain = self._drawn == self.turn and not self._done and self._share.start > 0 and bool(self.left)
        self._in_vain = self._in_vain + 1 if was_in_vain else 0
        if self._in_vain > 1:
            raise UsageError(
                f"the last {self.left} samples that this rank has of epoch {self._epoch} were drawn {self._in_vain} "
                "times, and never recorded: a loader with drop_last=True makes no batch of them; call "
                "sampler.finish() behind its loop, or use dd.loader"
            )

    def _order_terms(self) -> dict[str, Any]:
        """What the order of an epoch depends on."""
        return {"count": self.count, "shuffle": self.shuffle, "seed": self.seed}

    def _order(self) -> torch.Tensor:
        assert self.count is not None, "iterable data sets have their own order"
        if not self.shuffle:
            return torch.arange(self.count, device="cpu")
        generator = torch.Generator().manual_seed(self.seed + self._epoch)  # as torch's DistributedSampler
        return torch.randperm(self.count, generator=generator, device="cpu")

    def _go_to(self, epoch: int, position: int) -> None:
        """What is left from here on is shared out anew."""
        self.turn += 1
        self._epoch = epoch
        self._share = self._share_from(position)
        self._done = 0  # of the share
        self._done_before = 0  # what was recorded last
        self._is_under_way = self._is_prepared = self._is_spent = self._drops_last = False
        self._is_counted = True

    def _share_from(self, position: int) -> EpochShare:
        topology = session.current().topology
        return EpochShare(self.count, position, topology.rank, topology.size, self.remainder)

    def _is_over(self) -> bool:
        """Whether this rank has done its share in this iteration; one that is over at its start has yet to begin."""
        return self._is_spent or (self.left == 0 and (self._done > 0 or self._is_under_way))


def _length(dataset: Sized | IterableDataset[Any]) -> int | None:
    """None for an iterable data set that has no length; UsageError where one is needed."""
    try:
        return len(cast(Sized, dataset))
    except TypeError as error:
        if isinstance(dataset, IterableDataset):
            return None
        raise UsageError(f"a sampler needs a data set with a length, not a {type(dataset).__name__}") from error
