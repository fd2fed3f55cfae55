"""The buckets of a reducer's reductions, for the reducer itself and for ranks that have joined.

Note [non-finite report]: a sum over ranks that is not finite does not show whose part was not. But until the reduced
values are assigned, every rank still has its own gradients. The reduced values are the same on all ranks, so all find
the same members, and exchange the kinds of their own gradients in one more message, sent only then.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from typing import Any

import torch

from dualdist.collectives.group import Group
from dualdist.ddp.bucket import Bucket, BucketStrategy
from dualdist.ddp.layout import BucketLayout
from dualdist.ddp.nonfinite import SHOWN, find_suspects, nonfinite_kinds
from dualdist.engine.channel import Channel

IS_RETIRED = operator.attrgetter("is_retired")


class NonFiniteReport(dict[int, int]):
    """The non-finite gradients of one reduction: kinds of this rank's own by the parameter's number."""

    def add(self, number: int, own: torch.Tensor | None) -> None:
        """Add a parameter whose reduced gradient is not finite; `own` is this rank's gradient before the reduction."""
        if number not in self:  # one that is dense on some ranks and sparse on others is found in both parts
            self[number] = nonfinite_kinds(own) if len(self) < SHOWN else 0

    def scan(self, buckets: Sequence[Bucket], params_of: Callable[[Bucket], list[torch.Tensor | None]]) -> None:
        """Add the non-finite members of the buckets, after unpack()."""
        suspects = find_suspects([bucket.reduced_values() for bucket in buckets])
        for bucket in itertools.compress(buckets, suspects):
            params = params_of(bucket)
            for index in bucket.nonfinite_members():
                param = params[index]
                self.add(bucket.layout.numbers[index], None if param is None else param.grad)

    def exchange(self, channel: Channel) -> dict[int, list[int]]:
        """Return the kinds on every rank, [] for parameters beyond SHOWN; every rank of the reduction calls this."""
        if not self:
            return {}
        shown = [*self.values()][:SHOWN]
        table = torch.zeros(len(shown), channel.size, dtype=torch.int32, device="cpu")
        table[:, channel.rank] = torch.tensor(shown, dtype=torch.int32, device="cpu")
        flat = table.view(-1)
        name = "gradients.nonfinite"
        channel.run(name, lambda backend: backend.allreduce_(flat, "max", name))
        rows = flat.view(len(shown), channel.size).tolist()
        return {number: rows[n] if n < SHOWN else [] for n, number in enumerate(self)}


@dataclass
class ReductionPlan:
    """The buckets of one reducer. Outlives the reducer, which a rank that has joined may have deleted."""

    strategy: BucketStrategy
    reducer: weakref.ref[Any]
    layouts: list[BucketLayout] = field(default_factory=list)
    dense: dict[int, set[int]] = field(default_factory=dict)  # by bucket: members known to be dense on all ranks
    is_retired: bool = False  # no rank has the reducer any more

    def make_bucket(self, bucket_index: int, channel: Channel) -> Bucket:
        dense = self.dense.setdefault(bucket_index, set())
        return self.strategy.make_bucket(self.layouts[bucket_index], channel, dense)

    def finish(
        self,
        buckets: Sequence[Bucket],
        channel: Channel,
        assign: Callable[[int, Bucket], list[tuple[int, bool]]],
        params_of: Callable[[Bucket], list[torch.Tensor | None]],
    ) -> dict[int, list[int]]:
        """Finalize and assign the gradients, after all buckets have been waited for; every rank calls this.

        `assign` takes the gradients from a bucket, and returns the members that are reduced separately.

        Returns:
            With check_every, the kinds on every rank of the gradients that are not finite, by the parameter's number.
        """
        for bucket in buckets:
            bucket.unpack()
        self.strategy.commit(buckets)
        report = None if self.strategy.config.check_every is None else NonFiniteReport()
        if report is not None:
            report.scan(buckets, params_of)
        for bucket_index, bucket in enumerate(buckets):
            unbucketed = assign(bucket_index, bucket)
            params = params_of(bucket) if unbucketed else []
            for index, as_dense in unbucketed:
                param = params[index]
                grad = None if param is None else param.grad
                reduced = bucket.reduce_unbucketed(index, grad, as_dense=as_dense)
                if param is not None:
                    param.grad = reduced
                if report is not None and nonfinite_kinds(reduced):
                    report.add(bucket.layout.numbers[index], grad)
            if unbucketed:
                self.unbucket(bucket_index, [index for index, _ in unbucketed])
        return {} if report is None else report.exchange(channel)

    def clear(self) -> None:
        self.layouts.clear()
        self.dense.clear()

    def retire(self) -> None:
        """Release the memory of a plan whose reducer no rank has any more; the group keeps its place in the order."""
        self.is_retired = True
        self.strategy = BucketStrategy(self.strategy.config)  # without residuals, which have the size of the model
        self.clear()

    def unbucket(self, bucket_index: int, members: Sequence[int]) -> None:
        """Reduce these members of a bucket separately from now on: Note [sparse gradients]."""
        layout = self.layouts[bucket_index]
        if not layout.unbucketed.issuperset(members):
            self.layouts[bucket_index] = replace(layout, unbucketed=layout.unbucketed.union(members))


def active_plans(group: Group) -> list[ReductionPlan]:
    """Return the plans that are not retired, the same on every rank."""
    return [*filterfalse(IS_RETIRED, group.reducers)]


class DueFlags:
    """An exchange of which reducers are due: one flag for each of the group's, and one of a rank that has not joined.

    It retires the plans whose reducer no rank has any more. A rank that alone has deleted a reducer may still join, and
    follow its reductions.
    """

    IS_HERE, IS_DUE = 1, 2

    def __init__(self, group: Group, due: Sequence[int] = (), *, has_joined: bool = False) -> None:
        self._plans: list[ReductionPlan] = [*group.reducers]
        flags = [0 if plan.reducer() is None else self.IS_HERE for plan in self._plans] + [int(not has_joined)]
        for number in due:
            flags[number] = self.IS_DUE
        self.have_all_joined = False
        self._flags = torch.tensor(flags, dtype=torch.int32, device="cpu")
        name = "gradients.due"
        self._work = group.gradients.start(name, lambda backend: backend.allreduce_(self._flags, "max", name))

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> list[int]:
        """Return the numbers of the reducers that are due on any rank."""
        self._work.wait()
        flags = self._flags.tolist()
        for plan, flag in zip(self._plans, flags, strict=False):
            if flag == 0 and not plan.is_retired:
                plan.retire()
        self.have_all_joined = not flags[-1]
        return [number for number, flag in enumerate(flags[:-1]) if flag == self.IS_DUE]
