"""How a rank that has joined goes through the others' rounds of gradients: with zeros, whose result it drops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dualdist.ddp.bucket_plan import DROPS, HAS_JOINED, TAKES_PART
from dualdist.ddp.nonfinite import NonFiniteReport, kinds_of
from dualdist.ddp.reduction_plan import ReductionPlan, launch_due, running

if TYPE_CHECKING:
    from dualdist.backends.base import Work
    from dualdist.collectives.group import Group
    from dualdist.ddp.buckets import Bucket


class JoinedRank:
    """Takes part in the rounds of a group's other ranks.

    The first message of a round is under way all the time: when it arrives, the others have begun a round, or all have
    joined. It is the flags that say which optimizers are due or, where the group has one only, that one's first bucket.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._all_rounds: list[ReductionPlan] = group.reducers
        self._flags: torch.Tensor | None = None
        self._work: Work | None = None
        self._first: Bucket | None = None
        self._is_over = len(running(group)) < 2 and not any(rounds.buckets for rounds in running(group))
        for rounds in self._all_rounds:
            reducer = rounds.reducer()
            if reducer is not None:
                reducer.drop_interrupted()
        self._begin()

    def arrived(self) -> bool:
        """Whether the others have begun a round."""
        if self._is_over:
            return False
        if self._first is not None:
            return self._first.done()
        return self._work is not None and self._work.done()

    def follow(self) -> None:
        """Go through the round that has begun; waits for its first message if need be."""
        if self._first is not None:
            self._first.wait()
            self._is_over = not (self._first.any_rank_set(TAKES_PART) or self._first.any_rank_set(DROPS))
            if not self._is_over:
                self._go_through(running(self._group)[0], self._first)
        elif self._work is not None and self._flags is not None:
            self._work.wait()
            self._is_over = not self._flags[-1]
            for rounds, is_due in zip(self._all_rounds, self._flags, strict=False):
                if is_due and rounds.buckets:
                    self._go_through(rounds, self._launched(rounds, 0))
        self._begin()

    def finish(self) -> None:
        """All have joined: the message under way, which all have sent, arrives."""
        while not self._is_over:
            self.follow()

    def _begin(self) -> None:
        if self._is_over:
            return
        rounds = running(self._group)
        if len(rounds) == 1:
            self._first = self._launched(rounds[0], 0)
        else:
            self._flags = torch.zeros(len(self._all_rounds) + 1, dtype=torch.int32, device="cpu")
            self._work = launch_due(self._group, self._flags)

    def _go_through(self, rounds: ReductionPlan, first: Bucket) -> None:
        buckets = [first, *(self._launched(rounds, place) for place in range(1, len(rounds.buckets)))]
        for bucket in buckets:
            bucket.wait()
        if self._group.waits is not None:
            self._group.waits.followed(self._group.waits.rounds)
        if buckets[-1].any_rank_set(DROPS):
            return
        for bucket in buckets:
            bucket.unpack()
        blame = None if rounds.recipe.check_every is None else NonFiniteReport()
        if blame is not None:
            blame.look(buckets, lambda place, member: None)
        for place, bucket in enumerate(buckets):
            apart = bucket.to_reduce_apart(bucket.read_flags())
            for member, as_dense in apart:
                reduced = bucket.reduce_apart(member, None, as_dense=as_dense)
                if blame is not None and kinds_of(reduced):
                    blame.note((place, member), None)
            rounds.set_apart(place, [member for member, _ in apart])
        if blame is not None:
            blame.shared(self._group.gradients)

    def _launched(self, rounds: ReductionPlan, place: int) -> Bucket:
        bucket = rounds.bucket(place, self._group.gradients)
        bucket.launch([None] * len(bucket.plan.shapes), HAS_JOINED)
        return bucket
